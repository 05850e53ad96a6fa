"""The losses: each subclass of Loss in these modules is one that a config can name."""

"""The influence methods: each subclass of Method in these modules is one that a config can name."""

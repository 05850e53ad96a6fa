"""The measures: each subclass of Measure in these modules is one that a config can name."""

"""The detectors: each subclass of Detector in these modules is one that a config can name."""

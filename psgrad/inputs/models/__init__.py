"""Models: built by a factory, their checkpoints, and what they are known by."""

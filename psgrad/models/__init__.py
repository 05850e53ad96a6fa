"""Models: built by a factory, their checkpoints, and their hashes."""

"""psgrad: look at a PyTorch model one training example at a time."""

__version__ = "0.1.0"

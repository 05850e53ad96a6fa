"""Loads the model, the loss and the dataset that a config names."""

"""From the names in a config to a live model, loss and dataset."""

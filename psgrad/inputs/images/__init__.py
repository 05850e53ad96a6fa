"""Images: read by Pillow, prepared as the model wants them."""

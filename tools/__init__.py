"""Programs that make pages of the documentation from the code. `python -m tools.pages` runs them all."""

"""Results -> tables, plots and HTML. Nothing here computes on a model."""

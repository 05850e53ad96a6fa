"""Tables, plots, HTML pages and CI formats, made from results. Nothing here computes on a model."""

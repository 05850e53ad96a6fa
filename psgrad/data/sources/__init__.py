"""Datasets: the files and the Python objects that rows are read from."""

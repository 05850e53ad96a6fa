"""Timings; each script runs by itself."""

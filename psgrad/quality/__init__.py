"""Outliers and gates: statistics on finished tables, without torch."""

"""Who is an outlier, and what passes a gate: statistics on finished tables, without torch."""

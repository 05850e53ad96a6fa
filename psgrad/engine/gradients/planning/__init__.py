"""What things cost: a machine's constants, the price of each order of contraction, and what a whole pass will take before it runs."""

"""Influence: which training examples made the model do this."""

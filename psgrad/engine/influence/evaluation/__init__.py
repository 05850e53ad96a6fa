"""How well scores predict what retraining does: models that are trained again, metrics with intervals, and
controls.
"""

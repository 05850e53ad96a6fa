"""How well scores foretell what retraining does: models that are trained again, metrics with intervals, and
controls.
"""

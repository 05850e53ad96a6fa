"""The comparison of scores with retraining: models that are trained again, metrics with intervals, and
controls.
"""

"""The data flow of each command, from a config to a run folder: one module for each command, and what they
share.
"""

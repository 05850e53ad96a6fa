"""Rows of (projected) gradients: made once, kept in memory or on the disk, and asked by the methods that need
no more than them.
"""

"""Rows of (projected) gradients: computed once, kept in memory or on the disk, and read by the methods that
need no more than them.
"""

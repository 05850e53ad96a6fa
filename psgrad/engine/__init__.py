"""The engine: function transforms, deferred per-sample gradients, and what is computed from them. It needs
torch alone.
"""

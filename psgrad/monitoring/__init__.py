"""Watches a training loop: the gradients of single rows of its batches, and the rows of spikes."""

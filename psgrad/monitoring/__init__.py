"""Per-row gradients of the batches that a training loop is at: norms, noise scale, and the rows of spikes."""

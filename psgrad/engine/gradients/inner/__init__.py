"""Inner products of the per-sample gradients of two sets of samples, without the gradients."""

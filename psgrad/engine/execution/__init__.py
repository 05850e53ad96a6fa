"""Rows through a model, chunk by chunk: chunk sizes, memory, loading, streaming, replay, self-check."""

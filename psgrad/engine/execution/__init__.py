"""Rows through a model, chunk by chunk: chunk sizes, memory, loading, streaming, replay and the self-check."""

"""Attention over the paged KV cache: the batch of a step, the backend protocol, one file per backend."""

"""Attention over the paged cache: the batch of a step, the backend protocol, one file per backend."""

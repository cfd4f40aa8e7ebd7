"""Kernels in Triton, each beside its torch reference."""

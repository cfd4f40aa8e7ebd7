"""Triton kernels; each has a torch reference in `kernels/reference`."""

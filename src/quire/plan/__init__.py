"""Capacity planning without a device: the memory of a model, where it fits, and its expected speed."""

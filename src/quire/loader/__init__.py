"""Loading a model from a checkpoint on disk onto a device."""

from quire.loader.load import load_model

__all__ = ["load_model"]

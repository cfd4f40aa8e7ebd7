"""From a checkpoint on disk to a model on a device."""

from quire.loader.load import load_model

__all__ = ["load_model"]

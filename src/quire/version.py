"""The version, for whoever reports it."""

__version__ = "0.1.0"

"""Adapters over HTTP: the names that a server answers to beside the model's own."""

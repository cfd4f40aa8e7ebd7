"""Weights: how linear layers and experts hold theirs and multiply by them, one file per format."""

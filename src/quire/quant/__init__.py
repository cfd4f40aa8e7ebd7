"""Weights: storage and matmuls of linear layers and experts, one file per format."""

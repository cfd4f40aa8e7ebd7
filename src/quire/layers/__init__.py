"""The layers that model files are made of."""

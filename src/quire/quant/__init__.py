"""Linear methods: how a linear layer holds its weight and multiplies by it, one file per format."""

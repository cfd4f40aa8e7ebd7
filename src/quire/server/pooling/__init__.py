"""The routes of pooling models: vectors, classes, scores."""

"""Routes of pooling models: embeddings, classification, scores."""

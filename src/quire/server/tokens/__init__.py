"""Routes for token ids: tokenize, render and generate."""

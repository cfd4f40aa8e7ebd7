"""Texts and conversations as tokens, and tokens as answers."""

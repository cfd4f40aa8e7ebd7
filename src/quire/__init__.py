"""Quire: an LLM inference and serving engine."""

"""Batch files in OpenAI's format: JSON lines of requests."""

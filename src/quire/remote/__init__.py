"""A client of OpenAI-compatible servers, optimized for many concurrent streams."""

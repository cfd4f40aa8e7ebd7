"""A client for OpenAI-compatible servers, made for many streams at little cost."""

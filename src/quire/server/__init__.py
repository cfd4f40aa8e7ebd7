"""The HTTP face of the engine: OpenAI-compatible routes, and those of the operator."""

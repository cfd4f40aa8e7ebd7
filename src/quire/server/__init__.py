"""The HTTP server: OpenAI-compatible routes, and routes for operators."""

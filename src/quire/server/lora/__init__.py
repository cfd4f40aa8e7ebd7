"""LoRA adapters of the HTTP server."""

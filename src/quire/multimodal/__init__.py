"""Media of prompts: fetching, decoding, processing, caching. Nothing here imports torch."""

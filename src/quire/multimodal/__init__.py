"""Images, videos and audio of prompts: fetching, decoding, processing, caching. Nothing imports torch."""

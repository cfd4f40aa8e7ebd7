"""Images, videos and audio of prompts: fetching, decoding, processing, caching. No file here imports
torch."""

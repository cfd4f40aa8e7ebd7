"""Media on their way into prompts: fetched, decoded, processed, counted, kept. Nothing here knows torch."""

"""Files of requests, answered line by line: OpenAI's batch format."""

"""/v1/responses: OpenAI's Responses API, built on the chat completion path."""

"""/v1/responses: OpenAI's newer API, on the same way to the engine as chats."""

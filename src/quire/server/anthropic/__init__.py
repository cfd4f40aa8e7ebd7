"""/v1/messages: conversations as Anthropic's clients hold them."""

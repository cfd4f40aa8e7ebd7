"""How much one step may hold."""


class Limits:
    """The most rows and tokens of a step, and the most tokens that one request gets in it."""

    def __init__(self, *, max_rows: int, max_tokens: int, longest_chunk: int = 0) -> None:
        self.max_rows = max_rows
        self.max_tokens = max_tokens
        self.longest_chunk = longest_chunk or max_tokens

    @property
    def max_chunk(self) -> int:
        """The most tokens of one request that any step can hold."""
        return min(self.longest_chunk, self.max_tokens)

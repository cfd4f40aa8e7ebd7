"""PrefillLimit: the number of prompt tokens in a step while other tenants wait for their next tokens."""

from collections import deque

SLOWDOWN = 2.5
"""Largest factor by which prompts of other tenants may lengthen a step over the time of its decodes alone."""
SHORT_S = 0.05
"""Seconds that a step may always take, whatever its decodes alone take."""
LEAST_TOKENS = 8
"""Prompt tokens that every step may have, so that prompts make progress."""
FIRST_TOKENS = 64
"""Prompt tokens of a step before the cost of a prompt token is measured."""
NUM_SAMPLES = 8
"""Number of recent steps kept of each kind. Only the fastest counts: other steps may have been delayed."""


class PrefillLimit:
    """Learns the cost of decodes and of a prompt token from finished steps."""

    def __init__(self) -> None:
        self._decode_s: deque[float] = deque(maxlen=NUM_SAMPLES)
        self._token_s: deque[float] = deque(maxlen=NUM_SAMPLES)

    def learn(self, num_decodes: int, num_prompt_tokens: int, seconds: float) -> None:
        """Record the duration of a step."""
        if not num_prompt_tokens:
            self._decode_s.append(seconds)
        elif not num_decodes:
            self._token_s.append(seconds / num_prompt_tokens)
        elif self._decode_s:
            self._token_s.append(max(seconds - min(self._decode_s), 0.0) / num_prompt_tokens)

    def limit(self, max_tokens: int) -> int:
        """Return the number of prompt tokens, at most `max_tokens`, that the next step may have beside its
        decodes."""
        if not self._decode_s or not self._token_s:
            return min(FIRST_TOKENS, max_tokens)
        decode_s, token_s = min(self._decode_s), min(self._token_s)
        left_s = max(SLOWDOWN * decode_s, SHORT_S) - decode_s
        if left_s >= max_tokens * token_s:
            return max_tokens
        return min(max(int(left_s / token_s), LEAST_TOKENS), max_tokens)

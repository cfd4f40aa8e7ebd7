"""PromptPace: how many prompt tokens a step may have while other tenants wait for their next tokens."""

from collections import deque

SLOWDOWN = 2.5
"""Prompts of others may make a step at most this many times as long as its decodes alone."""
SHORT_S = 0.05
"""A step of this length is short enough for every reader, whatever its decodes alone take."""
LEAST_TOKENS = 8
"""Prompt tokens that every step may have, so that prompts get on."""
FIRST_TOKENS = 64
"""Prompt tokens of a step while it is not known what one costs."""
NUM_SAMPLES = 8
"""Steps that are remembered of each kind. The quickest one counts: others may have waited for something."""


class PromptPace:
    """Learns from finished steps what decodes and what a prompt token cost."""

    def __init__(self) -> None:
        self._decode_s: deque[float] = deque(maxlen=NUM_SAMPLES)
        self._token_s: deque[float] = deque(maxlen=NUM_SAMPLES)

    def learn(self, num_decodes: int, num_prompt_tokens: int, seconds: float) -> None:
        """Note how long a step took."""
        if not num_prompt_tokens:
            self._decode_s.append(seconds)
        elif not num_decodes:
            self._token_s.append(seconds / num_prompt_tokens)
        elif self._decode_s:
            self._token_s.append(max(seconds - min(self._decode_s), 0.0) / num_prompt_tokens)

    def limit(self, most: int) -> int:
        """Return how many prompt tokens, `most` at the most, the next step may have beside its decodes."""
        if not self._decode_s or not self._token_s:
            return min(FIRST_TOKENS, most)
        decode_s, token_s = min(self._decode_s), min(self._token_s)
        left_s = max(SLOWDOWN * decode_s, SHORT_S) - decode_s
        if left_s >= most * token_s:
            return most
        return min(max(int(left_s / token_s), LEAST_TOKENS), most)

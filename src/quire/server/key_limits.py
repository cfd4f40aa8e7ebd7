"""The ledger of API keys: their open requests and used tokens, and the limits on both (docs/keys.md)."""

import hmac
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from quire.errors import TooMany
from quire.metrics.api_keys import KeyAccount, KeyPages
from quire.server.api_keys import Key, digest, key_names


class Ledger:
    """The keys of a server, with their open requests and used tokens over all API processes.

    tokens_per_minute is a token bucket that fills in a minute. A request is admitted while the bucket is not
    empty. The prompt is deducted after its tokenization, and the output as it is generated. The bucket may
    therefore become negative; then no request is admitted until it is positive again.
    """

    def __init__(
        self, keys: Sequence[Key], pages: KeyPages | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Create the accounts. All API processes share `pages`, the memory with the counters of the keys, and
        must use the same `clock`."""
        self.keys = tuple(keys)
        named = [key for key in self.keys if key.name]
        self._pages = pages or KeyPages(key_names(keys))
        self._numbers = {key.digest: number for number, key in enumerate(named)}
        self._accounts = [
            KeyAccount(number, key.weight, self._pages, key.target) for number, key in enumerate(named)
        ]
        self._clock = clock

    def find(self, presented: bytes) -> Key | None:
        """Return the key that equals `presented`, or None. All keys are compared, so that the time does not
        reveal which key matches."""
        sent_digest, match = digest(presented), None
        for key in self.keys:
            if hmac.compare_digest(sent_digest, key.digest):
                match = key
        return match

    def account(self, key: Key) -> KeyAccount | None:
        return self._accounts[self._numbers[key.digest]] if key.name else None

    def enter(self, key: Key, *, tokenless: bool = False) -> TooMany | None:
        """Admit a request and return None, or return the error that refuses it. The caller must call `leave`
        when an admitted request ends. A `tokenless` request does not use the model and is exempt from
        tokens_per_minute."""
        if not key.name:
            return None
        number, pages = self._numbers[key.digest], self._pages
        if key.max_concurrency is None and key.tokens_per_minute is None:
            pages.add(number, "requests")
            pages.add(number, "running")
            return None
        with pages.agreed(number) as common:
            refused = self._check_concurrency(key, number)
            if refused is None and not tokenless:
                refused = self._check_tokens(key, number, common)
            for counter in ("requests", "running") if refused is None else refused[:1]:
                pages.add(number, counter)
        return None if refused is None else refused[1]

    def leave(self, key: Key) -> None:
        if key.name:
            self._pages.add(self._numbers[key.digest], "running", -1)

    def _check_concurrency(self, key: Key, number: int) -> tuple[str, TooMany] | None:
        limit = key.max_concurrency
        if limit is None or self._pages.total(number, "running") < limit:
            return None
        return "concurrency", TooMany(
            f"Rate limit of key {key.name!r}: max_concurrency is {limit}, and {limit} of its requests are "
            "being answered. Try again when one of them has ended, in 1 s at the earliest."
        )

    def _check_tokens(self, key: Key, number: int, common: Any) -> tuple[str, TooMany] | None:
        """Return None if tokens_per_minute leaves the key tokens, else the counter of refusals to increase
        and the error. `common`, which all processes share, holds the tokens granted so far and the time of
        the last grant in seconds (0: none yet)."""
        rate = key.tokens_per_minute
        if rate is None:
            return None
        used = sum(self._pages.total(number, counter) for counter in ("prompt_tokens", "generation_tokens"))
        granted_before, granted_at, now = float(common[0]), float(common[1]), self._clock()
        newly_granted = rate * (now - granted_at) / 60 if granted_at else rate
        granted = min(used + rate, granted_before + newly_granted)
        common[:2] = granted, now
        if granted > used:
            return None
        wait_s = max(1, math.ceil((used - granted) * 60 / rate))
        return "tokens", TooMany(
            f"Rate limit of key {key.name!r}: tokens_per_minute is {rate}, and it has used them. Try again "
            f"in {wait_s} s.",
            wait_s,
        )

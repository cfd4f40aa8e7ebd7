"""PrefixMiss: why a part of a prompt was not in the prefix cache."""

import msgspec

MISS_REASONS = {
    "never_seen": "no earlier prompt went on like this",
    "differs": "an earlier prompt has the same beginning and other tokens from there on",
    "evicted": "the blocks were in the cache and have been evicted",
    "other_salt": "an earlier prompt begins with the same tokens and has another cache_salt",
    "other_adapter": "an earlier prompt begins with the same tokens and has another LoRA adapter or none",
    "other_media": "an earlier prompt has the same tokens and other images, videos or audio",
    "no_checkpoint": "the blocks are in the cache, and no checkpoint of SSM states is",
    "too_short": "the prompt has no full block before its last token",
    "skipped": "the request needs results of all prompt tokens, such as prompt_logprobs",
    "off": "prefix caching is off",
}
"""Reasons with their explanation, in the order of the metric."""


class PrefixMiss(msgspec.Struct, omit_defaults=True):
    """Reason for which the prompt from `from_token` on was not in the prefix cache."""

    reason: str
    """One of `MISS_REASONS`."""
    from_token: int = 0
    """Index of the first prompt token that the reason is about."""
    evicted_s: float | None = None
    """Seconds since the eviction, for the reason `evicted`."""
    tier: str | None = None
    """Last tier that had the blocks: `device`, `host` or `disk`."""
    why: str | None = None
    """Explanation why prefix caching is off, for the reason `off`."""
    text: str | None = None
    """Text of the request around `from_token`."""

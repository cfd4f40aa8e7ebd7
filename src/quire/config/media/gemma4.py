"""Gemma 4, which reads: its towers are not supported yet."""

from quire.config.facts import MediaFacts
from quire.config.keys import Keys
from quire.config.media.parts import text_part


def gemma4(keys: Keys) -> tuple[Keys, MediaFacts | None]:
    return text_part(keys, default="gemma4_text"), None


def gemma4_unified(keys: Keys) -> tuple[Keys, MediaFacts | None]:
    return text_part(keys, default="gemma4_unified_text"), None

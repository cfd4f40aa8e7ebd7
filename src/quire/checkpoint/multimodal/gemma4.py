"""Gemma 4: only its decoder is supported yet."""

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.common import text_part
from quire.checkpoint.reader import ConfigReader


def gemma4(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts | None]:
    return text_part(keys, default="gemma4_text"), None


def gemma4_unified(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts | None]:
    return text_part(keys, default="gemma4_unified_text"), None

"""Idefics 3 and SmolVLM: SigLIP over image tiles, and pixel shuffle of the patches."""

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.common import (
    ShuffledFacts,
    check_gather,
    part,
    read_vit,
    text_part,
    token_id,
)
from quire.checkpoint.reader import ConfigReader


def idefics3(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    text = text_part(keys)
    vit = read_vit(part(keys, "vision_config"), hidden=1152, heads=16, patch=32)
    gather = keys.size("scale_factor", 2)
    check_gather(keys.source, vit, gather)
    image_id = token_id(keys, "image_token_id", default=128257)
    facts = ShuffledFacts(vit, text.size("hidden_size"), image_id, gather)
    return text, MediaFacts("idefics3", ("image",), facts)

"""ColQwen2 and ColPali: a small embedding for each token of a page or a query."""

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.common import part
from quire.checkpoint.multimodal.paligemma import paligemma
from quire.checkpoint.multimodal.qwen import qwen2_vl
from quire.checkpoint.reader import ConfigReader


def col_qwen2(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    return qwen2_vl(keys.but(**part(keys, "vlm_config").values))


def col_pali(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    """Read the config.json of ColPali. Its prompts have bidirectional attention, with or without an image."""
    return paligemma(keys.but(**part(keys, "vlm_config").values))

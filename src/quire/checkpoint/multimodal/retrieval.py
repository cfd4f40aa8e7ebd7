"""ColQwen2 and ColPali: a small vector for each token of a page or of a question."""

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.paligemma import paligemma
from quire.checkpoint.multimodal.parts import part
from quire.checkpoint.multimodal.qwen import qwen2_vl
from quire.checkpoint.reader import ConfigReader


def col_qwen2(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    return qwen2_vl(_model(keys))


def col_pali(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    """Which sees all of its texts in both directions, with an image or without."""
    return paligemma(_model(keys))


def _model(keys: ConfigReader) -> ConfigReader:
    """What it is made of, as if that were alone."""
    return ConfigReader(keys.source, {**keys.values, **part(keys, "vlm_config").values})

"""ColQwen2 and ColPali: a small vector for each token of a page or of a question."""

from quire.config.facts import MediaFacts
from quire.config.keys import Keys
from quire.config.media.paligemma import paligemma
from quire.config.media.parts import part
from quire.config.media.qwen import qwen2_vl


def col_qwen2(keys: Keys) -> tuple[Keys, MediaFacts]:
    return qwen2_vl(_model(keys))


def col_pali(keys: Keys) -> tuple[Keys, MediaFacts]:
    """Which sees all of its texts in both directions, with an image or without."""
    return paligemma(_model(keys))


def _model(keys: Keys) -> Keys:
    """What it is made of, as if that were alone."""
    return Keys(keys.source, {**keys.values, **part(keys, "vlm_config").values})

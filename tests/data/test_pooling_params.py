"""What a pooling request may ask for, and what the files of a model make of it."""

from typing import Any

import pytest

from quire.config.pooling import PoolingFacts, StoredPooling, settle
from quire.data.pooling import PoolingParams
from quire.errors import ConfigError, RequestError
from quire.frontend.pooling import completed, second_start

EMBEDS = PoolingFacts(task="embed", type="LAST", size=64, is_matryoshka=True, matryoshka_dimensions=(16, 32))

MEAN = {"pooling_type": "mean"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"use_activation": 1.5}, "use_activation"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": True}, "dimensions"),
        ({"task": "embde"}, "task"),
        ({"step_tag_id": 3}, "step_tag_id"),
    ],
)
def test_mistakes_are_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        PoolingParams(**fields)
    assert caught.value.param == param


def test_the_model_fills_in_what_is_left_open() -> None:
    made = completed(PoolingParams(), EMBEDS, None)
    assert (made.task, made.use_activation, made.dimensions) == ("embed", True, None)
    assert completed(PoolingParams(normalize=False), EMBEDS, None).use_activation is False
    assert completed(PoolingParams(task="token_embed"), EMBEDS, None).skip_reading_prefix_cache
    for wrong in (64, 17):
        with pytest.raises(RequestError, match="only supports"):
            completed(PoolingParams(dimensions=wrong), EMBEDS, None)


def test_types_of_tokens_are_where_the_second_text_begins() -> None:
    assert second_start([0, 0, 1], 3) == 2 and second_start([0, 0], 2) is None and second_start([1], 1) == 0
    for wrong in ([0, 1, 0], [0, 0], [0, 0, 2]):
        with pytest.raises(RequestError, match="zeros and then ones"):
            second_start(wrong, 3)


@pytest.mark.parametrize(
    ("stored", "given", "task", "kind"),
    [
        ({}, {}, None, None),
        ({}, {"runner": "pooling"}, "embed", "LAST"),
        ({}, {"convert": "classify"}, "classify", "LAST"),
        ({"is_embedder": True, "type": "MEAN"}, {}, "embed", "MEAN"),
        ({"is_embedder": True}, {"runner": "generate"}, None, None),
        ({"architecture": "LlamaForSequenceClassification"}, {}, "classify", "LAST"),
        ({"architecture": "LlamaForSequenceClassification"}, {"convert": "embed"}, "embed", "LAST"),
        ({"architecture": "BertModel"}, {"is_encoder": True}, "embed", "CLS"),
        ({"architecture": "BertForMaskedLM"}, {"is_encoder": True, "pooler": MEAN}, "embed", "MEAN"),
    ],
)  # fmt: skip
def test_what_a_model_is_for(
    stored: dict[str, Any], given: dict[str, Any], task: str | None, kind: str | None
) -> None:
    facts = settle(StoredPooling(**stored), **({"is_encoder": False, "hidden": 8} | given))
    assert (facts and facts.task, facts and facts.type) == (task, kind)


def test_one_class_has_a_sigmoid() -> None:
    stored = StoredPooling("LlamaForSequenceClassification", labels=("yes",))
    facts = settle(stored, is_encoder=False, hidden=8)
    assert facts is not None and (facts.size, facts.activation) == (1, "sigmoid")
    with pytest.raises(ConfigError, match="both directions"):
        settle(StoredPooling(both_ways=True), is_encoder=False, hidden=8, runner="pooling")
    with pytest.raises(ConfigError, match="does not generate"):
        settle(stored, is_encoder=False, hidden=8, runner="generate")

"""Tests of pooling parameters and of their defaults from model files."""

from typing import Any

import pytest

from quire.checkpoint.pooling import PoolingFacts, StoredPooling, resolve_pooling
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
        ({"step_tag_id": -1}, "step_tag_id"),
        ({"returned_token_ids": 3}, "returned_token_ids"),
        ({"returned_token_ids": [True]}, "returned_token_ids"),
    ],
)
def test_invalid_values_are_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        PoolingParams(**fields)
    assert caught.value.param == param


def test_model_defaults_fill_unset_fields() -> None:
    made = completed(PoolingParams(), EMBEDS, None)
    assert (made.task, made.use_activation, made.dimensions) == ("embed", True, None)
    assert completed(PoolingParams(normalize=False), EMBEDS, None).use_activation is False
    assert completed(PoolingParams(task="token_embed"), EMBEDS, None).skip_reading_prefix_cache
    for wrong in (64, 17):
        with pytest.raises(RequestError, match="only supports"):
            completed(PoolingParams(dimensions=wrong), EMBEDS, None)


def test_token_types_begin_with_the_second_text() -> None:
    assert second_start([0, 0, 1], 3) == 2 and second_start([0, 0], 2) is None and second_start([1], 1) == 0
    for wrong in ([0, 1, 0], [0, 0], [0, 0, 2]):
        with pytest.raises(RequestError, match="zeros and then ones"):
            second_start(wrong, 3)


@pytest.mark.parametrize(
    ("stored", "overrides", "task", "kind"),
    [
        ({}, {}, None, None),
        ({}, {"runner": "pooling"}, "embed", "LAST"),
        ({}, {"convert": "classify"}, "classify", "LAST"),
        ({"is_embedder": True, "type": "MEAN"}, {}, "embed", "MEAN"),
        ({"is_embedder": True}, {"runner": "generate"}, None, None),
        ({"architecture": "LlamaForSequenceClassification"}, {}, "classify", "LAST"),
        ({"architecture": "LlamaForSequenceClassification"}, {"convert": "embed"}, "embed", "LAST"),
        ({"architecture": "BertModel"}, {"is_encoder": True}, "embed", "CLS"),
        ({}, {"pooler": {"returned_token_ids": [4, 7]}, "runner": "pooling"}, "classify", "LAST"),
        ({"head": "tokens", "architecture": "QForTokenClassification"}, {}, "classify", "LAST"),
        ({"architecture": "BertForMaskedLM"}, {"is_encoder": True, "pooler": MEAN}, "embed", "MEAN"),
    ],
)  # fmt: skip
def test_task_of_a_model(
    stored: dict[str, Any], overrides: dict[str, Any], task: str | None, kind: str | None
) -> None:
    facts = resolve_pooling(StoredPooling(**stored), **({"is_encoder": False, "hidden": 8} | overrides))
    assert (facts and facts.task, facts and facts.type) == (task, kind)


def test_single_class_uses_a_sigmoid() -> None:
    stored = StoredPooling("LlamaForSequenceClassification", labels=("yes",))
    facts = resolve_pooling(stored, is_encoder=False, hidden=8)
    assert facts is not None and (facts.size, facts.activation) == (1, "sigmoid")
    with pytest.raises(ConfigError, match="does not generate"):
        resolve_pooling(stored, is_encoder=False, hidden=8, runner="generate")


STEPS = {"pooling_type": "STEP", "step_tag_id": 9}


@pytest.mark.parametrize(
    ("stored", "overrides", "tasks"),
    [
        ({}, {"runner": "pooling"}, ("embed", "token_embed")),
        ({}, {"runner": "pooling", "pooler": {"pooling_type": "all"}}, ("token_embed", "embed")),
        ({}, {"convert": "classify", "pooler": STEPS}, ("token_classify", "classify")),
        ({"head": "tokens"}, {"runner": "pooling"}, ("token_classify",)),
        ({"head": "tokens"}, {"runner": "pooling", "convert": "embed"}, ("embed", "token_embed")),
    ],
)
def test_supported_and_default_tasks(
    stored: dict[str, Any], overrides: dict[str, Any], tasks: tuple[str, ...]
) -> None:
    facts = resolve_pooling(
        StoredPooling(labels=("a", "b"), **stored), is_encoder=False, hidden=8, **overrides
    )
    assert facts is not None and facts.tasks == tasks
    assert completed(PoolingParams(), facts, None).task == tasks[0]
    if "classify" not in tasks:
        with pytest.raises(RequestError) as caught:
            completed(PoolingParams(task="classify"), facts, None)
        assert caught.value.param == "task"


def test_step_token_ids_are_filled_in() -> None:
    pooler = STEPS | {"returned_token_ids": [7, 4]}
    facts = resolve_pooling(StoredPooling(), is_encoder=False, hidden=8, runner="pooling", pooler=pooler)
    assert facts is not None and facts.needs_all_states == "STEP"
    assert (facts.label_ids, facts.labels, facts.returned_token_ids) == ((7, 4), ("7", "4"), ())
    plain = completed(PoolingParams(), facts, None)
    assert (plain.step_tag_id, plain.returned_token_ids) == (9, None)
    params = completed(PoolingParams(step_tag_id=3, returned_token_ids=[4]), facts, None)
    assert (params.step_tag_id, params.returned_token_ids) == (3, [1])
    with pytest.raises(RequestError, match="among those of this model: 7, 4"):
        completed(PoolingParams(returned_token_ids=[5]), facts, None)
    with pytest.raises(RequestError, match="pooling_type STEP"):
        completed(PoolingParams(step_tag_id=3), EMBEDS, None)
    with pytest.raises(RequestError, match="pooling_type STEP"):
        completed(PoolingParams(task="classify", step_tag_id=3), facts, None)


@pytest.mark.parametrize(
    "pooler",
    [
        {"pooling_type": "SOME"},
        {"seq_pooling_type": "ALL"},
        {"tok_pooling_type": "LAST"},
        {"pooling_type": "ALL", "step_tag_id": 1},
        {"step_tag_id": "x"},
        {"pooling_type": "STEP", "returned_token_ids": 5},
    ],
)
def test_invalid_pooler_configs_are_rejected(pooler: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"pooler_config: (pooling_type|step_tag_id|returned_token_ids)"):
        resolve_pooling(StoredPooling(), is_encoder=False, hidden=8, runner="pooling", pooler=pooler)

"""Tests of `batch_invariant`: its sources, and models that do not have the mode on a GPU."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.checkpoint.facts import ArchFacts, LayerFacts, RopeFacts
from quire.config.batch_invariance import resolve_batch_invariant
from quire.config.env import Env
from quire.config.machine import Machine
from quire.errors import ConfigError

FACTS = ArchFacts("LlamaForCausalLM", 320, 64, 128, 4, 2, 16, 1e-5, (LayerFacts(RopeFacts()),) * 2)
CPU = Machine("cpu", "a CPU", 1, 1 << 34, 1 << 33, 4)
GPU = Machine("cuda", "a GPU", 1, 1 << 36, 1 << 36, 8, (9, 0), bf16=True, fp16=True)


@pytest.mark.parametrize("machine", [CPU, GPU], ids=["cpu", "gpu"])
def test_setting_wins_over_the_environment(machine: Machine) -> None:
    def resolved(env: dict[str, str], **values: Any) -> bool:
        return resolve_batch_invariant(FACTS, machine, values, Env.read(env), pools=False)

    assert not resolved({}) and resolved({}, batch_invariant=True)
    for name in ("VLLM_BATCH_INVARIANT", "QUIRE_BATCH_INVARIANT"):
        assert resolved({name: "1"}) and not resolved({name: "1"}, batch_invariant=False)


@pytest.mark.parametrize(
    ("settings", "changes", "words"),
    [
        ({"attention_backend": "flash_attn"}, {}, "TRITON_ATTN, not FLASH_ATTN"),
        ({"enable_eplb": True}, {}, "moves experts"),
        ({"runner": "pooling"}, {}, "with pooling"),
        ({}, {"altup": SimpleNamespace()}, "AltUp"),
        ({}, {"borrowed": SimpleNamespace()}, "code of transformers"),
        ({}, {"media": SimpleNamespace()}, "language_model_only"),
    ],
)
def test_models_without_the_mode_are_refused_on_a_gpu(
    settings: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    facts, pools = replace(FACTS, **changes), settings.get("runner") == "pooling"
    values = settings | {"batch_invariant": True}
    with pytest.raises(ConfigError, match=words):
        resolve_batch_invariant(facts, GPU, values, Env(cache_root=Path("/nowhere")), pools=pools)
    assert resolve_batch_invariant(facts, CPU, values, Env(cache_root=Path("/nowhere")), pools=pools)

"""Tests of M-RoPE on a GPU against a CPU: in graphs, eager, and with drafts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from on_gpu import opened
from oracle import make_tiny
from tiny import prompts_of

from quire import LLM, SamplingParams
from quire.data.multimodal import Array, Media
from quire.data.step_plan import Admission
from quire.worker.rows import Rows

pytestmark = pytest.mark.gpu
ROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [16, 8, 8]}
SIZE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rope_parameters": ROPE,
}
WAYS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
}
PROMPTS = [*prompts_of(40, 70, 9), [5, 6, 7, 8] * 6]


def positions_of(length: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return positions of an image of 4 x 5 after 3 tokens."""
    text, grid = np.tile(np.arange(length), (3, 1)), np.indices((4, 5)).reshape(2, -1)
    text[:, 3:23] = 3 + np.stack([np.zeros(20, np.int64), *grid])[:, : max(length - 3, 0)]
    text[:, 23:] = np.arange(8, 8 + max(length - 23, 0))
    return text.astype(np.int32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("turns"), **SIZE)[0]


@pytest.fixture(scope="module", autouse=True)
def uses_mrope() -> Iterator[list[bool]]:
    """Switch M-RoPE positions of prompts on and off."""
    admit, uses_mrope = Rows._admit, [True]

    def with_positions(self: Rows, new: Admission, step: int) -> None:
        if uses_mrope[0] and new.prompt_len > 23:
            new.media = Media([], Array.of(positions_of(new.prompt_len)))
        admit(self, new, step)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Rows, "_admit", with_positions)
        yield uses_mrope


def generated_ids(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def expected(model: Path, uses_mrope: list[bool]) -> list[list[int]]:
    """Return the CPU's outputs, which differ from those without positions."""
    llm = opened(model, "float32", enforce_eager=True, attention_backend="TORCH_SDPA")
    actual = generated_ids(llm)
    uses_mrope[0] = False
    assert actual != generated_ids(llm)
    uses_mrope[0] = True
    return actual


@pytest.mark.parametrize("way", WAYS)
def test_mrope_in_graphs_and_with_drafts(way: str, model: Path, expected: list[list[int]]) -> None:
    assert generated_ids(opened(model, "float32", **WAYS[way])) == expected

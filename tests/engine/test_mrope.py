"""Tests of M-RoPE: logits and tokens of whole engines against transformers."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuda_on_cpu import use_fake_device
from drafted import EagerPolicy
from oracle import make_tiny
from spec_reference import derive_reference, look_up_reference, verify_reference
from tiny import generate_preempted, logits_of, open_tiny, prompts_of
from torch import Tensor

from quire import LLM
from quire.data.multimodal import Array, Media
from quire.data.step_plan import Admission
from quire.worker.rows import Rows

Positions = np.ndarray[Any, np.dtype[np.int32]]
PROMPTS = [*prompts_of(41, 17, 30, 9), [5, 6, 7, 8] * 5]
SECTIONS: dict[str, dict[str, Any]] = {
    "qwen2": {"rope_type": "default", "mrope_section": [2, 3, 3]},
    "qwen3": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
}


def positions_of(length: int) -> Positions:
    """Return positions of text, two images of 3 x 4 and 2 x 2 with text between them, and text."""
    parts, at = [np.tile(np.arange(4), (3, 1))], 4
    for rows, columns in ((3, 4), (2, 2)):
        grid = np.stack([np.zeros(rows * columns, np.int64), *np.indices((rows, columns)).reshape(2, -1)])
        parts.append(at + grid)
        at += max(rows, columns)
        parts.append(np.tile(np.arange(at, at + 3), (3, 1)))
        at += 3
    parts.append(np.tile(np.arange(at, at + length), (3, 1)))
    return np.concatenate(parts, 1)[:, :length].astype(np.int32)


POSITIONS_BY_PROMPT = {tuple(ids): positions_of(len(ids)) for place, ids in enumerate(PROMPTS) if place != 3}
"""All prompts but one have items."""


@pytest.fixture(autouse=True)
def mrope_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pass M-RoPE positions to the rows independently of the engine."""
    admit = Rows._admit

    def with_positions(self: Rows, new: Admission, step: int) -> None:
        positions = POSITIONS_BY_PROMPT.get(tuple(new.token_ids[: new.prompt_len]))
        new.media = None if positions is None else Media([], Array.of(positions))
        admit(self, new, step)

    monkeypatch.setattr(Rows, "_admit", with_positions)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @lru_cache
    def made(family: str) -> tuple[Path, Any]:
        import transformers

        rope = SECTIONS[family] | {"rope_theta": 100.0}
        path, hf = make_tiny(family, tmp_path_factory.mktemp("turns"), rope_parameters=rope)
        kind = {"qwen2": "Qwen2VLText", "qwen3": "Qwen3VLText"}[family]
        config = getattr(transformers, f"{kind}Config")(**hf.config.to_dict())
        text = getattr(transformers, f"{kind}Model")(config).eval()
        text.load_state_dict(hf.model.state_dict())
        hf.model = text
        return path, hf

    return made


@torch.inference_mode()
def expected_of(hf: Any, prompt: list[int], output: list[int]) -> Tensor:
    """Return transformers' logits after each generated token."""
    ids = [*prompt, *output]
    places = POSITIONS_BY_PROMPT.get(tuple(prompt), np.tile(np.arange(len(prompt)), (3, 1)))
    behind = places.max() + 1 + np.arange(len(output))
    positions = np.concatenate([places, np.tile(behind, (3, 1))], 1)
    states = hf.model(input_ids=torch.tensor([ids]), position_ids=torch.from_numpy(positions)[:, None].long())
    logits: Tensor = hf.lm_head(states.last_hidden_state[0, len(prompt) - 1 : -1])
    return logits


def check(hf: Any, llm: LLM, at: tuple[int, ...] = (2, 4)) -> None:
    for output in generate_preempted(llm, PROMPTS, 8, at=at):
        outputs = list(output.outputs[0].token_ids)
        expected = expected_of(hf, list(output.prompt_token_ids), outputs)
        torch.testing.assert_close(logits_of(output), expected, atol=1e-3, rtol=1e-3)
        assert outputs == expected.argmax(-1).tolist()


DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
WAYS: dict[str, dict[str, Any]] = {
    "whole": {"max_num_batched_tokens": 256},
    "chunks": {"max_num_batched_tokens": 11},
    "drafts": {"max_num_batched_tokens": 24, "speculative_config": DRAFTS},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", SECTIONS)
def test_mrope_on_cpu_matches_transformers(family: str, way: str, models: Any) -> None:
    """Check images split between steps, decodes beside them, preemption and prompts without items."""
    path, hf = models(family)
    check(hf, open_tiny(path, max_model_len=64, max_num_seqs=6, enable_prefix_caching=False, **WAYS[way]))


@pytest.mark.parametrize("drafted", [False, True])
def test_mrope_on_a_device_that_runs_ahead(
    drafted: bool, models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check graphs with and without drafts that the host does not have yet."""
    path, hf = models("qwen2")
    use_fake_device(monkeypatch)
    here = "quire.worker.cuda.draft_verify."
    monkeypatch.setattr(here + "derive", derive_reference)
    monkeypatch.setattr(here + "verify", lambda *args: verify_reference(*args[:3], *args[5:]))
    monkeypatch.setattr(here + "look_up", lambda known, step, _, least: look_up_reference(known, step, least))
    settings = {"max_model_len": 64, "max_num_seqs": 4, "num_gpu_blocks_override": 200}
    settings |= {"max_num_batched_tokens": 24, "enable_prefix_caching": False}
    llm = open_tiny(path, **settings, **{"speculative_config": DRAFTS} if drafted else {})
    if drafted:
        drafting = llm.llm_engine.core.scheduler.admitter.drafting
        drafting._draft_length = pace = EagerPolicy()  # type: ignore[union-attr, assignment]
    check(hf, llm, at=())
    assert not drafted or pace.num_held > 0

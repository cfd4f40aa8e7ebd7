"""Tests of engines with draft models and draft heads: outputs do not change."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from heads import HIDDEN, layer_weights, norm_weights, save_head
from oracle import make_tiny
from tiny import open_tiny, prompts_of

from quire import LLM, SamplingParams
from quire.kernels.cpu import native

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_key_value_heads": 1}
LENGTH: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}
ALL_PARAMS = [
    SamplingParams(temperature=0, **LENGTH),
    SamplingParams(temperature=1.0, seed=3, **LENGTH),
    SamplingParams(temperature=0.8, top_p=0.9, seed=4, logprobs=2, **LENGTH),
    SamplingParams(temperature=0.9, seed=5, n=2, repetition_penalty=1.2, **LENGTH),
    SamplingParams(temperature=0, stop_token_ids=list(range(0, 128, 9)), max_tokens=30),
]


class AlwaysDraft:
    """Drafts as many tokens as there are, whatever they cost."""

    num_held = num_drafts = 0

    def admit(self, row: int) -> None: ...

    def lengths(self, rows: Any, available: Any, budget: int) -> Any:
        return np.clip(budget - (np.cumsum(available) - available), 0, available).astype(np.int32)

    def learn(self, rows: Any, num_drafts: Any, num_accepted: Any) -> None:
        self.num_drafts += int(num_drafts.sum())
        self.num_held += int(num_accepted.sum())

    def record_time(self, *numbers: Any) -> None: ...


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("target"))[0]


def answers(llm: LLM) -> list[Any]:
    """Generate for chunked prompts together, and once more with a filled prefix cache."""
    prompts = prompts_of(3, 30, 11, 18, 25)
    actual = []
    for params in (ALL_PARAMS, ALL_PARAMS[::-1]):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        actual += [(answer.token_ids, answer.logprobs) for output in outputs for answer in output.outputs]
    return actual


def numbers(entry: Any) -> Any:
    """Return the logprobs without their decoded texts."""
    return [{token: item.logprob for token, item in place.items()} for place in entry or []]


@pytest.fixture(scope="module")
def plain(target: Path) -> list[Any]:
    return answers(open_tiny(target))


def draft_of(kind: str, folder: Path, target: Path) -> dict[str, Any]:
    if kind == "a head":
        torch.manual_seed(1)
        norms = norm_weights("midlayer.input_layernorm", "midlayer.hidden_norm", "norm")
        weights = layer_weights("midlayer", 2 * HIDDEN) | norms
        weights["fc.weight"] = 0.2 * torch.randn(HIDDEN, 3 * HIDDEN)
        named = {"architectures": ["LlamaForCausalLMEagle3"], "eagle_aux_hidden_state_layer_ids": [0, 1, 1]}
        return {"model": str(save_head(folder / "head", weights, **named))}
    draft = {"model": str(target), "draft_sample_method": "probabilistic"}
    return draft if kind == "itself" else {"model": str(make_tiny("qwen3", folder, **SMALL)[0])}


@pytest.mark.parametrize("kind", ["itself", "another model", "a head"])
def test_draft_models_do_not_change_outputs(
    tmp_path: Path, target: Path, plain: list[Any], kind: str
) -> None:
    """Check with few cache blocks, so that rows are preempted too."""
    speculative = {"num_speculative_tokens": 3} | draft_of(kind, tmp_path, target)
    llm = open_tiny(
        target,
        speculative_config=speculative,
        max_num_batched_tokens=16,
        max_num_seqs=5,
        num_gpu_blocks_override=30,
        max_model_len=96,
    )
    core = llm.llm_engine.core
    core.scheduler.admitter.drafting._draft_length = pace = AlwaysDraft()  # type: ignore[union-attr, assignment]
    actual = answers(llm)
    assert [ids for ids, _ in actual] == [ids for ids, _ in plain]
    for (_, output), (_, expected) in zip(actual, plain, strict=True):
        for place, other in zip(numbers(output), numbers(expected), strict=True):
            assert place == pytest.approx(other, abs=1e-4)
    assert pace.num_drafts > 100 and core.scheduler.num_preemptions
    device = core.executor._worker._runner.device  # type: ignore[attr-defined]
    assert native.library() is None or any(device._tapes._tapes.values()), "no decode was taped"
    assert kind != "itself" or pace.num_held > 0.25 * pace.num_drafts

"""Drafts that a GPU makes and judges by itself: outputs are those without any."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from drafted import Eager
from heads import HIDDEN, add_prediction, layer_weights, norm_weights, save_head
from on_gpu import SETTINGS, opened
from oracle import make_tiny
from tiny import open_tiny, prompts_of

from quire import LLM, SamplingParams

pytestmark = pytest.mark.gpu
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
SIZE: dict[str, Any] = {"hidden_size": 128, "head_dim": 64, "vocab_size": 512, "max_position_embeddings": 512}
ASKED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 0, "repetition_penalty": 1.2},
    {"temperature": 0.9, "top_k": 3, "seed": 2, "logprobs": 2},
    {"temperature": 0, "allowed_token_ids": [5, 6, 7]},
    {"temperature": 0.7, "allowed_token_ids": [5, 6, 7], "seed": 3, "frequency_penalty": 0.3},
    {"temperature": 0, "min_tokens": 20, "logit_bias": {9: 3.0}, "stop_token_ids": [9]},
    {"temperature": 0, "allowed_token_ids": [5, 6, 7], "bad_words_token_ids": [[5, 6], [7, 7, 5]]},
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("drafts"), **SIZE)[0]


def answers(path: Path, **more: Any) -> list[Any]:
    llm = opened(path, "float32", **more)
    params = [SamplingParams(max_tokens=24, ignore_eos=True, **each) for each in ASKED]
    prompts = prompts_of(23, 9, 40, 5, 12, 30, 3, 8)
    return [list(each.outputs[0].token_ids) for each in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def plain(tiny: Path) -> list[Any]:
    return answers(tiny)


@pytest.mark.parametrize(("enforce_eager", "method"), [(False, "ngram"), (True, "ngram"), (False, "suffix")])
def test_outputs_are_those_without_drafts(
    enforce_eager: bool, method: str, tiny: Path, plain: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths that only the device knows, graphs with padded places, two steps in flight, tokens that were
    counted for a penalty and did not hold."""
    pace, asked = Eager(), DRAFTS if method == "ngram" else {"method": method, "num_speculative_tokens": 3}
    monkeypatch.setattr("quire.core.build.Pace", lambda **sizes: pace)
    assert answers(tiny, speculative_config=asked, enforce_eager=enforce_eager) == plain
    assert pace.num_drafts > 0 and (method == "suffix" or 10 < pace.num_held < pace.num_drafts)


ALIKE: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.8}, {"temperature": 1.0, "top_k": 20}]


def all_answers(llm: LLM, params: list[dict[str, Any]]) -> list[Any]:
    """To one prompt alone; to eight beside each other, some in chunks; and to some of them again, whose
    prefixes are there."""
    prompts, found = prompts_of(23, 9, 40, 5, 60, 30, 3, 17), []
    asked = [params[at % len(params)] | {"seed": at} for at in range(len(prompts))]
    for some in ([2], range(8), [4, 2, 0]):
        wanted = [SamplingParams(max_tokens=24, ignore_eos=True, **asked[at]) for at in some]
        outputs = llm.generate([prompts[at] for at in some], wanted, use_tqdm=False)
        found += [list(each.outputs[0].token_ids) for each in outputs]
    return found


def opened_for(path: Path, **more: Any) -> LLM:
    gc.collect()
    torch.cuda.empty_cache()
    return open_tiny(path, **(SETTINGS | {"max_num_seqs": 8, "enable_prefix_caching": True} | more))


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("targets")
    predicting = make_tiny("deepseek_v3", folder, num_hidden_layers=3)[0]
    names = "eh_proj", "enorm", "hnorm", "shared_head.norm"
    join, *norms = (f"model.layers.2.{name}" for name in names)
    weights = norm_weights(*norms) | {f"{join}.weight": 0.2 * torch.randn(HIDDEN, 2 * HIDDEN)}
    add_prediction(predicting, ["model.layers.2", "model.layers.2"], weights)
    return {"mtp": predicting, "llama": make_tiny("llama", folder)[0]}


@pytest.fixture(scope="module")
def expected(targets: dict[str, Path]) -> dict[str, list[Any]]:
    return {name: all_answers(opened_for(path), ALIKE) for name, path in targets.items()}


def draft_of(kind: str, folder: Path, target: Path) -> dict[str, Any]:
    torch.manual_seed(1)
    if kind == "mtp":
        return {"method": "mtp"}
    if kind == "another":
        return {"model": str(make_tiny("qwen3", folder, num_key_value_heads=1)[0])}
    if kind == "eagle":
        weights = layer_weights("layers.0") | {"fc.weight": 0.2 * torch.randn(HIDDEN, 2 * HIDDEN)}
        return {"method": "eagle", "model": str(save_head(folder / "eagle", weights))}
    if kind == "eagle3":
        norms = norm_weights("midlayer.input_layernorm", "midlayer.hidden_norm", "norm")
        weights = layer_weights("midlayer", 2 * HIDDEN) | norms
        weights["fc.weight"] = 0.2 * torch.randn(HIDDEN, 3 * HIDDEN)
        aux_hidden_states = {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]}
        return {"method": "eagle3", "model": str(save_head(folder / "eagle3", weights, **aux_hidden_states))}
    return {"model": str(target), "draft_sample_method": "probabilistic"}


@pytest.mark.parametrize("kind", ["itself", "another", "eagle", "eagle3", "mtp"])
def test_so_are_those_with_a_model_that_drafts(
    kind: str,
    tmp_path: Path,
    targets: dict[str, Path],
    expected: dict[str, list[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Drafts that are captured, padded, made beside prompts, of rows that had none for a while."""
    name, pace = kind if kind in targets else "llama", Eager()
    monkeypatch.setattr("quire.core.build.Pace", lambda **sizes: pace)
    asked = {"num_speculative_tokens": 3} | draft_of(kind, tmp_path, targets[name])
    llm = opened_for(targets[name], speculative_config=asked)
    assert all_answers(llm, ALIKE) == expected[name]
    assert pace.num_drafts > 100
    assert kind != "itself" or pace.num_held > 0.9 * pace.num_drafts

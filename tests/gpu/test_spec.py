"""Tests of drafts that a GPU makes and verifies by itself: outputs match those without drafts."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from drafted import EagerPolicy
from heads import HIDDEN, add_prediction, layer_weights, norm_weights, save_head
from on_gpu import SETTINGS, opened
from oracle import make_tiny
from tiny import open_tiny, prompts_of

from quire import LLM, SamplingParams

pytestmark = pytest.mark.gpu
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
SIZE: dict[str, Any] = {"hidden_size": 128, "head_dim": 64, "vocab_size": 512, "max_position_embeddings": 512}
SAMPLING_FIELDS: list[dict[str, Any]] = [
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
    params = [SamplingParams(max_tokens=24, ignore_eos=True, **item) for item in SAMPLING_FIELDS]
    prompts = prompts_of(23, 9, 40, 5, 12, 30, 3, 8)
    return [list(item.outputs[0].token_ids) for item in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def plain(tiny: Path) -> list[Any]:
    return answers(tiny)


@pytest.mark.parametrize(("enforce_eager", "method"), [(False, "ngram"), (True, "ngram"), (False, "suffix")])
def test_outputs_match_outputs_without_drafts(
    enforce_eager: bool, method: str, tiny: Path, plain: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check lengths known only on the device, padded graphs, two steps in flight, and penalty counts of
    rejected drafts.
    """
    pace, speculative = (
        EagerPolicy(),
        DRAFTS if method == "ngram" else {"method": method, "num_speculative_tokens": 3},
    )
    monkeypatch.setattr("quire.core.build.AdaptiveDraftLength", lambda **sizes: pace)
    assert answers(tiny, speculative_config=speculative, enforce_eager=enforce_eager) == plain
    assert pace.num_drafts > 0 and (method == "suffix" or 10 < pace.num_held < pace.num_drafts)


ALIKE: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.8}, {"temperature": 1.0, "top_k": 20}]


def all_answers(llm: LLM, params: list[dict[str, Any]]) -> list[Any]:
    """Generate for one prompt alone, for eight together with some in chunks, and again with cached
    prefixes.
    """
    prompts, actual = prompts_of(23, 9, 40, 5, 60, 30, 3, 17), []
    fields = [params[at % len(params)] | {"seed": at} for at in range(len(prompts))]
    for some in ([2], range(8), [4, 2, 0]):
        wanted = [SamplingParams(max_tokens=24, ignore_eos=True, **fields[at]) for at in some]
        outputs = llm.generate([prompts[at] for at in some], wanted, use_tqdm=False)
        actual += [list(output.outputs[0].token_ids) for output in outputs]
    return actual


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


@pytest.mark.parametrize("kind", ["ngram", "another"])
@pytest.mark.parametrize("family", ["falcon_h1", "jamba", "lfm2", "mamba2", "qwen3_next"])
def test_drafts_of_models_with_states_do_not_change_outputs(
    family: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check states of captured and padded steps with drafts, of two steps in flight, and of checkpoints."""
    path, pace = make_tiny(family, tmp_path / "target")[0], EagerPolicy()
    expected = all_answers(opened_for(path, mamba_block_size=16), ALIKE[:1])
    monkeypatch.setattr("quire.core.build.AdaptiveDraftLength", lambda **sizes: pace)
    config = DRAFTS if kind == "ngram" else {"num_speculative_tokens": 3} | draft_of(kind, tmp_path, path)
    llm = opened_for(path, mamba_block_size=16, speculative_config=config)
    assert all_answers(llm, ALIKE[:1]) == expected
    assert pace.num_drafts > pace.num_held


@pytest.mark.parametrize("kind", ["itself", "another", "eagle", "eagle3", "mtp"])
def test_draft_models_do_not_change_outputs_on_gpu(
    kind: str,
    tmp_path: Path,
    targets: dict[str, Path],
    expected: dict[str, list[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check captured and padded drafts, drafts beside prompts, and rows that had none for a while."""
    name, pace = kind if kind in targets else "llama", EagerPolicy()
    monkeypatch.setattr("quire.core.build.AdaptiveDraftLength", lambda **sizes: pace)
    speculative = {"num_speculative_tokens": 3} | draft_of(kind, tmp_path, targets[name])
    llm = opened_for(targets[name], speculative_config=speculative)
    assert all_answers(llm, ALIKE) == expected[name]
    assert pace.num_drafts > 100
    assert kind != "itself" or pace.num_held > 0.9 * pace.num_drafts

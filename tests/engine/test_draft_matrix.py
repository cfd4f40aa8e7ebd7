"""Tests of every draft proposer with every sampling parameter and with LoRA adapters: outputs do
not change.
"""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from heads import HIDDEN, add_prediction, layer_weights, norm_weights, save_head
from oracle import make_tiny
from test_drafts import RECORD, AlwaysDraft
from tiny_adapter import write_adapter
from tiny_text import VOCAB, TextModel, open_text, text_model

from quire import LLM, LoRARequest, SamplingParams
from quire.data.outputs import RequestOutput

LENGTH: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True}
PARAMS_BY_NAME: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, **LENGTH},
    "sampled": {"temperature": 1.0, "seed": 3, "top_p": 0.9, **LENGTH},
    "penalties": {
        "temperature": 0.7,
        "seed": 5,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.2,
        **LENGTH,
    },
    "grammar": {"temperature": 0.9, "seed": 12, "max_tokens": 60, "structured_outputs": {"json": RECORD}},
    "stop strings": {"temperature": 0.9, "seed": 4, "stop": ["e", "th"], "max_tokens": 40},
    "logprobs": {"temperature": 0.9, "seed": 8, "logprobs": 3, **LENGTH},
    "n > 1": {"temperature": 1.0, "seed": 10, "n": 3, **LENGTH},
}
"""Combined with chunked prefill, prefix hits and preemption in all cases."""
PROMPTS = [
    [40 + at, 300, 77, 310, 90, 77, 310, 90 + at] * (1 + at % 4) for at in range(2 * len(PARAMS_BY_NAME))
]
SCARCE = {"max_num_batched_tokens": 20, "num_gpu_blocks_override": 60, "max_model_len": 128}
ADAPTERS = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


class Proposer:
    """A target model and its draft model."""

    def __init__(self, target: Path, **config: Any) -> None:
        self.target, self.config = target, {"num_speculative_tokens": 4} | config


def with_text(path: Path, model: TextModel) -> Path:
    """Return another model with the same vocabulary."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(model.path / name, path / name)
    return path


def eagle(model: TextModel, folder: Path) -> Proposer:
    weights = layer_weights("layers.0") | {"fc.weight": 0.2 * torch.randn(HIDDEN, 2 * HIDDEN)}
    head = save_head(folder / "eagle", weights, architectures=["LlamaForCausalLM"], vocab_size=VOCAB)
    return Proposer(model.path, method="eagle", model=str(head))


def eagle3(model: TextModel, folder: Path) -> Proposer:
    norms = norm_weights("midlayer.input_layernorm", "midlayer.hidden_norm", "norm")
    weights = layer_weights("midlayer", 2 * HIDDEN) | norms
    weights["fc.weight"] = 0.2 * torch.randn(HIDDEN, 3 * HIDDEN)
    named = {"architectures": ["LlamaForCausalLMEagle3"], "eagle_aux_hidden_state_layer_ids": [0, 1, 1]}
    head = save_head(folder / "eagle3", weights, vocab_size=VOCAB, **named)
    return Proposer(model.path, method="eagle3", model=str(head))


def mtp(model: TextModel, folder: Path) -> Proposer:
    path = make_tiny("glm4_moe", folder / "mtp", num_hidden_layers=3, vocab_size=VOCAB)[0]
    layer = "model.layers.2"
    weights = norm_weights(*(f"{layer}.{name}" for name in ("enorm", "hnorm", "shared_head.norm")))
    weights[f"{layer}.eh_proj.weight"] = 0.2 * torch.randn(HIDDEN, 2 * HIDDEN)
    add_prediction(path, [layer, layer], weights)
    return Proposer(with_text(path, model), method="mtp")


def small(model: TextModel, folder: Path) -> Proposer:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_key_value_heads": 1, "vocab_size": VOCAB}
    draft = with_text(make_tiny("qwen3", folder, **sizes)[0], model)
    return Proposer(model.path, model=str(draft))


def by(config: dict[str, Any], model: TextModel, folder: Path) -> Proposer:
    return Proposer(model.path, **config)


PROPOSERS = {
    "ngram": partial(by, {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 4}),
    "suffix": partial(by, {"method": "suffix", "suffix_decoding_min_token_prob": 0.0}),
    "draft_model": small,
    "eagle": eagle,
    "eagle3": eagle3,
    "mtp": mtp,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return text_model(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def plain() -> dict[Path, list[RequestOutput]]:
    """Return the outputs without drafts, by target."""
    return {}


def adapters_of(target: Path, folder: Path) -> list[LoRARequest]:
    settings = json.loads((target / "config.json").read_text())
    return [write_adapter(folder / f"adapter{seed}", settings, seed) for seed in (1, 2)]


def answers(llm: LLM, adapters: list[LoRARequest]) -> list[RequestOutput]:
    """Generate all at once with no adapter in a third of the rows, then one request with a cached prefix."""
    loras = [([None, *adapters])[number % 3] for number in range(len(PROMPTS))]
    params = [SamplingParams(**fields) for fields in (*PARAMS_BY_NAME.values(), *PARAMS_BY_NAME.values())]
    last = partial(llm.generate, PROMPTS[3], params[0], lora_request=adapters[0], use_tqdm=False)
    return [*llm.generate(PROMPTS, params, lora_request=loras, use_tqdm=False), *last(), *last()]


@pytest.mark.parametrize("name", PROPOSERS)
def test_outputs_match_outputs_without_drafts(
    name: str, model: TextModel, plain: dict[Path, list[RequestOutput]], tmp_path: Path
) -> None:
    torch.manual_seed(1)
    proposer = PROPOSERS[name](model, tmp_path)
    target, adapters = TextModel(proposer.target, None), adapters_of(proposer.target, tmp_path)
    if target.path not in plain:
        plain[target.path] = answers(open_text(target, **ADAPTERS), adapters)
    expected = plain[target.path]
    llm = open_text(target, **ADAPTERS, **SCARCE, speculative_config=proposer.config)
    scheduler = llm.llm_engine.core.scheduler
    assert scheduler.admitter.drafting is not None
    scheduler.admitter.drafting._draft_length = pace = AlwaysDraft()  # type: ignore[assignment]
    actual = answers(llm, adapters)
    for number, (output, reference) in enumerate(zip(actual, expected, strict=True)):
        params_name = [*PARAMS_BY_NAME][number % len(PARAMS_BY_NAME)]
        for one, other in zip(output.outputs, reference.outputs, strict=True):
            assert _output_fields(one) == _output_fields(other), params_name
            for place, wanted in zip(_numbers(one.logprobs), _numbers(other.logprobs), strict=True):
                assert place == pytest.approx(wanted, abs=1e-4), params_name
    assert pace.num_drafts > 10 and (pace.num_held or name not in ("ngram", "suffix"))
    assert scheduler.num_preemptions, "no request was preempted"
    assert actual[-1].num_cached_tokens, "no prefix was hit"
    assert max(map(len, PROMPTS)) > SCARCE["max_num_batched_tokens"], "no prompt was chunked"
    assert scheduler.kv.pool.usage == 0.0 and not scheduler.adapters.running_names


def _output_fields(item: Any) -> tuple[Any, ...]:
    return item.token_ids, item.text, item.finish_reason, item.stop_reason


def _numbers(logprobs: Any) -> list[dict[int, float]]:
    return [{token: item.logprob for token, item in place.items()} for place in logprobs or []]

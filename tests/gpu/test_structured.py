"""Tests of structured output on a GPU: asynchronous masks reach their rows, with and without graphs."""

import gc
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import make_tiny
from tiny_text import VOCAB, _train_tokenizer

from quire import LLM, SamplingParams
from quire.data.params import ReasoningIds

pytestmark = pytest.mark.gpu
SIZE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCAB,
    "max_position_embeddings": 2048,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["a", "bc", "é"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
WAYS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "in turn": {"async_scheduling": False},
    "a rank": {"distributed_executor_backend": "mp"},
    "small chunks": {"max_num_batched_tokens": 64},
    "drafts": {"speculative_config": {"method": "suffix", "num_speculative_tokens": 4}},
}
PROMPT = [1, 40, 300, 77, 310, 90]
END = 4


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, _ = make_tiny("llama", tmp_path_factory.mktemp("gpu"), **SIZE)
    _train_tokenizer().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return path


def open_llm(path: Path, **settings: Any) -> LLM:
    gc.collect()
    torch.cuda.empty_cache()
    return LLM(
        str(path), **{"max_model_len": 512, "max_num_seqs": 32, "num_gpu_blocks_override": 4000} | settings
    )


def bound(seed: int, **fields: Any) -> SamplingParams:
    constraint = {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}
    return SamplingParams(**{"temperature": 1.2, "seed": seed, "max_tokens": 120} | constraint | fields)


def is_right(text: str) -> bool:
    actual = json.loads(text)
    return (
        list(actual) == ["name", "age", "kind"]
        and 1 <= len(actual["name"]) <= 8
        and 0 <= actual["age"] <= 150
        and actual["kind"] in ("a", "bc", "é")
    )


@pytest.mark.parametrize("way", WAYS)
def test_every_finished_output_satisfies_its_grammar(way: str, path: Path) -> None:
    llm = open_llm(path, **WAYS[way])
    opened = ReasoningIds((), (END,), True)
    all_params = [
        *(bound(seed, n=2) for seed in range(8)),
        *(bound(seed, logprobs=3, bad_words=["the"], repetition_penalty=1.1) for seed in range(4)),
        *(bound(seed, thinking_token_budget=seed, reasoning=opened) for seed in range(4)),
        SamplingParams(max_tokens=60, ignore_eos=True),
    ]
    outputs = llm.generate([PROMPT * (1 + at) for at in range(len(all_params))], all_params, use_tqdm=False)
    done = [
        (llm.get_tokenizer().decode(_after(out.token_ids, params)), out.finish_reason)
        for output, params in zip(outputs, all_params[:-1], strict=False)
        for out in output.outputs
    ]
    assert {reason for _, reason in done} <= {"stop", "length"}
    finished = [text for text, reason in done if reason == "stop"]
    assert len(finished) >= len(done) // 2 and all(map(is_right, finished)), finished
    assert len(outputs[-1].outputs[0].token_ids) == 60


def _after(token_ids: Any, params: SamplingParams) -> list[int]:
    """Return the text after the end of reasoning."""
    ids = list(token_ids)
    return ids[ids.index(END) + 1 :] if params.reasoning is not None else ids


def test_unconstrained_row_is_equal_in_any_batch(path: Path) -> None:
    """Check with all rows in all steps, since sums of bfloat16 depend on the batch size.

    The engine therefore starts when all grammars are compiled, and no request ends early.
    """
    llm = open_llm(path, enable_prefix_caching=False)
    free = [SamplingParams(temperature=0.8, seed=row, max_tokens=80, ignore_eos=True) for row in range(16)]
    regex = {"structured_outputs": {"regex": "[a-z ]{2000}"}, "ignore_eos": True}
    mixed = [bound(row, **regex, max_tokens=80) if row % 2 else item for row, item in enumerate(free)]
    output = [together(llm, batch) for batch in (free, mixed)]
    assert output[0][::2] == output[1][::2]
    texts = [llm.get_tokenizer().decode(ids) for ids in output[1][1::2]]
    assert all(re.fullmatch("[a-z ]+", text) for text in texts), texts


def together(llm: LLM, requests: list[SamplingParams]) -> list[list[int]]:
    """Return the tokens of each request from steps that contain all of them."""
    engine, outputs = llm.llm_engine, {}
    for row, params in enumerate(requests):
        engine.add_request(str(row), PROMPT, params)
    scheduler = engine.core.scheduler
    while scheduler.checks.is_awaiting:
        scheduler.checks.wait(60)
        assert not scheduler.settle()
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[int(output.request_id)] = list(output.outputs[0].token_ids)
    return [outputs[row] for row in range(len(requests))]

"""Structured output on a GPU: masks that travel beside the layers reach their rows, graphs or not."""

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
    asked = {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}
    return SamplingParams(**{"temperature": 1.2, "seed": seed, "max_tokens": 120} | asked | fields)


def is_right(text: str) -> bool:
    found = json.loads(text)
    return (
        list(found) == ["name", "age", "kind"]
        and 1 <= len(found["name"]) <= 8
        and 0 <= found["age"] <= 150
        and found["kind"] in ("a", "bc", "é")
    )


@pytest.mark.parametrize("way", WAYS)
def test_every_finished_answer_is_what_was_asked_for(way: str, path: Path) -> None:
    llm = open_llm(path, **WAYS[way])
    opened = ReasoningIds((), (END,), True)
    asked = [
        *(bound(seed, n=2) for seed in range(8)),
        *(bound(seed, logprobs=3, bad_words=["the"], repetition_penalty=1.1) for seed in range(4)),
        *(bound(seed, thinking_token_budget=seed, reasoning=opened) for seed in range(4)),
        SamplingParams(max_tokens=60, ignore_eos=True),
    ]
    outputs = llm.generate([PROMPT * (1 + at) for at in range(len(asked))], asked, use_tqdm=False)
    done = [
        (llm.get_tokenizer().decode(_after(out.token_ids, params)), out.finish_reason)
        for output, params in zip(outputs, asked[:-1], strict=False)
        for out in output.outputs
    ]
    assert {reason for _, reason in done} <= {"stop", "length"}
    finished = [text for text, reason in done if reason == "stop"]
    assert len(finished) >= len(done) // 2 and all(map(is_right, finished)), finished
    assert len(outputs[-1].outputs[0].token_ids) == 60


def _after(token_ids: Any, params: SamplingParams) -> list[int]:
    """Without what came before the end of reasoning."""
    ids = list(token_ids)
    return ids[ids.index(END) + 1 :] if params.reasoning is not None else ids


def test_a_neighbour_says_the_same_beside_whomever(path: Path) -> None:
    """Only the masks may differ, so all rows are in all steps together: sums of bfloat16 depend on the size
    of the batch. A row whose grammar is being compiled would join later than the others, and one whose
    grammar ends would leave before them. So the engine runs once everybody can, and nobody ends early."""
    llm = open_llm(path, enable_prefix_caching=False)
    free = [SamplingParams(temperature=0.8, seed=row, max_tokens=80, ignore_eos=True) for row in range(16)]
    regex = {"structured_outputs": {"regex": "[a-z ]{2000}"}, "ignore_eos": True}
    mixed = [bound(row, **regex, max_tokens=80) if row % 2 else each for row, each in enumerate(free)]
    said = [together(llm, asked) for asked in (free, mixed)]
    assert said[0][::2] == said[1][::2]
    texts = [llm.get_tokenizer().decode(ids) for ids in said[1][1::2]]
    assert all(re.fullmatch("[a-z ]+", text) for text in texts), texts


def together(llm: LLM, asked: list[SamplingParams]) -> list[list[int]]:
    """The tokens of each, from steps in which all of them are."""
    engine, said = llm.llm_engine, {}
    for row, params in enumerate(asked):
        engine.add_request(str(row), PROMPT, params)
    scheduler = engine.core.scheduler
    while scheduler.gates.is_awaiting:
        scheduler.gates.wait(60)
        assert not scheduler.settle()
    while engine.has_unfinished_requests():
        for output in engine.step():
            said[int(output.request_id)] = list(output.outputs[0].token_ids)
    return [said[row] for row in range(len(asked))]

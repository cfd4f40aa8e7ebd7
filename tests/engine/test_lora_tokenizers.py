"""Tests of grammars with adapters that add tokens, which no grammar contains."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from tiny_adapter import write_adapter_with_tokens
from tiny_text import VOCAB, text_model

from quire import LLM, LoRARequest, SamplingParams
from quire.data.params import StructuredOutputsParams

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 256,
    "use_tqdm_on_load": False,
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": 8,
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"]}
CONSTRAINTS: dict[str, dict[str, Any]] = {
    "json": {"json": SCHEMA},
    "regex": {"regex": "[a-f]{6}"},
    "choice": {"choice": ["yes", "no", "perhaps"]},
}
LAST = VOCAB + 3
"""The token that the adapter is built to generate."""


@pytest.fixture(scope="module", params=[{}, {"method": "ngram", "num_speculative_tokens": 3}], ids=str)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    model = text_model(tmp_path_factory.getbasetemp()).path
    llm = LLM(str(model), **SETTINGS, speculative_config=request.param or None)
    yield llm
    llm.llm_engine.close()


@pytest.fixture(scope="module")
def token_adapter(tmp_path_factory: pytest.TempPathFactory) -> LoRARequest:
    path = tmp_path_factory.mktemp("own") / "own"
    write_adapter_with_tokens(
        path, text_model(tmp_path_factory.getbasetemp()).path, [f"<new-{n}>" for n in range(8)]
    )
    return LoRARequest("own", 1, str(path))


def params_of(kind: str) -> SamplingParams:
    """Return parameters with which every row would generate only the adapter's last token."""
    fields = {"temperature": 0.7, "seed": 3, "max_tokens": 24, "logit_bias": {LAST: 100.0}}
    constraint = CONSTRAINTS.get(kind)
    return SamplingParams(**fields, structured_outputs=constraint and StructuredOutputsParams(**constraint))


def test_grammars_exclude_tokens_added_by_an_adapter(llm: LLM, token_adapter: LoRARequest) -> None:
    kinds = ["json", "", "regex", "choice", "", "json"]
    prompts = [f"one two <new-7> {number}" for number in range(len(kinds))]
    all_params = [params_of(kind) for kind in kinds]
    actual = [
        output.outputs[0]
        for output in llm.generate(prompts, all_params, lora_request=token_adapter, use_tqdm=False)
    ]
    for kind, answer in zip(kinds, actual, strict=True):
        if not kind:
            assert {*answer.token_ids} == {LAST} and answer.text == "<new-7>" * 24
            continue
        assert max(answer.token_ids) < VOCAB, "no token of the adapter"
        if kind == "json" and answer.finish_reason == "stop":
            assert set(json.loads(answer.text)) >= {"a"}
        elif kind == "regex":
            assert re.fullmatch("[a-f]{6}", answer.text)
        elif kind == "choice":
            assert answer.text in CONSTRAINTS["choice"]["choice"]
    for prompt, params, answer in zip(prompts, all_params, actual, strict=True):
        (alone,) = llm.generate([prompt], params, lora_request=token_adapter, use_tqdm=False)
        assert list(alone.outputs[0].token_ids) == list(answer.token_ids)


def test_base_model_rows_are_not_affected_by_adapter_tokens(llm: LLM, token_adapter: LoRARequest) -> None:
    prompts, loras = ["one two three"] * 3, [None, token_adapter, None]
    free = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    strict = SamplingParams(
        temperature=0, max_tokens=8, structured_outputs=params_of("regex").structured_outputs
    )
    all_params = [strict, params_of(""), free]
    together = [
        list(output.outputs[0].token_ids)
        for output in llm.generate(prompts, all_params, lora_request=loras, use_tqdm=False)
    ]
    alone = [
        list(llm.generate([prompt], params, lora_request=lora, use_tqdm=False)[0].outputs[0].token_ids)
        for prompt, params, lora in zip(prompts, all_params, loras, strict=True)
    ]
    assert together == alone and {*together[1]} == {LAST}

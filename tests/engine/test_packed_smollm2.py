"""Tests of the default model with packed weights against the same weights in float32."""

import math
from pathlib import Path

import pytest
from default_model import default_model

from quire import LLM, SamplingParams
from quire.kernels.cpu import native

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(native.library() is None, reason="there are no native kernels here"),
]
NUM_TOKENS = 2000
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "Water boils at 100 degrees",
    "1 + 1 = 2\n2 + 2 = 4\n3 + 3 =",
]


@pytest.fixture(scope="module")
def path() -> Path:
    return default_model()


@pytest.fixture(scope="module")
def engines(path: Path) -> tuple[LLM, LLM]:
    """Open the float32 reference and the packed weights."""
    reference, packed = (
        LLM(
            str(path),
            dtype="float32",
            quantization=quantization,
            max_model_len=2560,
            max_num_seqs=8,
            use_tqdm_on_load=False,
        )
        for quantization in ("none", "gguf")
    )
    return reference, packed


def perplexity(llm: LLM) -> float:
    text = Path(__file__).with_name("prose.txt").read_text()
    ids = llm.get_tokenizer().encode(text)[:NUM_TOKENS]
    assert len(ids) == NUM_TOKENS
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    losses = []
    for token_id, actual in zip(ids, output.prompt_logprobs, strict=True):
        if actual is not None:
            losses.append(-actual[token_id].logprob)
    return math.exp(sum(losses) / len(losses))


def test_perplexity_stays_within_half_a_percent(engines: tuple[LLM, LLM]) -> None:
    reference, packed = map(perplexity, engines)
    assert abs(packed / reference - 1) < 0.005, (packed, reference)


def test_top_five_logprobs_match(engines: tuple[LLM, LLM]) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
    expected, actual = (
        [output.outputs[0].logprobs for output in llm.generate(PROMPTS, params, use_tqdm=False)]
        for llm in engines
    )
    for prompt, reference, result in zip(PROMPTS, expected, actual, strict=True):
        assert reference is not None and result is not None
        top = sorted(reference[0], key=lambda token_id: -reference[0][token_id].logprob)[:5]
        distances = [abs(reference[0][i].logprob - result[0][i].logprob) for i in top if i in result[0]]
        assert len(distances) == 5 and max(distances) < 0.02, prompt


def test_near_tie_has_the_same_first_token(engines: tuple[LLM, LLM]) -> None:
    """Check two tokens 0.1 apart: activations rounded to 8 bits changed the winner."""
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    params = SamplingParams(temperature=0, max_tokens=8)
    expected, actual = (llm.chat(messages, params, use_tqdm=False)[0].outputs[0].token_ids for llm in engines)
    assert list(actual) == list(expected)

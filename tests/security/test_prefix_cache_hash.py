"""Collisions in the prefix cache (CVE-2025-25183): Python's hash() of a block could be predicted, so that a
prompt was answered from the cached blocks of another. Quire's keys are a chain of SHA-256 digests over all
tokens before a block, the adapter's content and the salt."""

import hashlib

import numpy as np
import pytest
from oracle import make_tiny
from symbolic import Engine
from tiny import open_tiny

from quire import LLM, SamplingParams

PROMPT = [(7 * at) % 97 for at in range(17)]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return open_tiny(make_tiny("llama", tmp_path_factory.mktemp("prefix"))[0], max_model_len=64)


def num_cached(llm: LLM, prompt: list[int], salt: str | None = None) -> int:
    request = {"prompt_token_ids": prompt, **({} if salt is None else {"cache_salt": salt})}
    (output,) = llm.generate([request], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    return output.num_cached_tokens or 0


def test_block_keys_are_digests_of_the_whole_prefix() -> None:
    engine = Engine(block_size=4, max_num_batched_tokens=64)
    engine.add("a", PROMPT)
    request = engine.scheduler.requests["a"]
    engine.step()
    parent = hashlib.sha256(b"").digest()
    for number, key in enumerate(request.block_keys):
        tokens = np.array(PROMPT[4 * number : 4 * number + 4], np.int32).tobytes()
        parent = hashlib.sha256(parent + tokens).digest()
        assert key == parent
    assert len(request.block_keys) == 4


def test_block_is_found_only_after_the_same_prefix(llm: LLM) -> None:
    assert num_cached(llm, PROMPT) == 0 and num_cached(llm, PROMPT) == 16
    for place in (0, 3, 8):
        other = [*PROMPT]
        other[place] += 1
        assert num_cached(llm, other) == place // 4 * 4, f"token {place} differs"
    beginning = [90, 91, 92, 93]
    assert num_cached(llm, [*beginning, *PROMPT[::-1]]) == 0
    assert num_cached(llm, [*beginning, *PROMPT[4:]]) == 4, "the other blocks followed another prefix"


def test_salt_separates_prompts(llm: LLM) -> None:
    prompt = PROMPT[::-1]
    assert num_cached(llm, prompt, "one") == 0 and num_cached(llm, prompt, "one") == 16
    assert num_cached(llm, prompt, "two") == 0 and num_cached(llm, prompt) == 0

"""Tests that all kernels are compiled before an engine is ready, and none during requests."""

import json
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import triton
from random_adapters import write_adapters

from quire import LLM, LoRARequest, SamplingParams
from quire.bench.gpu import prompts_of

pytestmark = pytest.mark.gpu
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
    "suffix": {"speculative_config": {"method": "suffix", "num_speculative_tokens": 4}},
    "adapters": {"enable_lora": True, "max_loras": 8, "max_lora_rank": 16},
    "fp8": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    "no prefix caching": {"enable_prefix_caching": False, "max_num_batched_tokens": 512},
}
STATES: dict[str, dict[str, Any]] = {
    "mamba": {"architectures": ["MambaForCausalLM"], "state_size": 16, "layer_norm_epsilon": 1e-5},
    "bamba": {"architectures": ["BambaForCausalLM"], "attn_layer_indices": [1], "mamba_n_heads": 32},
    "qwen3_next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 64,
    },
}
"""Models with SSM states; outputs of others are not read."""
SAMPLING_FIELDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 0, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.1},
    {"temperature": 0.9, "logprobs": 5, "prompt_logprobs": 2},
    {"temperature": 0, "logit_bias": {7: 3.0}, "min_tokens": 3},
    {"temperature": 1.0, "allowed_token_ids": [5, 6, 7], "n": 2, "bad_words": []},
    {"temperature": 0.5, "logprobs": 0},
]


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Record the kernels that are compiled, or loaded from the cache."""
    actual: list[str] = []

    def note(*, repr: str, **more: Any) -> None:
        actual.append(repr)

    runtime = triton.knobs.runtime
    before, runtime.jit_post_compile_hook = runtime.jit_post_compile_hook, note
    try:
        yield actual
    finally:
        runtime.jit_post_compile_hook = before


def send(llm: LLM, adapters: list[LoRARequest]) -> None:
    """Send requests with all features, alone and together, with many batch and prompt sizes."""
    rng = random.Random(0)

    def ask(lengths: list[int], all_fields: list[dict[str, Any]], max_tokens: int) -> None:
        prompts = [prompts_of(rng, 1, length)[0] for length in lengths]
        params = [SamplingParams(max_tokens=max_tokens, ignore_eos=True, **fields) for fields in all_fields]
        loras = [adapters[i % len(adapters)] if adapters and i % 3 < 2 else None for i in range(len(prompts))]
        llm.generate(prompts, params, use_tqdm=False, lora_request=loras)

    for batch in (1, 2, 3, 5, 8, 17, 32, 64):
        ask([60] * batch, [SAMPLING_FIELDS[0]] * batch, 40)  # repetitive text is drafted
        ask(
            [rng.randrange(1, 90) for _ in range(batch)],
            [rng.choice(SAMPLING_FIELDS) for _ in range(batch)],
            12,
        )
    for fields in SAMPLING_FIELDS:
        ask([33], [fields], 6)
    for length in (1, 15, 130, 257, 700, 1500, 3900):
        ask([length], [SAMPLING_FIELDS[0]], 3)


def compiled_in_traffic(kind: str, folder: Path) -> tuple[int, list[str]]:
    """Return the number of kernels when an engine is ready, and those compiled later."""
    (folder / "model").mkdir()
    state_settings = {"model_type": kind, **STATES[kind]} if kind in STATES else {}
    (folder / "model" / "config.json").write_text(json.dumps(MODEL | state_settings))
    with compilations() as actual:
        llm = LLM(
            str(folder / "model"),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_num_seqs=64,
            kv_cache_memory_bytes=2**30,
            **KINDS.get(kind, {}),
        )
        count = len(actual)
        actual.clear()
        send(llm, write_adapters(folder, MODEL, 16, 8) if kind == "adapters" else [])
    llm.llm_engine.close()
    return count, actual


@pytest.mark.parametrize("kind", [*KINDS, *STATES])
def test_no_kernel_is_compiled_during_requests(kind: str, tmp_path: Path) -> None:
    """Check in a separate process, without kernels compiled by other tests."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        count, actual = pool.submit(compiled_in_traffic, kind, tmp_path).result()
    assert count > 0 and not actual

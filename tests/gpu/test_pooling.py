"""Tests of pooling on a GPU against transformers on a CPU."""

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from encoders import make, states
from oracle import make_tiny

from quire import LLM, PoolingParams

pytestmark = pytest.mark.gpu
RAW = PoolingParams(use_activation=False)
SIZE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
LENGTHS = (1, 300, 17, 64, 65, 200)
TOLERANCE = {"float32": 1e-3, "float16": 3e-2}


def opened(path: Path, **settings: Any) -> LLM:
    gc.collect()
    torch.cuda.empty_cache()
    defaults = {"skip_tokenizer_init": True, "gpu_memory_utilization": 0.2, "max_num_seqs": 4}
    return LLM(str(path), **(defaults | settings))


def texts() -> list[list[int]]:
    draw = np.random.default_rng(5)
    return [draw.integers(3, 90, length).tolist() for length in LENGTHS]


def check(actual: list[Any], wanted: list[np.ndarray[Any, Any]], dtype: str) -> None:
    for item, expected in zip(actual, wanted, strict=True):
        off = np.abs(item.outputs.data - expected).max() / np.abs(expected).max()
        assert off < TOLERANCE[dtype], f"{expected.shape}: {off}"


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("family", ["Bert", "ModernBert"])
def test_hidden_states_of_an_encoder(family: str, dtype: str, tmp_path: Path) -> None:
    tiny = make(tmp_path, family, max_position_embeddings=512, initializer_range=0.05, **SIZE)
    llm = opened(tiny.path, convert="embed", dtype=dtype, max_num_batched_tokens=600)
    actual = llm.encode(texts(), RAW, pooling_task="token_embed", use_tqdm=False)
    check(actual, [states(tiny, ids) for ids in texts()], dtype)


@pytest.mark.parametrize("kind", ["LAST", "MEAN"])
@pytest.mark.parametrize("chunk", [64, 4096])
def test_embeddings_of_a_decoder(kind: str, chunk: int, tmp_path: Path) -> None:
    path, hf = make_tiny("qwen3", tmp_path, head_dim=64, max_position_embeddings=512, **SIZE)
    llm = opened(
        path,
        runner="pooling",
        dtype="float32",
        pooler_config={"pooling_type": kind},
        max_num_batched_tokens=chunk,
    )
    with torch.inference_mode():
        actual = [hf.model(torch.tensor([ids])).last_hidden_state[0].numpy() for ids in texts()]
    wanted = [item.mean(0) if kind == "MEAN" else item[-1] for item in actual]
    for _ in range(2):
        check(llm.encode(texts(), RAW, pooling_task="embed", use_tqdm=False), wanted, "float32")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("family", ["gemma3_text", "qwen2"])
def test_bidirectional_decoder(family: str, dtype: str, tmp_path: Path) -> None:
    """Check Gemma's layers with windows of 32 tokens on either side and full ones, and Qwen's full layers."""
    output = {"use_bidirectional_attention": True, "sliding_window": 64, "attn_implementation": "eager"}
    output = output if family == "gemma3_text" else {"is_causal": False}
    path, hf = make_tiny(family, tmp_path, head_dim=64, max_position_embeddings=512, **SIZE, **output)
    llm = opened(path, runner="pooling", dtype=dtype, hf_overrides=output, max_num_batched_tokens=600)
    actual = llm.encode(texts(), RAW, pooling_task="token_embed", use_tqdm=False)
    with torch.inference_mode():
        wanted = [hf.model(torch.tensor([ids])).last_hidden_state[0].numpy() for ids in texts()]
    check(actual, wanted, dtype)

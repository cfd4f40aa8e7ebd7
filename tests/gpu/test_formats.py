"""Tests of every weight format in an engine on a GPU with graphs against a plain model of equal values."""

from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from formats import SIZES, STORED, gpt_oss
from gguf_files import make_tiny_gguf
from on_gpu import ROUNDING, answers, distances, opened
from oracle import make_tiny
from requantized import requantize
from tiny import expected_of, logits_of

from quire.checkpoint.quant.schemes import Grouped
from quire.quant.int4_layouts import read
from quire.quant.sharding import Shard

pytestmark = pytest.mark.gpu
ONLINE = ("fp8", "int8")
PACKED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
"""GGUF types that its package can write."""


def check(path: Path, twin: Any, limit: float = ROUNDING, **settings: Any) -> None:
    llm = opened(path, "bfloat16", **settings)
    outputs = answers(llm)
    off = [distances(logits_of(output), expected_of(twin, output)) for output in outputs]
    assert median(chain.from_iterable(off)) < limit


@pytest.mark.parametrize("family", SIZES)
@pytest.mark.parametrize("name", STORED)
def test_stored_formats(name: str, family: str, tmp_path: Path) -> None:
    """NVFP4 is rounded once more, to FP8, where the GPU has kernels for it."""
    limit = 2 * ROUNDING if name == "nvfp4" else ROUNDING
    check(*requantize(family, tmp_path, *STORED[name], **SIZES[family]), limit)


@pytest.mark.parametrize("family", SIZES)
@pytest.mark.parametrize("quantization", ONLINE)
def test_online_quantization(quantization: str, family: str, tmp_path: Path) -> None:
    """Compare with the unquantized model; 3 bits lose more than 7."""
    limit = 2 * ROUNDING if quantization == "fp8" else ROUNDING
    check(*make_tiny(family, tmp_path, **SIZES[family]), limit, quantization=quantization)


@pytest.mark.parametrize("family", SIZES)
@pytest.mark.parametrize("kind", PACKED)
def test_gguf_files(kind: str, family: str, tmp_path: Path) -> None:
    check(*make_tiny_gguf(family, tmp_path, kind, **SIZES[family]))


def test_tiles_of_torchao() -> None:
    """Compare with torch's packer for tensor cores, which runs only on a GPU."""
    codes = torch.randint(0, 16, (24, 2048), dtype=torch.int32, device="cuda")
    pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)
    words = torch.ops.aten._convert_weight_to_int4pack(pairs, 8)
    scheme = Grouped(4, 64, False, False, "torchao_tiles")
    stored = {"weight": words, "weight_scale_and_zero": torch.ones(32, 24, 2, device="cuda")}
    assert torch.equal(read(scheme, stored, Shard(2048))[0].codes.int(), codes)


def test_mxfp4(tmp_path: Path) -> None:
    check(*gpt_oss(tmp_path))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "Qwen3NextForCausalLM"])
def test_int8_cache(family: str, tmp_path: Path) -> None:
    """Check full attention, windows and a soft cap, sinks, and SSM states beside pages."""
    check(*make_tiny(family, tmp_path), kv_cache_dtype="int8")


@pytest.mark.parametrize("cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3", "gpt_oss"])
def test_caches(family: str, cache_dtype: str, tmp_path: Path) -> None:
    """Check full attention, windows, MLA and sinks."""
    limit = ROUNDING if cache_dtype == "fp8_e4m3" else 2 * ROUNDING
    check(*make_tiny(family, tmp_path), limit, kv_cache_dtype=cache_dtype)

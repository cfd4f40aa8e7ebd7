"""Tests of every weight format in an engine on a GPU with graphs against a plain model of equal values."""

from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from formats import SIZES, STORED, gpt_oss
from gguf_files import make_tiny_gguf
from on_gpu import ROUNDING, answers, distances, opened
from oracle import make_tiny
from requantized import requantize
from tiny import expected_of, logits_of

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
    check(*requantize(family, tmp_path, *STORED[name], **SIZES[family]))


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


def test_mxfp4(tmp_path: Path) -> None:
    check(*gpt_oss(tmp_path))


@pytest.mark.parametrize("cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3", "gpt_oss"])
def test_caches(family: str, cache_dtype: str, tmp_path: Path) -> None:
    """Check full attention, windows, MLA and sinks."""
    limit = ROUNDING if cache_dtype == "fp8_e4m3" else 2 * ROUNDING
    check(*make_tiny(family, tmp_path), limit, kv_cache_dtype=cache_dtype)

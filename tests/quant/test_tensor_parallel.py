"""Tests of sharded weights in every format: logits match one device; shards that cut a block are rejected."""

from pathlib import Path
from typing import Any

import pytest
import torch
from formats import SIZES, STORED, gpt_oss
from gguf_files import make_tiny_gguf
from group_files import rounded, shuffled, stored, values
from requantized import requantize
from test_tensor_parallel_models import compare, logits

from quire.checkpoint.model import read_checkpoint
from quire.checkpoint.quant import ONLINE
from quire.checkpoint.quant.schemes import BitsAndBytes, Grouped
from quire.errors import ConfigError
from quire.kernels.cpu import gguf, native
from quire.kernels.reference import int8
from quire.quant import int4, int4_layouts
from quire.quant.bitsandbytes import Packed4
from quire.quant.sharding import Shard

DIVISIBLE: dict[str, dict[str, Any]] = {
    "llama": SIZES["llama"] | {"num_attention_heads": 4, "num_key_value_heads": 4},
    "qwen3_moe": SIZES["qwen3_moe"]
    | {"num_attention_heads": 4, "num_key_value_heads": 4, "moe_intermediate_size": 256},
}
"""Sizes whose halves are whole blocks of 128."""


@pytest.fixture(autouse=True)
def in_float(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use float kernels, since integer kernels round activations, where tiny differences may flip a code."""
    monkeypatch.setattr(gguf, "group_rows", lambda: 0)
    monkeypatch.setattr(int8, "interleaves", lambda: False)


@pytest.mark.parametrize("family", DIVISIBLE)
@pytest.mark.parametrize("name", STORED)
def test_sharded_logits_match_one_device(name: str, family: str, tmp_path: Path) -> None:
    path, _ = requantize(family, tmp_path, *STORED[name], **DIVISIBLE[family])
    compare(path, 2, quant=read_checkpoint(path).quant)


def test_sharded_mxfp4(tmp_path: Path) -> None:
    path, _ = gpt_oss(tmp_path)
    with pytest.raises(ConfigError, match=r"down_proj: blocks of 32 do not fit .* 48 out of 96; .* 1 or 3,"):
        logits(path, 2, quant=read_checkpoint(path).quant)
    path, _ = gpt_oss(tmp_path, intermediate_size=128)
    compare(path, 2, quant=read_checkpoint(path).quant)


def test_blocks_of_a_shard_use_global_indices() -> None:
    """Check nested scales of 256 blocks, which tiny models do not reach."""
    nested, cpu = BitsAndBytes("nf4", nested=True), torch.device("cpu")
    rows = Packed4(1, (Shard(2, 2, 4), Shard(1, 0, 2)), Shard(128), nested, cpu)
    assert rows._blocks().tolist() == [4, 5, 6, 7, 8, 9]
    columns = Packed4(1, (Shard(2),), Shard(128, 128, 256), nested, cpu)
    assert columns._blocks().tolist() == [2, 3, 6, 7]


@pytest.mark.parametrize("method", ONLINE)
def test_sharded_online_quantization(method: str, tmp_path: Path) -> None:
    """Check with a tolerance, since scales are those of a shard."""
    path, _ = requantize("llama", tmp_path, {}, lambda name, weight: ({"weight": weight}, weight))
    (expected,), actual = logits(path, 1), logits(path, 2, quant=ONLINE[method])
    for one, other in zip(actual[1], expected, strict=True):
        assert float((one - other).norm() / other.norm()) < 0.2


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("family", "kind"), [("llama", "Q8_0"), ("qwen3_moe", "Q4_0"), ("phi3", "Q5_1")])
def test_sharded_gguf(family: str, kind: str, packed: bool, tmp_path: Path) -> None:
    sizes = {"moe_intermediate_size": 64} if family == "qwen3_moe" else {}
    path, _ = make_tiny_gguf(family, tmp_path, kind, intermediate_size=128, vocab_size=131, **sizes)
    compare(path, 2, packed=packed)


def test_gguf_blocks_are_not_cut(tmp_path: Path) -> None:
    """Check packed blocks; dequantized numbers can be split anywhere."""
    path, _ = make_tiny_gguf("llama", tmp_path, "Q8_0")
    compare(path, 2, packed=False)
    if native.library() is None:
        return compare(path, 2, packed=True)
    with pytest.raises(
        ConfigError, match=r"down_proj: Q8_0 blocks of a row of 32 .* 48 out of 96; use .* 1 or 3,"
    ):
        logits(path, 2, packed=True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fp8 block", "gate_proj: blocks of 128 do not fit into shards of 192 out of 384; .* 1 or 3,"),
        ("awq", "down_proj: groups of 32 do not fit into shards of 48 out of 96; .* 1 or 3,"),
        ("nf4", "down_proj: blocks of 64 do not fit into shards of 96 out of 192; .* 1 or 3,"),
    ],
)
def test_misfits_are_named_before_loading(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = {"awq": 96, "nf4": 192, "fp8 block": 384}[name]
    sizes = DIVISIBLE["llama"] | {"intermediate_size": inner}
    path, _ = requantize("llama", tmp_path, *STORED[name], **sizes)
    monkeypatch.setattr("quire.loader.safetensors.SafetensorsSource.fill", lambda *_: pytest.fail("read"))
    with pytest.raises(ConfigError, match=message):
        logits(path, 2, quant=read_checkpoint(path).quant)


@pytest.mark.parametrize(
    "kind", ["symmetric", "with zeros", "with zeros that no code is", "in order", "one group"]
)
def test_shard_of_permuted_inputs(kind: str) -> None:
    """Check shards with some inputs of each group: padded, or gathered."""
    scheme = Grouped(4, -1 if kind == "one group" else 32, "zeros" not in kind, act_order=True, layout="gptq")
    weight, shard = torch.randn(16, 192), Shard(64, 64, 192)
    group_of = shuffled(192, scheme.group, torch.Generator().manual_seed(1))
    group_of = group_of.sort().values if kind == "in order" else group_of
    codes = rounded(weight, scheme, group_of)
    if kind.endswith("no code is"):
        codes = codes._replace(zeros=torch.full_like(codes.zeros, 16))
    tensors = stored(codes, scheme, group_of) | {"scales": codes.scales.t()}
    tensors["qweight"] = tensors["qweight"][8:16]
    share, order = int4_layouts.read(scheme, tensors, shard)
    assert share.group == {"with zeros that no code is": 1, "one group": 64}.get(kind, 32)
    assert (order is None) == (kind in ("in order", "one group", "with zeros that no code is"))
    torch.testing.assert_close(int4._values_in_order(share, order, 64), values(codes, group_of)[:, 64:128])


def test_permuted_inputs_split_groups(tmp_path: Path) -> None:
    """Check GPTQ, of which a shard has some inputs of each group."""
    sizes = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 96}
    path, _ = requantize("llama", tmp_path, *STORED["gptq act-order"], **sizes)
    compare(path, 2, quant=read_checkpoint(path).quant)

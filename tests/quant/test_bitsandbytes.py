"""Tests of bitsandbytes weights in the layout that transformers writes."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from formats import TABLES, bitsandbytes_config, pack4, pack8
from requantized import error_of, loaded, requantize

from quire.checkpoint.quant import read_quant
from quire.checkpoint.quant.schemes import BitsAndBytes
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError
from quire.kernels.reference.nf4 import in_halves, scaled, split
from quire.quant.bitsandbytes import BitsAndBytesFormat, Packed4
from quire.quant.sharding import Shard
from quire.quant.unquantized import PlainFormat
from quire.quant.weight import LinearShape

CPU = torch.device("cpu")
EXAMPLES = {
    "nf4": "001112223344455566666777777777777777777777788888999aabbccddeeeff",
    "fp4": "bbaaaaddcccffeeeee9999999999000088881111111111666667744455222233",
}
"""Output of bitsandbytes 0.50 for linspace(-1, 1, 64) ** 3."""


@pytest.mark.parametrize(
    ("family", "kind", "nested"),
    [
        ("qwen2", "int8", False),
        ("glm", "nf4", True),
        ("nemotron_h", "nf4", False),
    ],
)
def test_logits_of_a_checkpoint(family: str, kind: str, nested: bool, tmp_path: Path) -> None:
    """Check scales of parts and experts, row order across blocks, and a width of one and a half blocks."""
    pack = pack8 if kind == "int8" else functools.partial(pack4, kind, nested)
    path, twin = requantize(family, tmp_path, bitsandbytes_config(kind, nested), pack)
    assert error_of(loaded(path), twin) < 2e-3


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_example_of_the_bitsandbytes_package(kind: Any) -> None:
    """Check that the first of two numbers is in the high half of a byte."""
    packed = Packed4(1, (Shard(1),), Shard(64), BitsAndBytes(kind), CPU)
    packed.codes[0, :, 0] = torch.tensor([*bytes.fromhex(EXAMPLES[kind])], dtype=torch.uint8)
    packed.absmax.fill_(1.0)
    packed.table[0] = TABLES[kind]
    values = torch.linspace(-1, 1, 64) ** 3
    nearest = TABLES[kind][(values[:, None] - TABLES[kind]).abs().argmin(1)]
    assert ((packed.values(0)[0] - nearest).abs() < 1e-6).sum() >= 62  # midpoints may round either way
    assert ((packed.values(0)[0] - values).abs() < 0.17).all()


def test_repacked_gpu_layout_has_the_same_values() -> None:
    torch.manual_seed(0)
    packed = Packed4(1, (Shard(6),), Shard(256), BitsAndBytes("nf4"), CPU)
    packed.codes.random_(0, 256)
    packed.absmax.uniform_(0.1, 1)
    packed.table[0] = TABLES["nf4"]
    codes = split(in_halves(packed.code(0)))
    wide = scaled(TABLES["nf4"][codes.long()], packed.scales(0).view(6, -1))
    assert torch.equal(wide, packed.values(0))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_in_bfloat16_on_every_device(device: str) -> None:
    """Check for swapped parts, halves of rows, or rows."""
    torch.manual_seed(0)
    shape = LinearShape(256, (48, 16), False, torch.bfloat16, torch.device(device))
    weight = BitsAndBytesFormat(BitsAndBytes("nf4", nested=True), PlainFormat()).linear(("a", "b"), shape)
    wide, orders = [], []
    for part, rows in zip(weight.parts(), shape.sizes_out, strict=True):
        tensors, values = pack4("nf4", True, "", torch.randn(rows, 256))
        orders.append(torch.randperm(rows))
        wide.append(values[orders[-1]])
        for suffix, piece in part.items():
            piece.tensor[: len(tensors[suffix])].copy_(tensors[suffix])
    weight.reorder(orders)
    weight.finish()
    for num in (1, 5, 200):
        x = torch.randn(num, 256).bfloat16()
        actual, expected = weight(x.to(device)).double().cpu(), (x.float() @ torch.cat(wide).T).double()
        assert (actual - expected).norm() / expected.norm() < 1e-2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"load_in_4bit": False}, "neither load_in_4bit nor load_in_8bit"),
        ({"bnb_4bit_quant_type": "nf3"}, "bnb_4bit_quant_type is 'nf3', expected nf4 or fp4"),
        ({"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage is 'bfloat16', expected uint8"),
        ({"llm_int8_skip_modules": "lm_head"}, "llm_int8_skip_modules is 'lm_head', expected a list"),
    ],
)
def test_unsupported_configs_are_rejected(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_quant(ConfigReader("config.json", {"quantization_config": bitsandbytes_config("nf4") | changes}))


def test_skipped_layers() -> None:
    facts = read_quant(
        ConfigReader(
            "c",
            {
                "quantization_config": bitsandbytes_config("nf4", True)
                | {"llm_int8_skip_modules": ["up_proj"]}
            },
        )
    )
    assert facts is not None and facts.scheme("a.up_proj") is None
    assert facts.scheme("a.down_proj") == BitsAndBytes("nf4", True)

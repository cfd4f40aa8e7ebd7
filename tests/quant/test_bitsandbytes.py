"""Weights of bitsandbytes in the layout that transformers writes."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from requantized import error_of, loaded, requantize
from torch import Tensor

from quire.config.keys import Keys
from quire.config.quant import read_quant
from quire.config.quant.schemes import BitsAndBytes
from quire.errors import ConfigError
from quire.kernels.table import in_halves, scaled, split
from quire.quant.bitsandbytes import BitsAndBytesFormat, Packed4
from quire.quant.experts import ExpertShape
from quire.quant.plain import PlainFormat
from quire.quant.weight import LinearShape

CPU = torch.device("cpu")
NF4 = "-1.0 -0.6961928 -0.52507305 -0.39491749 -0.28444138 -0.18477343 -0.09105004 0.0 0.0795803 0.1609302 0.2461123 0.33791524 0.44070983 0.562617 0.72295684 1.0"  # noqa: E501
FP4 = "0.0 0.00520833 0.66666669 1.0 0.33333334 0.5 0.16666667 0.25 0.0 -0.00520833 -0.66666669 -1.0 -0.33333334 -0.5 -0.16666667 -0.25"  # noqa: E501
TABLES = {name: torch.tensor([float(v) for v in of.split()]) for name, of in (("nf4", NF4), ("fp4", FP4))}
EXAMPLES = {
    "nf4": "001112223344455566666777777777777777777777788888999aabbccddeeeff",
    "fp4": "bbaaaaddcccffeeeee9999999999000088881111111111666667744455222233",
}
"""What bitsandbytes 0.50 makes of linspace(-1, 1, 64) ** 3."""


def pack4(kind: str, nested: bool, name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Blocks of 64 numbers row after row, two codes in a byte; scales in 8 bits around their mean."""
    table, flat = TABLES[kind], weight.flatten()
    blocks = torch.cat((flat, flat.new_zeros(-len(flat) % 64))).view(-1, 64)
    absmax = blocks.abs().amax(1)
    tensors = {"weight.quant_map": table}
    state: dict[str, Any] = {
        "quant_type": kind,
        "blocksize": 64,
        "dtype": "float32",
        "shape": [*weight.shape],
    }
    tensors["weight.absmax"] = absmax
    if nested:
        offset, around = absmax.mean(), torch.linspace(-1, 1, 256)
        groups = torch.cat((absmax - offset, absmax.new_zeros(-len(absmax) % 256))).view(-1, 256)
        most = groups.abs().amax(1)
        codes = (groups / most[:, None])[:, :, None].sub(around).abs().argmin(2)
        tensors["weight.absmax"] = codes.flatten()[: len(absmax)].to(torch.uint8)
        tensors |= {"weight.nested_absmax": most, "weight.nested_quant_map": around}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(offset)}
        absmax = (around[codes] * most[:, None]).flatten()[: len(absmax)] + offset
    near = (blocks / absmax[:, None])[:, :, None].sub(table).abs().argmin(2)
    wide = (table[near] * absmax[:, None]).flatten()[: len(flat)].view_as(weight)
    pairs = near.flatten()[: len(flat)].to(torch.uint8).view(-1, 2)
    tensors["weight"] = (pairs[:, :1] << 4) | pairs[:, 1:]
    text = torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = text
    return tensors, wide


def pack8(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    most = weight.abs().amax(1)
    codes = (weight / most[:, None] * 127).round()
    tensors = {
        "weight": codes.to(torch.int8),
        "SCB": most,
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return tensors, codes * most[:, None] / 127


def said(kind: str, nested: bool = False) -> dict[str, Any]:
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": kind != "int8",
        "load_in_8bit": kind == "int8",
        "bnb_4bit_quant_type": kind if kind != "int8" else "fp4",
        "bnb_4bit_use_double_quant": nested,
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_threshold": 6.0,
        "llm_int8_skip_modules": None,
    }


@pytest.mark.parametrize(
    ("family", "kind", "nested"),
    [
        ("llama", "nf4", True),
        ("llama", "fp4", False),
        ("qwen2", "int8", False),
        ("glm", "nf4", True),
        ("qwen3_moe", "nf4", True),
        ("qwen3_moe", "int8", False),
        ("nemotron_h", "nf4", False),
    ],
)
def test_logits_of_a_checkpoint(family: str, kind: str, nested: bool, tmp_path: Path) -> None:
    """Scales of another part or expert; rows put in order across blocks; a width of one block and a half."""
    pack = pack8 if kind == "int8" else functools.partial(pack4, kind, nested)
    path, twin = requantize(family, tmp_path, said(kind, nested), pack)
    assert error_of(loaded(path), twin) < 2e-3


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_an_example_of_the_package(kind: Any) -> None:
    """The first of two numbers is in the high half of a byte."""
    packed = Packed4(1, 1, 64, BitsAndBytes(kind), CPU)
    packed.codes[0, :, 0] = torch.tensor([*bytes.fromhex(EXAMPLES[kind])], dtype=torch.uint8)
    packed.absmax.fill_(1.0)
    packed.table[0] = TABLES[kind]
    values = torch.linspace(-1, 1, 64) ** 3
    nearest = TABLES[kind][(values[:, None] - TABLES[kind]).abs().argmin(1)]
    assert ((packed.values(0)[0] - nearest).abs() < 1e-6).sum() >= 62  # in the middle it may go either way
    assert ((packed.values(0)[0] - values).abs() < 0.17).all()


def test_halves_for_the_gpu_stand_for_the_same() -> None:
    torch.manual_seed(0)
    packed = Packed4(1, 6, 256, BitsAndBytes("nf4"), CPU)
    packed.codes.random_(0, 256)
    packed.absmax.uniform_(0.1, 1)
    packed.table[0] = TABLES["nf4"]
    codes = split(in_halves(packed.code(0)))
    wide = scaled(TABLES["nf4"][codes.long()], packed.scales(0).view(6, -1))
    assert torch.equal(wide, packed.values(0))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_in_bfloat16_on_every_device(device: str) -> None:
    """Parts in each other's place; the halves of a row mixed up; rows in another order."""
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
        ours, expected = weight(x.to(device)).double().cpu(), (x.float() @ torch.cat(wide).T).double()
        assert (ours - expected).norm() / expected.norm() < 1e-2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"load_in_4bit": False}, "neither load_in_4bit nor load_in_8bit"),
        ({"bnb_4bit_quant_type": "nf3"}, "bnb_4bit_quant_type is 'nf3', expected nf4 or fp4"),
        ({"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage is 'bfloat16', expected uint8"),
        ({"llm_int8_skip_modules": "lm_head"}, "llm_int8_skip_modules is 'lm_head', expected a list"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_quant(Keys("config.json", {"quantization_config": said("nf4") | changes}))


def test_what_is_skipped() -> None:
    facts = read_quant(
        Keys("c", {"quantization_config": said("nf4", True) | {"llm_int8_skip_modules": ["up_proj"]}})
    )
    assert facts is not None and facts.scheme("a.up_proj") is None
    assert facts.scheme("a.down_proj") == BitsAndBytes("nf4", True)


def test_experts_in_one_tensor_are_refused() -> None:
    shape = ExpertShape(2, 64, 32, "silu", False, torch.float32, CPU)
    with pytest.raises(ConfigError, match="all experts in one tensor"):
        BitsAndBytesFormat(BitsAndBytes("nf4"), PlainFormat()).experts(("gate_up", "down"), shape)

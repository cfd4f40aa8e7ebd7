"""Tests of the weight format of each layer: by the checkpoint's rules and its tensors."""

from dataclasses import replace

import pytest
import torch

from quire.checkpoint.quant import ONLINE, choose_quant
from quire.checkpoint.quant.facts import LayerRule, QuantFacts, all_but
from quire.checkpoint.quant.schemes import BitsAndBytes, BlockFloat, Fp8, Grouped, Hqq
from quire.errors import ConfigError
from quire.quant import formats
from quire.quant.bitsandbytes import BitsAndBytesFormat
from quire.quant.block_float import BlockFloatFormat
from quire.quant.experts import ExpertShape
from quire.quant.format import Format
from quire.quant.formats import SchemeFormat
from quire.quant.hqq import HqqFormat
from quire.quant.int4 import Int4Format
from quire.quant.unquantized import PlainFormat, PlainWeight
from quire.quant.weight import LinearShape, MixedWeight, materialize, placeholder_parameter

SHAPE = LinearShape(32, (16,), False, torch.float32, torch.device("cpu"))
INT4 = Grouped(4, 32, symmetric=True, act_order=False, layout="gptq")


class Marked(PlainFormat):
    """Stands in for the format of any scheme."""

    def __init__(self, scheme: object, plain: PlainFormat) -> None:
        super().__init__(torch.bfloat16)
        self.scheme = scheme


@pytest.fixture(autouse=True)
def _table(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {"Fp8": Marked, "Grouped": Marked}
    monkeypatch.setattr(formats, "SCHEMES", made)


def kept(format: SchemeFormat, *parts: str, shape: LinearShape = SHAPE) -> bool:
    """Return whether a layer is quantized by the scheme."""
    weight = format.linear(parts, shape)
    assert isinstance(weight, PlainWeight)
    return weight.weight.dtype == torch.bfloat16


def test_first_matching_rule_decides() -> None:
    facts = QuantFacts("x", all_but(["lm_head", "model.layers.1.mlp"], INT4))
    format = SchemeFormat(facts, PlainFormat(), None)
    assert kept(format, "model.layers.0.mlp.down_proj") and kept(format, "model.layers.11.mlp.down_proj")
    assert not kept(format, "lm_head") and not kept(format, "model.layers.1.mlp.down_proj")


def test_layer_stored_plain_is_plain() -> None:
    facts = QuantFacts("x", all_but((), INT4))
    format = SchemeFormat(
        facts, PlainFormat(), dict.fromkeys(("a.qweight", "b.weight", "lm_head.qweight"), ()).get
    )
    head = replace(SHAPE, quantizable=False)
    assert kept(format, "a") and not kept(format, "b") and kept(format, "lm_head", shape=head)


def test_excluded_layers_are_not_quantized() -> None:
    format = SchemeFormat(ONLINE["fp8"], PlainFormat(), {"a.weight": ()}.get)
    assert kept(format, "a") and not kept(format, "a", shape=replace(SHAPE, quantizable=False))


def test_parts_of_different_formats_are_computed_separately() -> None:
    """Check biases and part order; experts cannot be mixed."""
    facts = QuantFacts("x", (LayerRule("[qk]_proj", INT4), LayerRule("z_proj", Fp8())))
    format = SchemeFormat(facts, PlainFormat(), None)
    weight = format.linear(("q_proj", "k_proj", "v_proj"), replace(SHAPE, sizes_out=(16, 8, 4), bias=True))
    assert isinstance(weight, MixedWeight)
    full, biases = torch.randn(28, 32).bfloat16().float(), torch.randn(28)
    for part, part_weight, bias in zip(
        weight.parts(), full.split([16, 8, 4]), biases.split([16, 8, 4]), strict=True
    ):
        part["weight"].tensor.copy_(part_weight)
        part["bias"].tensor.copy_(bias)
    orders = [torch.randperm(size) for size in (16, 8, 4)]
    rows = torch.cat([order + start for order, start in zip(orders, (0, 16, 24), strict=True)])
    weight.reorder(orders)
    weight.finish()
    x = torch.randn(3, 32)
    assert torch.allclose(weight.product(x), x @ full[rows].t() + biases[rows], atol=1e-4)
    shape = ExpertShape(2, 32, 16, "silu", False, torch.float32, torch.device("cpu"))
    with pytest.raises(
        ConfigError, match=r"same quantization scheme: q_proj \(Grouped.*z_proj \(Fp8.*v_proj \(plain"
    ):
        format.experts(("q_proj", "z_proj", "v_proj"), shape)


def test_flag_must_agree_with_the_checkpoint() -> None:
    stored = QuantFacts("gptq", all_but((), INT4))
    assert choose_quant(None, stored) is stored and choose_quant("gptq_marlin", stored) is stored
    assert choose_quant("fp8", None) is ONLINE["fp8"] and choose_quant(None, None) is None
    with pytest.raises(ConfigError, match="'awq' contradicts the checkpoint.* stored as gptq"):
        choose_quant("awq", stored)
    with pytest.raises(ConfigError, match="use fp8 or int8; gguf needs a checkpoint in that format"):
        choose_quant("gguf", None)


def test_borrowed_weights_take_no_memory() -> None:
    weight = placeholder_parameter(64, 8, dtype=torch.float32, device=torch.device("cpu"))
    assert weight.shape == (64, 8) and weight.untyped_storage().nbytes() == 4
    assert materialize(weight).untyped_storage().nbytes() == weight.nbytes


@pytest.mark.parametrize(
    "format",
    [
        BitsAndBytesFormat(BitsAndBytes("nf4"), PlainFormat()),
        BlockFloatFormat(BlockFloat("nvfp4"), PlainFormat()),
        HqqFormat(Hqq(4, 64), PlainFormat()),
        Int4Format(INT4, PlainFormat()),
    ],
)
def test_experts_in_one_tensor_are_rejected(format: Format) -> None:
    """Catches gate_up_proj taken for up_proj, which experts without a gate have."""
    shape = ExpertShape(2, 64, 64, "silu", False, torch.float32, torch.device("cpu"))
    with pytest.raises(ConfigError, match="mlp.experts.gate_up_proj"):
        format.experts(("mlp.experts.gate_up_proj", "mlp.experts.down_proj"), shape)
    format.experts(("mlp.experts.up_proj", "mlp.experts.down_proj"), shape)

"""Tests of FP8 weights: checkpoints of every layout and online quantization, against float32."""

from pathlib import Path
from typing import Any

import pytest
import torch
from formats import SIZES, STORED
from oracle import load_tiny, make_tiny
from requantized import error_of, loaded, requantize
from torch import Tensor

from quire.checkpoint.quant import ONLINE, read_quant
from quire.checkpoint.quant.schemes import Fp8
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError
from quire.kernels.cpu import native
from quire.kernels.reference.fp8 import E4M3, Scaled, dequantize, linear_reference, quantize_weight
from quire.quant.experts import ExpertShape
from quire.quant.fp8 import Fp8Experts, Fp8Format, Fp8Weight
from quire.quant.unquantized import PlainFormat
from quire.quant.weight import LinearShape

CPU = torch.device("cpu")


def apart(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("family", SIZES)
def test_plain_checkpoint_is_quantized_while_loading(family: str, tmp_path: Path) -> None:
    path, plain = make_tiny(family, tmp_path / "plain", **SIZES[family])
    _, twin = requantize(family, tmp_path / "narrow", *STORED["fp8 channel"], **SIZES[family])
    model = load_tiny(path, quant=ONLINE["fp8"])
    assert error_of(model, twin) < 1e-3 < error_of(model, plain)


def test_tensor_scale_under_the_block_scale_name(tmp_path: Path) -> None:
    """Check the layout that transformers and Mistral write."""

    def pack(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        stored, wide = STORED["fp8 tensor"].pack(name, weight)
        scales = {"weight_scale_inv": stored["weight_scale"], "activation_scale": stored["input_scale"]}
        return {"weight": stored["weight"]} | scales, wide

    config = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    path, twin = requantize("llama", tmp_path, config, pack, **SIZES["llama"])
    assert error_of(loaded(path), twin) < 1e-3


ALIGNED: dict[str, Any] = {"hidden_size": 128, "moe_intermediate_size": 128}
LATENT = {"kv_lora_rank": 128, "q_lora_rank": 128, "qk_nope_head_dim": 64, "v_head_dim": 64, "head_dim": 16}
DELTA = {
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "head_dim": 128,
    "shared_expert_intermediate_size": 128,
}
MIXED = {
    # DeepSeek's layout, with the weight that MLA uses in both directions.
    "deepseek_v3": (r"self_attn\.\w+_proj(_with_mqa)?\.weight$", LATENT | {"qk_rope_head_dim": 16}),
    # Qwen's layout: b and a are plain, and the layers fused with them are permuted.
    "qwen3_next": (r"(in_proj_qkvz|self_attn\.\w+_proj)\.weight$", DELTA),
}


@pytest.mark.parametrize("family", MIXED)
def test_published_block_checkpoints(family: str, tmp_path: Path) -> None:
    layers, sizes = MIXED[family]
    path, twin = requantize(family, tmp_path, STORED["fp8 block"].config, _blocks, layers, **ALIGNED, **sizes)
    assert error_of(loaded(path), twin) < 1e-3


def _blocks(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Quantize in blocks; the last block of each side may be incomplete."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % 128, 0, -rows % 128))
    stored, wide = STORED["fp8 block"].pack(name, padded)
    return stored | {"weight": stored["weight"][:rows, :columns].contiguous()}, wide[:rows, :columns].clone()


def test_wide_weight_exists_only_while_it_is_filled() -> None:
    weight = Fp8Weight(Fp8(stored=False), LinearShape(64, (32, 16), False, torch.bfloat16, CPU))
    assert weight.stored.weight.untyped_storage().nbytes() == 2
    weight.begin()
    for part in weight.parts():
        part["weight"].tensor.normal_()
    weight.finish()
    assert weight.stored.weight.dtype == E4M3 and weight.stored.weight.nbytes == 48 * 64


def filled(scheme: Fp8, *, bias: bool = False) -> tuple[Fp8Weight, Scaled]:
    """Return a weight with parts of very different scales."""
    torch.manual_seed(0)
    shape = LinearShape(256, (256, 128, 40), bias, torch.float32, CPU)
    weight, made = Fp8Weight(scheme, shape), []
    for i, part in enumerate(weight.parts()):
        part["weight"].tensor.copy_(torch.randn_like(part["weight"].tensor, dtype=torch.float32) * 20)
        part[scheme.scale_name].tensor.copy_(torch.rand_like(part[scheme.scale_name].tensor) * 10.0**-i)
        scale = part[scheme.scale_name].tensor
        scale = scale if scheme.weights == "block" else scale.reshape(-1).expand(shape.sizes_out[i])
        made.append(dequantize(Scaled(part["weight"].tensor, scale), torch.float32))
    if weight.bias is not None:
        weight.bias.normal_()
    return weight, quantize_weight(torch.cat(made))._replace(data=torch.cat(made))


SCHEMES = [Fp8("tensor"), Fp8("channel"), Fp8("block", "group")]


@pytest.mark.parametrize("in_c", [False, True], ids=["torch", "c"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.weights)
def test_parts_keep_their_scales(scheme: Fp8, in_c: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not in_c:
        monkeypatch.setattr(native, "library", lambda: None)
    weight, (wide, _) = filled(scheme, bias=True)
    x = torch.randn(3, 256)
    weight.finish()
    expected = linear_reference(x, Scaled(wide, torch.ones(len(wide))), weight.bias, quantized=False)
    for actual, reference in zip(
        weight(x).split([256, 128, 40], 1), expected.split([256, 128, 40], 1), strict=True
    ):
        assert apart(actual, reference) < 5e-3


def test_unsupported_dtype_uses_torch() -> None:
    """Check float16 on a CPU, for which the kernels reject every call."""
    torch.manual_seed(0)
    weight = Fp8Weight(Fp8(stored=False), LinearShape(64, (32,), True, torch.float16, CPU))
    experts = Fp8Experts(Fp8(stored=False), ExpertShape(2, 64, 32, "silu", False, torch.float16, CPU))
    for made in (weight, experts):
        made.begin()
    for part in (*weight.parts(), experts.parts()["gate_up"], experts.parts()["down"]):
        for piece in part.values():
            piece.tensor.normal_(std=0.1)
    for made in (weight, experts):
        made.finish()
    x, ids = torch.randn(3, 64, dtype=torch.float16), torch.zeros(3, 1, dtype=torch.int32)
    wide = dequantize(weight.stored.scaled, torch.float32)
    assert weight.bias is not None and apart(weight(x), x.float() @ wide.t() + weight.bias.float()) < 5e-3
    assert experts(x, ids, torch.ones(3, 1)).isfinite().all()


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.weights)
def test_permuted_outputs(scheme: Fp8) -> None:
    """Check outputs of one block that are far apart afterwards."""
    weight, (wide, _) = filled(scheme)
    orders = [torch.randperm(size) for size in weight.shape.sizes_out]
    weight.reorder(orders)
    weight.finish()
    x = torch.randn(3, 256)
    expected = torch.cat(
        [part[order] for part, order in zip(wide.split([256, 128, 40]), orders, strict=True)]
    )
    assert apart(weight(x), x @ expected.t()) < (3e-2 if scheme.weights == "block" else 5e-3)


def test_permuted_whole_blocks_keep_their_scales() -> None:
    """Check permutations within a block and of blocks, which need no new quantization."""
    weight, (wide, _) = filled(SCHEMES[2])
    orders = [torch.cat((128 + torch.randperm(128), torch.randperm(128))), torch.randperm(128)]
    orders.append(torch.randperm(40))
    weight.reorder(orders)
    weight.finish()
    x = torch.randn(3, 256)
    parts = zip(wide.split([256, 128, 40]), orders, strict=True)
    expected = x @ torch.cat([part[order] for part, order in parts]).t()
    for actual, reference in zip(
        weight(x).split([256, 128, 40], 1), expected.split([256, 128, 40], 1), strict=True
    ):
        assert apart(actual, reference) < 5e-3


def test_experts_with_one_scale_for_gate_and_up() -> None:
    shape = ExpertShape(3, 32, 16, "silu", False, torch.float32, CPU)
    experts = Fp8Experts(Fp8("tensor"), shape)
    parts = experts.parts()
    for name in ("gate_up", "down"):
        parts[name]["weight"].tensor.copy_(torch.randn(parts[name]["weight"].tensor.shape))
        parts[name]["weight_scale"].tensor.copy_(torch.tensor([1.0, 0.1, 0.01]))
    experts.finish()
    assert torch.equal(experts.gate_up.scale, torch.tensor([1.0, 0.1, 0.01])[:, None].expand(3, 32))


def read(**config: Any) -> Fp8 | None:
    facts = read_quant(ConfigReader("config.json", {"quantization_config": config}))
    assert facts is not None
    scheme = facts.scheme("model.layers.0.mlp.up_proj")
    assert scheme is None or isinstance(scheme, Fp8)
    return scheme


def test_valid_configs() -> None:
    assert read(quant_method="fp8", activation_scheme="static") == Fp8("tensor", "static")
    assert read(quant_method="fp8") == Fp8("tensor", "token")
    assert read(**STORED["fp8 block"].config) == Fp8("block", "group", scale_name="weight_scale_inv")
    assert read(quant_method="fbgemm_fp8") == Fp8("channel", "token")
    assert read(quant_method="fp8", modules_to_not_convert=["model.layers.0.mlp.up_proj"]) is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"activation_scheme": "maybe"}, "activation_scheme is 'maybe', expected 'dynamic' or 'static'"),
        ({"weight_block_size": [64, 64]}, r"weight_block_size is \[64, 64\], expected \[128, 128\], or null"),
        ({"weight_block_size": [128, 128], "activation_scheme": "static"}, "expected 'dynamic'"),
        ({"ignored_layers": "lm_head"}, "expected a list of names"),
    ],
)
def test_invalid_configs_are_rejected(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(**({"quant_method": "fp8"} | config))


def test_indivisible_blocks_are_rejected_before_loading() -> None:
    format = Fp8Format(Fp8("block", "group"), PlainFormat())
    with pytest.raises(ConfigError, match="gate, up, down: blocks of 128 outputs do not divide the 192"):
        format.experts(("gate", "up", "down"), ExpertShape(2, 64, 192, "silu", False, torch.float32, CPU))
    with pytest.raises(ConfigError, match=r"a scale for each 64 x 64 are not supported; 128 x 128 are"):
        Fp8Format(Fp8("block", "group", block=(64, 64)), PlainFormat())

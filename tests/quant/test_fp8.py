"""Weights in fp8: checkpoints of every layout and plain ones that are narrowed, against float32."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import load_tiny, make_tiny, random_prompts, run_paged
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.config.keys import Keys
from quire.config.model import read_checkpoint
from quire.config.quant import ONLINE, read_quant
from quire.config.quant.schemes import Fp8
from quire.errors import ConfigError
from quire.kernels import native
from quire.kernels.fp8 import E4M3, Scaled, linear_reference, narrowed, widened
from quire.quant.experts import ExpertShape
from quire.quant.fp8 import Fp8Experts, Fp8Format, Fp8Weight
from quire.quant.plain import PlainFormat
from quire.quant.weight import LinearShape

CPU = torch.device("cpu")
SIZES = {"hidden_size": 128, "head_dim": 64, "intermediate_size": 256}
MOE = {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "tensor": {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
    "channel": {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]},
    "block": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
}


def narrow(weight: Tensor, kind: str) -> tuple[Scaled, dict[str, Tensor]]:
    """A weight of a checkpoint, and its scales as they are stored."""
    data, scale = narrowed(weight)
    if kind == "channel":
        return Scaled(data, scale), {"weight_scale": scale[:, None]}
    if kind == "tensor":
        scale = scale.amax()
        data = (weight / scale).to(E4M3)
        return Scaled(data, scale.expand(len(weight))), {"weight_scale": scale, "input_scale": torch.ones(())}
    rows, columns = weight.shape
    blocks = weight.view(rows // 128, 128, columns // 128, 128)
    scales = blocks.abs().amax((1, 3)) / 448
    data = (blocks / scales[:, None, :, None]).view_as(weight).to(E4M3)
    return Scaled(data, scales), {"weight_scale_inv": scales}


def rewrite(path: Path, into: Path, kind: str) -> tuple[Path, Path]:
    """The checkpoint at `path` in fp8, and with the same weights in float32."""
    config = json.loads((path / "config.json").read_text())
    stored, wide = {}, {}
    for name, weight in load_file(path / "model.safetensors").items():
        stored[name] = wide[name] = weight.contiguous()
        if name.endswith("_proj.weight"):
            made, scales = narrow(weight, kind)
            stored[name], wide[name] = made.data, widened(made, torch.float32)
            stored |= {f"{name.removesuffix('weight')}{suffix}": scale for suffix, scale in scales.items()}
    for where, tensors, said in ((into / "fp8", stored, {"quantization_config": CONFIGS[kind]}),
                                 (into / "wide", wide, {})):  # fmt: skip
        where.mkdir()
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, where / "model.safetensors")
        (where / "config.json").write_text(json.dumps(config | said))
    return into / "fp8", into / "wide"


def apart(ours: Tensor, expected: Tensor) -> float:
    return float((ours.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize(("family", "more"), [("llama", {}), ("qwen3_moe", MOE)])
def test_logits_are_those_of_the_widened_weights(
    family: str, more: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    """A scale of another part, expert or block; a layer that was left out."""
    path, _ = make_tiny(family, tmp_path, **SIZES, **more)
    narrow_path, wide_path = rewrite(path, tmp_path, kind)
    prompts, quant = random_prompts(7), read_checkpoint(narrow_path).quant
    model = load_tiny(narrow_path, quant=quant)
    narrow_layers = [module for module in model.modules() if isinstance(module, Fp8Weight | Fp8Experts)]
    assert len(narrow_layers) == (8 if family == "llama" else 6)
    ours, expected = (run_paged(each, prompts, [[7]])[0] for each in (model, load_tiny(wide_path)))
    assert apart(ours, expected) < 1e-3


@pytest.mark.parametrize(("family", "more"), [("llama", {}), ("qwen3_moe", MOE)])
def test_a_plain_checkpoint_is_narrowed_while_it_is_loaded(
    family: str, more: dict[str, Any], tmp_path: Path
) -> None:
    path, _ = make_tiny(family, tmp_path, **SIZES, **more)
    _, wide_path = rewrite(path, tmp_path, "channel")
    prompts = random_prompts(7)
    models = load_tiny(path, quant=ONLINE["fp8"]), load_tiny(wide_path), load_tiny(path)
    ours, expected, plain = (run_paged(each, prompts, [[7]])[0] for each in models)
    assert apart(ours, expected) < 1e-3 < apart(ours, plain)


def test_the_wide_weight_is_there_only_while_it_is_filled() -> None:
    weight = Fp8Weight(Fp8(stored=False), LinearShape(64, (32, 16), False, torch.bfloat16, CPU))
    assert weight.stored.weight.untyped_storage().nbytes() == 2
    weight.begin()
    for part in weight.parts():
        part["weight"].tensor.normal_()
    weight.finish()
    assert weight.stored.weight.dtype == E4M3 and weight.stored.weight.nbytes == 48 * 64


def filled(scheme: Fp8, *, bias: bool = False) -> tuple[Fp8Weight, Scaled]:
    """With parts of very different scales."""
    torch.manual_seed(0)
    shape = LinearShape(256, (256, 128, 40), bias, torch.float32, CPU)
    weight, made = Fp8Weight(scheme, shape), []
    for i, part in enumerate(weight.parts()):
        part["weight"].tensor.copy_(torch.randn_like(part["weight"].tensor, dtype=torch.float32) * 20)
        part[scheme.scale_name].tensor.copy_(torch.rand_like(part[scheme.scale_name].tensor) * 10.0**-i)
        scale = part[scheme.scale_name].tensor
        scale = scale if scheme.weights == "block" else scale.reshape(-1).expand(shape.sizes_out[i])
        made.append(widened(Scaled(part["weight"].tensor, scale), torch.float32))
    if weight.bias is not None:
        weight.bias.normal_()
    return weight, narrowed(torch.cat(made))._replace(data=torch.cat(made))


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
    for ours, theirs in zip(
        weight(x).split([256, 128, 40], 1), expected.split([256, 128, 40], 1), strict=True
    ):
        assert apart(ours, theirs) < 5e-3


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.weights)
def test_outputs_change_places(scheme: Fp8) -> None:
    """Those of one block may be far apart afterwards."""
    weight, (wide, _) = filled(scheme)
    orders = [torch.randperm(size) for size in weight.shape.sizes_out]
    weight.reorder(orders)
    weight.finish()
    x = torch.randn(3, 256)
    expected = torch.cat(
        [part[order] for part, order in zip(wide.split([256, 128, 40]), orders, strict=True)]
    )
    assert apart(weight(x), x @ expected.t()) < (3e-2 if scheme.weights == "block" else 5e-3)


def test_experts_with_one_scale_of_gate_and_up() -> None:
    shape = ExpertShape(3, 32, 16, "silu", False, torch.float32, CPU)
    experts = Fp8Experts(Fp8("tensor"), shape)
    parts = experts.parts()
    for name in ("gate_up", "down"):
        parts[name]["weight"].tensor.copy_(torch.randn(parts[name]["weight"].tensor.shape))
        parts[name]["weight_scale"].tensor.copy_(torch.tensor([1.0, 0.1, 0.01]))
    experts.finish()
    assert torch.equal(experts.gate_up.scale, torch.tensor([1.0, 0.1, 0.01])[:, None].expand(3, 32))


def read(**said: Any) -> Fp8 | None:
    facts = read_quant(Keys("config.json", {"quantization_config": said}))
    assert facts is not None
    scheme = facts.scheme("model.layers.0.mlp.up_proj")
    assert scheme is None or isinstance(scheme, Fp8)
    return scheme


def test_what_configurations_say() -> None:
    assert read(quant_method="fp8", activation_scheme="static") == Fp8("tensor", "static")
    assert read(quant_method="fp8") == Fp8("tensor", "token")
    assert read(**CONFIGS["block"]) == Fp8("block", "group", scale_name="weight_scale_inv")
    assert read(quant_method="fbgemm_fp8") == Fp8("channel", "token")
    assert read(quant_method="modelopt", quant_algo="FP8", ignore=["lm_head"]) == Fp8("tensor", "static")
    assert read(quant_method="modelopt", quant_algo="FP8", exclude_modules=["model.layers.0*"]) is None
    assert read(quant_method="fp8", modules_to_not_convert=["model.layers.0.mlp.up_proj"]) is None


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"activation_scheme": "maybe"}, "activation_scheme is 'maybe', expected 'dynamic' or 'static'"),
        ({"weight_block_size": [64, 64]}, r"weight_block_size is \[64, 64\], expected \[128, 128\], or null"),
        ({"weight_block_size": [128, 128], "activation_scheme": "static"}, "expected 'dynamic'"),
        ({"ignored_layers": "lm_head"}, "expected a list of names of layers"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo is 'NVFP4', expected 'FP8'"),
    ],
)
def test_what_is_wrong_in_them_is_said(said: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(**({"quant_method": "fp8"} | said))


def test_blocks_that_do_not_divide_are_refused_before_anything_is_read() -> None:
    format = Fp8Format(Fp8("block", "group"), PlainFormat())
    with pytest.raises(ConfigError, match="q, k: blocks of 128 outputs do not divide parts of 192 outputs"):
        format.linear(("q", "k"), LinearShape(64, (192, 64), False, torch.float32, CPU))
    with pytest.raises(ConfigError, match=r"a scale for each 64 x 64 are not supported; 128 x 128 are"):
        Fp8Format(Fp8("block", "group", block=(64, 64)), PlainFormat())

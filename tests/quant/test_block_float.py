"""Tests of NVFP4, MXFP8 and MXFP4 weights beyond logits: values, memory, and layers that do not fit."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from formats import NVFP4_COMPRESSED, SIZES, STORED
from requantized import error_of, loaded, requantize
from safetensors.torch import load_file, save_file
from test_tensor_parallel_models import logits
from torch import Tensor

from quire.checkpoint.model import read_checkpoint
from quire.checkpoint.quant.schemes import BlockFloat
from quire.errors import ConfigError
from quire.kernels.cpu import native
from quire.quant.block_float import BlockFloatExperts, BlockFloatFormat, BlockFloatWeight
from quire.quant.experts import ExpertShape
from quire.quant.unquantized import PlainFormat
from quire.quant.weight import LinearShape

CPU = torch.device("cpu")
PACKERS = {name: STORED[name].pack for name in ("nvfp4", "mxfp8")} | {
    "nvfp4 compressed": NVFP4_COMPRESSED.pack
}
SHAPE = LinearShape(64, (32, 16), True, torch.bfloat16, CPU)


@pytest.mark.parametrize("name", PACKERS)
def test_values_and_biases_of_fused_parts(name: str) -> None:
    """Check the scale per tensor of each part, whose magnitudes differ, in the dtype of the layer."""
    torch.manual_seed(0)
    scheme = {
        "nvfp4": BlockFloat("nvfp4", tensor_scale="weight_scale_2"),
        "nvfp4 compressed": BlockFloat("nvfp4", "weight_packed", "weight_global_scale", is_divisor=True),
        "mxfp8": BlockFloat("mxfp8"),
    }[name]
    weight = BlockFloatFormat(scheme, PlainFormat()).linear(("a", "b"), SHAPE)
    values, bias = [], torch.randn(48).bfloat16()
    for part, size, spread in zip(weight.parts(), SHAPE.sizes_out, (1.0, 100.0), strict=True):
        tensors, wide = PACKERS[name]("", torch.randn(size, 64) * spread)
        values.append(wide.bfloat16())
        for suffix, tensor in tensors.items():
            part[suffix].tensor.copy_(tensor.reshape(part[suffix].tensor.shape))
    weight.parts()[0]["bias"].tensor.copy_(bias[:32])
    weight.parts()[1]["bias"].tensor.copy_(bias[32:])
    weight.finish()
    (kept,) = [tensor for tensor in weight.parameters() if tensor.ndim == 2]
    assert torch.equal(kept, torch.cat(values))
    assert torch.equal(weight(torch.zeros(1, 64).bfloat16())[0], bias)


LAYERS = {
    "deepseek_v3": r"_proj(_with_mqa)?\.weight$",
    "gpt_neox": r"(query_key_value|dense\w*)\.weight$",
    "nemotron_h": r"_proj\.weight$",
}


@pytest.mark.parametrize("family", LAYERS)
def test_layers_of_other_shapes(family: str, tmp_path: Path) -> None:
    """Check the weight that MLA uses in both directions, fused layers that are reordered and have biases, and
    experts without a gate."""
    config, pack = STORED["nvfp4"]

    def pack_divisible(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        return pack(name, weight) if weight.shape[1] % 16 == 0 else ({"weight": weight}, weight)

    path, twin = requantize(family, tmp_path, config, pack_divisible, LAYERS[family])
    model = loaded(path)
    kinds = {type(module) for module in model.modules()}
    assert BlockFloatWeight in kinds and (BlockFloatExperts in kinds) == (family != "gpt_neox")
    assert error_of(model, twin) < 1e-4


def test_logits_of_compressed_tensors(tmp_path: Path) -> None:
    path, twin = requantize("qwen3_moe", tmp_path, *NVFP4_COMPRESSED, **SIZES["qwen3_moe"])
    assert error_of(loaded(path), twin) < 1e-4


def test_mxfp4_without_kernels_is_dequantized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_kernels = SimpleNamespace(**vars(native) | {"serves": lambda *_: False})
    monkeypatch.setattr("quire.quant.gguf.native", without_kernels)
    path, twin = requantize("qwen3_moe", tmp_path, *STORED["mxfp4 compressed"], **SIZES["qwen3_moe"])
    assert error_of(loaded(path), twin) < 5e-3


@pytest.mark.parametrize(("name", "bits"), [("nvfp4", 16), ("mxfp8", 16), ("mxfp4 compressed", 4.25)])
def test_plan_counts_the_bits_that_are_kept(name: str, bits: float, tmp_path: Path) -> None:
    """Compare the bits that `quire plan` counts with the tensors of the loaded layers."""
    if native.library() is None and name.startswith("mxfp4"):
        pytest.skip("there are no native kernels here")
    path, _ = requantize("llama", tmp_path, *STORED[name], **SIZES["llama"])
    quant = read_checkpoint(path).quant
    assert quant is not None and quant.main_scheme is not None and quant.main_scheme.bits_per_weight == bits
    layers = [module for module in loaded(path).modules() if isinstance(module, BlockFloatWeight)]
    num_bytes = sum(tensor.nbytes for layer in layers for tensor in layer.parameters())
    num_weights = sum(sum(layer.shape.sizes_out) * layer.shape.size_in for layer in layers)
    widening = 2 if bits == 16 else 1  # the model has float32 weights
    assert num_bytes == pytest.approx(widening * bits / 8 * num_weights, rel=0.01)


def test_missing_and_wrong_tensors_are_named(tmp_path: Path) -> None:
    path, _ = requantize("llama", tmp_path, *STORED["nvfp4"], **SIZES["llama"])
    file, name = path / "model.safetensors", "model.layers.0.mlp.down_proj"
    tensors = load_file(file)
    save_file({key: tensors[key] for key in tensors if key != f"{name}.weight_scale_2"}, file)
    with pytest.raises(ConfigError, match=rf"lacks 1 of the .*{name}.weight_scale_2"):
        loaded(path)
    save_file(tensors | {f"{name}.weight_scale": tensors[f"{name}.weight_scale"][:, ::2].contiguous()}, file)
    with pytest.raises(ConfigError, match=rf"{name}.weight_scale has the shape \(128, 8\), .*\(128, 16\)"):
        loaded(path)
    save_file(tensors | {f"{name}.weight_scale": tensors[f"{name}.weight_scale"].view(torch.uint8)}, file)
    with pytest.raises(ConfigError, match=rf"{name}.weight_scale is stored as torch.uint8, but .*e4m3"):
        loaded(path)


def test_layers_that_do_not_fit_are_named() -> None:
    format = BlockFloatFormat(BlockFloat("nvfp4"), PlainFormat())
    with pytest.raises(ConfigError, match="q_proj: nvfp4 has a scale for each 16 inputs, .* not divide 40"):
        format.linear(("q_proj",), replace(SHAPE, size_in=40))
    experts = ExpertShape(4, 64, 96, "silu", True, torch.float32, CPU)
    assert isinstance(format.experts(("gate", "up", "down"), experts), BlockFloatExperts)


def test_shards_that_cut_a_block_are_rejected(tmp_path: Path) -> None:
    sizes = SIZES["llama"] | {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4}
    path, _ = requantize("llama", tmp_path, *STORED["nvfp4"], **sizes)
    with pytest.raises(ConfigError, match=r"down_proj: blocks of 16 do not fit .* 24 out of 48; .* 1 or 3,"):
        logits(path, 2, quant=read_checkpoint(path).quant)

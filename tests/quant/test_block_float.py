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
from quire.quant.block_float import BlockFloatExperts, BlockFloatFormat, BlockFloatWeight, WeightOnCPU
from quire.quant.experts import ExpertShape
from quire.quant.fp8 import Fp8Experts, Fp8Weight
from quire.quant.unquantized import PlainFormat
from quire.quant.weight import LinearShape

CPU = torch.device("cpu")
PACKERS = {name: STORED[name].pack for name in ("nvfp4", "mxfp8")} | {
    "nvfp4 compressed": NVFP4_COMPRESSED.pack
}
SHAPE = LinearShape(64, (32, 16), True, torch.bfloat16, CPU)


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let weights of these formats find no C kernels."""
    library = SimpleNamespace(**vars(native) | {"serves": lambda *_: False})
    for module in ("block_float", "gguf"):
        monkeypatch.setattr(f"quire.quant.{module}.native", library)


def with_fp8_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert weights to FP8, as on a GPU with FP8 kernels."""
    without_kernels(monkeypatch)
    monkeypatch.setattr("quire.quant.block_float._has_fp8_kernels", lambda *_: True)


@pytest.mark.parametrize("device", ["cpu", "plain", "fp8"])
@pytest.mark.parametrize("name", PACKERS)
def test_values_and_biases_of_fused_parts(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the scale per tensor of each part, whose magnitudes differ, in the dtype of the layer."""
    torch.manual_seed(0)
    {"plain": without_kernels, "fp8": with_fp8_kernels}.get(device, lambda _: None)(monkeypatch)
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
    assert torch.equal(weight(torch.zeros(1, 64).bfloat16())[0], bias)
    kept = (weight(torch.eye(64).bfloat16()).float() - bias).T
    expected = torch.cat(values).float()
    errors = (kept - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors.max() < (0.04 if device == "fp8" and name != "mxfp8" else 0.01)
    assert (type(weight) is WeightOnCPU) == (device == "cpu" and native.library() is not None)


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
    modules = list(model.modules())
    assert any(isinstance(module, BlockFloatWeight) for module in modules)
    assert any(isinstance(module, BlockFloatExperts) for module in modules) == (family != "gpt_neox")
    assert error_of(model, twin) < 3e-4


def test_logits_of_compressed_tensors(tmp_path: Path) -> None:
    path, twin = requantize("qwen3_moe", tmp_path, *NVFP4_COMPRESSED, **SIZES["qwen3_moe"])
    assert error_of(loaded(path), twin) < 1e-4


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "mxfp4 compressed"])
def test_models_without_kernels_are_dequantized(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_kernels(monkeypatch)
    path, twin = requantize("qwen3_moe", tmp_path, *STORED[name], **SIZES["qwen3_moe"])
    assert error_of(loaded(path), twin) < 5e-3


@pytest.mark.parametrize(("name", "most"), [("nvfp4", 0.04), ("mxfp8", 1e-6)])
def test_models_are_converted_to_fp8(
    name: str, most: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the FP8 values of linear layers and experts, and the plan of their memory."""
    with_fp8_kernels(monkeypatch)
    path, twin = requantize("qwen3_moe", tmp_path, *STORED[name], **SIZES["qwen3_moe"])
    model, state = loaded(path), twin.state_dict()
    weight = next(module for module in model.modules() if isinstance(module, Fp8Weight))
    experts = next(module for module in model.modules() if isinstance(module, Fp8Experts))
    at = "model.layers.0"
    qkv = torch.cat([state[f"{at}.self_attn.{part}_proj.weight"] for part in "qkv"])
    for stored, expected in (
        (weight.stored, qkv),
        (experts.gate_up, state[f"{at}.mlp.experts.gate_up_proj"]),
        (experts.down, state[f"{at}.mlp.experts.down_proj"]),
    ):
        assert stored.weight.dtype == torch.float8_e4m3fn
        actual = stored.weight.float() * stored.scale[..., None]
        assert float((actual - expected).norm() / expected.norm()) < most
    quant = read_checkpoint(path).quant
    assert quant is not None and quant.main_scheme is not None and quant.main_scheme.bits_per_weight == 8.02
    assert error_of(model, twin) < 0.5  # activations are quantized, too, which may select other experts


@pytest.mark.parametrize(("name", "bits"), [("nvfp4", 6), ("mxfp8", 9), ("mxfp4 compressed", 4.25)])
def test_memory_of_weights_on_a_cpu(name: str, bits: float, tmp_path: Path) -> None:
    if native.library() is None:
        pytest.skip("there are no native kernels here")
    path, _ = requantize("llama", tmp_path, *STORED[name], **SIZES["llama"])
    layers = [module for module in loaded(path).modules() if isinstance(module, BlockFloatWeight)]
    num_bytes = sum(tensor.nbytes for layer in layers for tensor in layer.parameters())
    num_weights = sum(sum(layer.shape.sizes_out) * layer.shape.size_in for layer in layers)
    assert num_bytes == pytest.approx(bits / 8 * num_weights, rel=0.01)


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

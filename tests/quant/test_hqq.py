"""Tests of HQQ configurations and checkpoints."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from formats import SIZES, hqq_config, pack_hqq
from requantized import error_of, loaded, requantize
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.checkpoint.model import read_checkpoint
from quire.checkpoint.quant import read_quant
from quire.checkpoint.quant.schemes import Hqq
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError
from quire.kernels.reference.int4 import Int4Codes, split_zeros
from quire.loader.pt import load_pickle
from quire.quant.hqq import HqqTensors
from quire.quant.int4 import GROUPS
from quire.quant.sharding import Shard

LAYER = "model.layers.0.mlp.up_proj"
CPU = torch.device("cpu")


def read_config(**changes: Any) -> Any:
    config = hqq_config(4) | changes
    return read_quant(ConfigReader("config.json", {"quantization_config": config}))


def read_stored(tensors: dict[str, Tensor], outputs: Shard, inputs: Shard, scheme: Hqq) -> Int4Codes:
    """Read the tensors of a file through the shapes that the format expects."""
    shapes = {f"{LAYER}.{name}": tuple(tensor.shape) for name, tensor in tensors.items()}
    full = scheme.as_stored(LAYER, "W_q", outputs.all * inputs.all, shapes.get)
    files = HqqTensors(full)
    pieces = files.empty((outputs,), inputs, CPU)
    for name, piece in pieces.items():
        piece.tensor.copy_(tensors[name])
    return files.read({name: piece.tensor for name, piece in pieces.items()}, (outputs,), inputs)[0]


@pytest.mark.parametrize("bits", [8, 4, 3, 2, 1])
@pytest.mark.parametrize(("group", "axis"), [(64, 1), (256, 1), (192, 1), (16, 0)])
def test_stored_weights_and_their_shards(bits: int, group: int, axis: int) -> None:
    """Check bits, groups that the kernels have and others, over several rows, and groups of outputs."""
    torch.manual_seed(bits)
    weight = torch.randn(48, 256)
    tensors, expected = pack_hqq(bits, group, axis, LAYER, weight)
    shown = 0 if (bits, group) != (1, 16) else 1  # 16 rows of 1 or 3 bits have the same shape
    whole = read_stored(tensors, Shard(48), Shard(256), Hqq(shown))
    torch.testing.assert_close(whole.values(), expected)
    assert whole.bits == (8 if bits == 8 else 4)
    assert (whole.group in (*GROUPS, 256)) == (axis == 1 and group in (64, 256))
    size = 1 if whole.group == 256 else 2  # all inputs in one group cannot be cut
    part = read_stored(
        tensors, Shard(20, 8, 48), Shard(256 // size, 256 - 256 // size, 256), Hqq(bits, group)
    )
    torch.testing.assert_close(part.values(), expected[8:28, 256 - 256 // size :])


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_zeros_are_split(bits: int, on_gpu: bool) -> None:
    """Check zeros between codes and outside of their range; integers are left alone."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 1 << bits, (8, 128), generator=generator).to(torch.uint8)
    scales, zeros = (torch.rand(8, 2, generator=generator) for _ in range(2))
    weight = Int4Codes(codes, scales, (zeros * 3 - 1) * (1 << bits), bits)
    split, offsets = split_zeros(weight, on_gpu=on_gpu)
    rest = torch.zeros(8, 2) if offsets is None else offsets
    torch.testing.assert_close(split.values() + rest.repeat_interleave(64, 1), weight.values())
    assert (offsets is None) == (bits == 4 and not on_gpu)
    if offsets is not None:
        assert (
            split.zeros.dtype == torch.int32 and 0 <= int(split.zeros.min()) <= int(split.zeros.max()) < 256
        )
    even = weight._replace(zeros=torch.full((8, 2), 1 << bits - 1, dtype=torch.int32))
    assert split_zeros(even, on_gpu=on_gpu)[1] is None


def test_settings_of_kinds_of_layers() -> None:
    kinds = {
        "self_attn.q_proj": hqq_config(8)["quant_config"],
        "mlp.experts.w1": hqq_config(2)["quant_config"],
    }
    facts = read_config(quant_config=kinds)
    assert facts.scheme("model.layers.3.self_attn.q_proj") == Hqq(8, 64, 1)
    assert facts.scheme("model.layers.3.mlp.experts.7.w1") == Hqq(2, 64, 1)
    assert facts.scheme("model.layers.3.mlp.experts.7.w10") is None
    assert facts.scheme("model.layers.3.self_attn.k_proj") is None
    facts = read_config()
    assert facts.scheme(LAYER) == Hqq(4, 64, 1) and facts.scheme("lm_head") is None
    assert facts.main_scheme.bits_per_weight == 4.75 and Hqq(4, 64, 0).bits_per_weight == 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nbits": 7}, "weight_quant_params: nbits is 7, expected one of 8, 6, 5, 4, 3, 2, 1.58, 1"),
        ({"axis": 2}, "axis is 2, expected 0 or 1"),
        ({"view_as_float": True}, "view_as_float is True, expected false"),
        ({"channel_wise": False}, "channel_wise is False, expected true"),
        ({"group_size": 0}, "group_size is 0, expected"),
    ],
)
def test_unsupported_settings_are_named(changes: dict[str, Any], message: str) -> None:
    config = hqq_config(4)["quant_config"]
    config["weight_quant_params"] |= changes
    with pytest.raises(ConfigError, match=message):
        read_config(quant_config=config)
    with pytest.raises(ConfigError, match="quant_config: mlp.up_proj is 4, expected an object"):
        read_config(quant_config={"mlp.up_proj": 4})
    with pytest.raises(ConfigError, match="quant_config is None, expected an object"):
        read_config(quant_config=None)


@pytest.mark.parametrize(
    ("scheme", "changes", "message"),
    [
        (Hqq(), {"scale": None}, r"up_proj.scale is missing: .* W_q, scale and zero"),
        (
            Hqq(8, 64),
            {},
            r"W_q of shape \(64, 64\) and scale of shape \(128, 1\) are not 8192 weights of 8 bits",
        ),
        (Hqq(), {"scale": (3, 1)}, r"scale of shape \(3, 1\) are not 8192 weights as"),
        (Hqq(), {"scale": (64, 2)}, r"scale of shape \(64, 2\) are not"),
        (Hqq(), {"W_q": (64, 32)}, r"W_q of shape \(64, 32\) .* view_as_float"),
        (Hqq(4, 128), {}, r"has groups of 64 weights, but quantization_config says group_size 128"),
    ],
)
def test_tensors_that_do_not_fit_are_named(scheme: Hqq, changes: dict[str, Any], message: str) -> None:
    shapes = {
        f"{LAYER}.{name}": shape for name, shape in ({"W_q": (64, 64), "scale": (128, 1)} | changes).items()
    }
    with pytest.raises(ConfigError, match=rf"{LAYER}.*{message}|{message}"):
        scheme.as_stored(LAYER, "W_q", 8192, shapes.get)


def test_missing_zero_is_named(tmp_path: Path) -> None:
    path, _ = requantize("llama", tmp_path, hqq_config(4), partial(pack_hqq, 4, 64, 1), **SIZES["llama"])
    tensors = load_file(path / "model.safetensors")
    del tensors[f"{LAYER}.zero"]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=rf"lacks 1 of the .*{LAYER}\.zero"):
        loaded(path)


@pytest.mark.parametrize("kind", ["pickle", "old pickle", "safetensors"])
def test_files_that_hqq_saved(kind: str, tmp_path: Path) -> None:
    """Check a pickle with a dictionary for each layer, and safetensors, without a quantization_config."""
    path, twin = requantize("llama", tmp_path, {}, partial(pack_hqq, 2, 64, 0), **SIZES["llama"])
    layers: dict[str, dict[str, Any]] = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        layer, _, key = name.rpartition(".")
        state = layers.setdefault(layer, {"compute_dtype": torch.float16, "shape": torch.Size((1, 2))})
        (state.setdefault("meta", {}) if kind == "old pickle" and key in ("scale", "zero") else state)[
            key
        ] = tensor
    if kind != "safetensors":
        torch.save(layers, path / "qmodel.pt")
        (path / "model.safetensors").unlink()
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    quant = read_checkpoint(path).quant
    assert quant is not None and quant.method == "hqq"
    assert error_of(loaded(path), twin) < 5e-3


def test_endless_dictionary_in_a_pickle(tmp_path: Path) -> None:
    state: dict[str, Any] = {"weight": torch.ones(2)}
    state["layer"] = state
    torch.save(state, tmp_path / "qmodel.pt")
    assert set(load_pickle(tmp_path / "qmodel.pt")) == {"weight", "layer.weight", "layer.layer.weight"}


@pytest.mark.parametrize("bits", [8, 4, 3, 2, 1])
@pytest.mark.parametrize("axis", [0, 1])
def test_weights_of_the_hqq_package(bits: int, axis: int) -> None:
    """Compare with the package itself; it is not among the requirements of the tests."""
    quantize = pytest.importorskip("hqq.core.quantize")
    torch.manual_seed(0)
    layer = torch.nn.Linear(256, 48, bias=False)
    config = quantize.BaseQuantizeConfig(nbits=bits, group_size=64, axis=axis)
    stored = quantize.HQQLinear(layer, config, compute_dtype=torch.float32, device="cpu")
    codes = read_stored(stored.state_dict(), Shard(48), Shard(256), Hqq())
    torch.testing.assert_close(codes.values(), stored.dequantize())

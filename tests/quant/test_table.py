"""Tests of every weight format with linear, fused and expert layers against a plain model of equal values.

The same on a GPU: tests/gpu/test_formats.py. GGUF files are in test_gguf.py, MXFP4 is in test_mxfp4.py.
"""

import json
from pathlib import Path

import pytest
from formats import SIZES, STORED
from requantized import error_of, loaded, requantize
from safetensors.torch import load_file, save_file

from quire.checkpoint.quant import METHODS
from quire.checkpoint.quant.schemes import Scheme
from quire.errors import ConfigError
from quire.quant.unquantized import PlainExperts, PlainWeight

TESTED_IN = {
    "auto-round": "test_auto_round.py",
    "mxfp4": "test_mxfp4.py",
    "quark": "test_quark.py",
    "torchao": "test_torchao.py",
}


@pytest.mark.parametrize("family", SIZES)
@pytest.mark.parametrize("name", STORED)
def test_logits_of_every_format(name: str, family: str, tmp_path: Path) -> None:
    """Check for scales of another part, expert or block, skipped layers, and reordered codes."""
    config, pack = STORED[name]
    path, twin = requantize(family, tmp_path, config, pack, **SIZES[family])
    model = loaded(path)
    plain = {name for name, module in model.named_modules() if isinstance(module, PlainWeight | PlainExperts)}
    unpacked = {"nf4", "fp4", "gptq act-order", "nvfp4", "mxfp8"}
    assert all("proj" not in item for item in plain) or name in unpacked, plain
    assert error_of(model, twin) < 5e-3


def test_unknown_quantized_layer_is_named(tmp_path: Path) -> None:
    path, _ = requantize("llama", tmp_path, *STORED["gptq"], **SIZES["llama"])
    file = path / "model.safetensors"
    words = load_file(file)
    words["model.layers.0.mlp.extra_proj.qweight"] = words["model.layers.0.mlp.up_proj.qweight"].clone()
    save_file(words, file)
    with pytest.raises(ConfigError, match=r"1 quantized weights .* not have.*extra_proj.qweight"):
        loaded(path)


def test_weights_that_contradict_the_configuration_are_named(tmp_path: Path) -> None:
    path, _ = requantize("llama", tmp_path, *STORED["int8 channel"], **SIZES["llama"])
    output = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(
        json.dumps(output | {"quantization_config": STORED["fp8 channel"].config})
    )
    with pytest.raises(
        ConfigError, match=r"_proj.weight is stored as torch.int8, but .* torch.float8_e4m3fn"
    ):
        loaded(path)


def test_every_format_is_tested() -> None:
    methods = {config["quant_method"] for config, _ in STORED.values()}
    assert methods | {*TESTED_IN} == {*METHODS}
    assert {scheme.__name__ for scheme in Scheme.__subclasses__()} == {
        "BitsAndBytes",
        "BlockFloat",
        "Fp8",
        "Grouped",
        "Hqq",
        "Int8",
        "Mxfp4",
    }, "a scheme that is not in this table"

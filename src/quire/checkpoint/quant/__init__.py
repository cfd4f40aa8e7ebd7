"""Quantization: what a checkpoint's `quantization_config` says of its layers, one reader a method."""

from collections.abc import Callable
from pathlib import Path

from quire.checkpoint.quant.awq import read_awq
from quire.checkpoint.quant.bitsandbytes import read_bitsandbytes
from quire.checkpoint.quant.compressed import read_compressed
from quire.checkpoint.quant.facts import QuantFacts, all_but
from quire.checkpoint.quant.fp8 import read_fbgemm, read_fp8, read_modelopt
from quire.checkpoint.quant.gptq import read_gptq
from quire.checkpoint.quant.mxfp4 import read_mxfp4
from quire.checkpoint.quant.schemes import Fp8, Int8
from quire.checkpoint.reader import ConfigReader, read_json
from quire.errors import ConfigError

METHODS: dict[str, Callable[[ConfigReader], QuantFacts]] = {
    "awq": read_awq,
    "bitsandbytes": read_bitsandbytes,
    "compressed-tensors": read_compressed,
    "fbgemm_fp8": read_fbgemm,
    "fp8": read_fp8,
    "gptq": read_gptq,
    "modelopt": read_modelopt,
    "mxfp4": read_mxfp4,
}
"""By quant_method."""
ONLINE = {
    "fp8": QuantFacts("fp8", all_but((), Fp8(stored=False))),
    "int8": QuantFacts("int8", all_but((), Int8(activations="none", stored=False))),
}
"""What a plain checkpoint can be narrowed to while it is loaded."""
_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Where the tools of these methods wrote it before there was a place in config.json."""
_SAME = {"awq_marlin": "awq", "gptq_marlin": "gptq", "gpt_oss_mxfp4": "mxfp4"}
"""Names of kernels that stand for a method."""


def read_quant(keys: ConfigReader, path: Path | None = None) -> QuantFacts | None:
    """What config.json says, or a file of its own beside it in `path`; None: all layers are plain."""
    for key in ("quantization_config", "compression_config"):
        said = keys.get(key)
        if said:
            if not isinstance(said, dict):
                raise keys.wrong(key, "an object")
            unsaid = "compressed-tensors" if key == "compression_config" else None
            return _read(ConfigReader(f"{keys.source}: {key}", said), unsaid)
    for name, method in _FILES.items():
        if path is not None and (path / name).is_file():
            return _read(ConfigReader(str(path / name), read_json(path / name)), method)
    return None


def _read(said: ConfigReader, unsaid: str | None) -> QuantFacts:
    """`unsaid` is the method where none is named."""
    method = said.get("quant_method") or unsaid
    if str(method) not in METHODS:
        raise ConfigError(
            f"{said.source} says quant_method {method!r}, which is not supported; known: "
            f"{', '.join(sorted(METHODS))}; use another checkpoint of this model, or the unquantized one"
        )
    return METHODS[str(method)](said)


def choose_quant(asked: str | None, stored: QuantFacts | None) -> QuantFacts | None:
    """The facts of a checkpoint in a model directory, if `--quantization` agrees."""
    if asked is None:
        return stored
    if stored is not None:
        if _SAME.get(asked, asked) != _SAME.get(stored.method, stored.method):
            raise ConfigError(
                f"quantization={asked!r} contradicts the checkpoint, whose weights are stored as"
                f" {stored.method}; leave it out"
            )
        return stored
    if asked not in ONLINE:
        of_files = f"; {asked} needs a checkpoint stored like that" if _is_stored_only(asked) else ""
        raise ConfigError(
            f"quantization={asked!r} cannot be made of an unquantized checkpoint while it is loaded:"
            f" {', '.join(sorted(ONLINE))} can{of_files}"
        )
    return ONLINE[asked]


def _is_stored_only(name: str) -> bool:
    return _SAME.get(name, name) in METHODS or name == "gguf"

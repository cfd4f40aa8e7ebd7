"""Quantization of a checkpoint: one reader of `quantization_config` per method."""

from collections.abc import Callable
from pathlib import Path

from quire.checkpoint.quant.auto_round import read_auto_round
from quire.checkpoint.quant.awq import read_awq
from quire.checkpoint.quant.bitsandbytes import read_bitsandbytes
from quire.checkpoint.quant.compressed import read_compressed
from quire.checkpoint.quant.facts import QuantFacts, all_but
from quire.checkpoint.quant.fp8 import read_fbgemm, read_fp8
from quire.checkpoint.quant.gptq import read_gptq
from quire.checkpoint.quant.hqq import HQQ_AS_STORED, is_saved_by_hqq, read_hqq
from quire.checkpoint.quant.modelopt import read_modelopt
from quire.checkpoint.quant.mxfp4 import read_mxfp4, read_mxfp8
from quire.checkpoint.quant.quark import read_quark
from quire.checkpoint.quant.schemes import Fp8, Int8
from quire.checkpoint.quant.torchao import read_torchao
from quire.checkpoint.reader import ConfigReader, read_json
from quire.errors import ConfigError

METHODS: dict[str, Callable[[ConfigReader], QuantFacts]] = {
    "auto-round": read_auto_round,
    "awq": read_awq,
    "bitsandbytes": read_bitsandbytes,
    "compressed-tensors": read_compressed,
    "fbgemm_fp8": read_fbgemm,
    "fp8": read_fp8,
    "gptq": read_gptq,
    "hqq": read_hqq,
    "modelopt": read_modelopt,
    "mxfp4": read_mxfp4,
    "mxfp8": read_mxfp8,
    "quark": read_quark,
    "torchao": read_torchao,
}
"""Functions that read quantization_config, by quant_method."""
ONLINE = {
    "fp8": QuantFacts("fp8", all_but((), Fp8(stored=False))),
    "int8": QuantFacts("int8", all_but((), Int8(activations="none", stored=False))),
}
"""Methods that quantize the weights of an unquantized checkpoint while it is loaded."""
_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Method by the file name that older quantization tools write beside config.json."""
_ALIASES = {
    "auto_round": "auto-round",
    "awq_marlin": "awq",
    "gpt_oss_mxfp4": "mxfp4",
    "gptq_marlin": "gptq",
    "inc": "auto-round",
    "modelopt_fp4": "modelopt",
    "modelopt_mixed": "modelopt",
    "modelopt_mxfp8": "modelopt",
}
"""Other names of methods, which are names of kernels or of single formats of a tool."""


def read_quant(keys: ConfigReader, path: Path | None = None) -> QuantFacts | None:
    """Read the quantization from config.json or another file in the directory `path`; None: the checkpoint is
    unquantized."""
    for key in ("quantization_config", "compression_config"):
        settings = keys.get(key)
        if settings:
            if not isinstance(settings, dict):
                raise keys.wrong(key, "an object")
            default = "compressed-tensors" if key == "compression_config" else None
            return _read(ConfigReader(f"{keys.source}: {key}", settings), default)
    for name, method in _FILES.items():
        if path is not None and (path / name).is_file():
            return _read(ConfigReader(str(path / name), read_json(path / name)), method)
    return HQQ_AS_STORED if path is not None and is_saved_by_hqq(path) else None


def _read(keys: ConfigReader, default: str | None) -> QuantFacts:
    """Read the settings; `default` is the method for settings without quant_method."""
    method = keys.get("quant_method") or default
    reader = METHODS.get(_ALIASES.get(str(method), str(method)))
    if reader is None:
        raise ConfigError(
            f"{keys.source} has the quant_method {method!r}, which is not supported; known: "
            f"{', '.join(sorted(METHODS))}; use another checkpoint of this model, or the unquantized one"
        )
    return reader(keys)


def choose_quant(requested: str | None, stored: QuantFacts | None) -> QuantFacts | None:
    """Return the checkpoint's quantization or, for an unquantized checkpoint, the online quantization that
    `--quantization` requests. Raise if the request contradicts the checkpoint."""
    if requested is None:
        return stored
    if stored is not None:
        if _ALIASES.get(requested, requested) != _ALIASES.get(stored.method, stored.method):
            raise ConfigError(
                f"quantization={requested!r} contradicts the checkpoint, which is stored as"
                f" {stored.method}; leave it out"
            )
        return stored
    if requested not in ONLINE:
        is_stored_only = _ALIASES.get(requested, requested) in METHODS or requested == "gguf"
        hint = f"; {requested} needs a checkpoint in that format" if is_stored_only else ""
        raise ConfigError(
            f"quantization={requested!r} is not supported for an unquantized checkpoint;"
            f" use {' or '.join(sorted(ONLINE))}{hint}"
        )
    return ONLINE[requested]

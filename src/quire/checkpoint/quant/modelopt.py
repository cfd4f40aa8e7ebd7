"""ModelOpt: FP8, NVFP4 and MXFP8 checkpoints of NVIDIA, with one format for all layers or for each layer."""

import re
from typing import Any

from quire.checkpoint.quant.facts import LayerRule, QuantFacts, layer_pattern, target_pattern
from quire.checkpoint.quant.schemes import BlockFloat, Fp8, Scheme
from quire.checkpoint.reader import ConfigReader

METHOD = "modelopt"
_NVFP4 = BlockFloat("nvfp4", tensor_scale="weight_scale_2")
_ALGOS: dict[str, Scheme] = {
    "FP8": Fp8("tensor", "static"),
    "FP8_PB_WO": Fp8("block", "group"),
    "FP8_PER_CHANNEL_PER_TOKEN": Fp8("channel", "token"),
    "MXFP8": BlockFloat("mxfp8"),
    "NVFP4": _NVFP4,
    "W4A16_NVFP4": _NVFP4,
}
"""Schemes by quant_algo. Activations of NVFP4 and MXFP8 are not quantized."""
_MIXED = "MIXED_PRECISION"
"""The quant_algo of a checkpoint with a format for each layer."""
_OTHER_EXPERT = re.compile(r"\.experts\.[1-9]")
_GROUPS = {"NVFP4": 16, "W4A16_NVFP4": 16, "MXFP8": 32}
"""Number of inputs per scale, by quant_algo, for formats with a scale per block of inputs."""


def read_modelopt(keys: ConfigReader) -> QuantFacts:
    """Read the scheme of all layers, or that of each layer in `quantized_layers`. Names of excluded layers
    may have wildcards. In hf_quant_config.json the settings are nested in `quantization`."""
    if isinstance(inner := keys.get("quantization"), dict):
        keys = ConfigReader(f"{keys.source}: quantization", inner)
    names = keys.names("ignore") + keys.names("exclude_modules")
    skipped = [LayerRule(target_pattern(name), None) for name in names]
    is_mixed = str(keys.get("quant_algo")).upper() == _MIXED
    schemes = _read_layers(keys) if is_mixed else [LayerRule("", _read_algo(keys))]
    return QuantFacts(METHOD, (*skipped, *schemes), _read_cache_dtype(keys))


def _read_layers(keys: ConfigReader) -> list[LayerRule]:
    """Read `quantized_layers`, the format of each layer by name. The rule of the most frequent format is the
    last rule. Only the format of the first expert of a layer is read, since all experts have the same
    format."""
    layers: Any = keys.get("quantized_layers")
    if not isinstance(layers, dict) or not all(isinstance(layer, dict) for layer in layers.values()):
        raise keys.wrong("quantized_layers", "an object with the quant_algo of each layer")
    names: dict[Scheme, list[str]] = {}
    for name, layer in layers.items():
        scheme = _read_algo(ConfigReader(f"{keys.source}: {name}", layer))
        if not _OTHER_EXPERT.search(name):
            names.setdefault(scheme, []).append(name)
    ordered = sorted(names, key=lambda scheme: len(names[scheme]))
    return [LayerRule(layer_pattern(*names[scheme]), scheme) for scheme in ordered]


def _read_algo(keys: ConfigReader) -> Scheme:
    algo = str(keys.get("quant_algo")).upper()
    if algo not in _ALGOS:
        raise keys.wrong("quant_algo", f"one of {', '.join(_ALGOS)} or {_MIXED}")
    group = _GROUPS.get(algo)
    if group is not None and keys.get("group_size") not in (None, group):
        raise keys.wrong("group_size", f"{group}, the inputs per scale of {algo}")
    return _ALGOS[algo]


def _read_cache_dtype(keys: ConfigReader) -> str | None:
    """Return the KV cache dtype from `kv_cache_quant_algo` or `kv_cache_scheme`. Algorithms other than FP8
    are ignored, so that the cache has the model's dtype."""
    scheme = keys.get("kv_cache_scheme")
    is_float8 = isinstance(scheme, dict) and (scheme.get("num_bits"), scheme.get("type")) == (8, "float")
    return "fp8_e4m3" if is_float8 or keys.get("kv_cache_quant_algo") == "FP8" else None

"""The model of a plan: on disk, on the hub, given by its sizes, or estimated from its parameters alone."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from quire.checkpoint.facts import ArchFacts, LayerFacts, MoeFacts, RopeFacts, Routing
from quire.checkpoint.hub import locate
from quire.checkpoint.model import Checkpoint, read_checkpoint
from quire.checkpoint.object_store import is_url
from quire.checkpoint.weights import count_parameters
from quire.config.env import Env
from quire.config.plugins import load_plugins
from quire.errors import ConfigError

_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "max_len", "tied")
_NEEDED = ("layers", "hidden", "heads", "intermediate", "vocab")


class KnownSizes(NamedTuple):
    """Typical sizes of a dense decoder, from which a model with a known number of parameters is estimated."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    max_len: int
    head_dim: int = 128
    tied: int = 0


KNOWN = {
    "0.6b": KnownSizes(28, 1024, 16, 8, 3072, 151936, 40960, tied=1),
    "1b": KnownSizes(16, 2048, 32, 8, 8192, 128256, 131072, head_dim=64, tied=1),
    "3b": KnownSizes(28, 3072, 24, 8, 8192, 128256, 131072, tied=1),
    "7b": KnownSizes(32, 4096, 32, 8, 14336, 32768, 32768),
    "8b": KnownSizes(32, 4096, 32, 8, 14336, 128256, 131072),
    "13b": KnownSizes(40, 5120, 40, 40, 13824, 32000, 4096),
    "14b": KnownSizes(40, 5120, 40, 8, 17408, 151936, 40960),
    "32b": KnownSizes(64, 5120, 64, 8, 25600, 151936, 40960),
    "70b": KnownSizes(80, 8192, 64, 8, 28672, 128256, 131072),
    "72b": KnownSizes(80, 8192, 64, 8, 29568, 152064, 131072),
    "123b": KnownSizes(88, 12288, 96, 8, 28672, 32768, 131072),
    "405b": KnownSizes(126, 16384, 128, 8, 53248, 128256, 131072),
}
"""Sizes by the number of parameters in model names."""
_NAMED_SIZE = re.compile(r"(?<![\d.x])(\d+(?:\.\d+)?b)(?:-a(\d+(?:\.\d+)?b))?(?![a-z])", re.IGNORECASE)
"""A size in a name: `70b`, or `235b-a22b` for a mixture of experts; not `8x7b`."""
_NAMED_PRECISIONS = {
    "fp8": re.compile(r"fp8|nvfp4", re.IGNORECASE),  # NVFP4 weights are FP8 once they are loaded
    "int8": re.compile(r"int8|w8a8|w8a16|8bit|q8_0", re.IGNORECASE),
    "int4": re.compile(r"awq|gptq|int4|w4a16|w4a8|4bit|mxfp4|autoround|hqq|q4_", re.IGNORECASE),
}
"""Words of model names for the format of the weights, by precision; the first that matches counts."""
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([mbt])", re.IGNORECASE)
_UNITS = {"m": 1e6, "b": 1e9, "t": 1e12}
_SMALLEST, _LARGEST, _LARGEST_MOE = 0.5e9, 500e9, 10e12
_HEAD_DIM, _KV_HEADS, _VOCAB, _MAX_LEN = 128, 8, 128256, 131072
_EXPERTS_PER_TOKEN = 8
_REMEDY = (
    "give sizes instead of a name, such as "
    "layers=80,hidden=8192,heads=64,kv_heads=8,intermediate=28672,vocab=128256"
)
_ADVICE = (
    f"Without its config.json, {_REMEDY}, or a number of parameters: "
    "--params 70B, or --params 671B --active 37B for a mixture of experts"
)


def subject(model: str, env: Env, *, advice: str = _ADVICE, **options: Any) -> tuple[Checkpoint, str]:
    """Return the checkpoint to plan for, and a note if its sizes were approximated (else an empty text).
    `model` is a path, a hub id, a URL or sizes. The error for a model that is not found ends with
    `advice`."""
    load_plugins()
    if "=" in model:
        return _build_checkpoint(_parse(model)), ""
    if is_url(model) or Path(model).exists() or Path(model).suffix == ".gguf":
        # load_format="dummy" locates the model without its weights: config.json is enough.
        return read_checkpoint(locate(model, cache_root=env.cache_root, load_format="dummy")), ""
    try:
        path = locate(model, cache_root=env.cache_root, load_format="dummy", **options)
        return read_checkpoint(path), ""
    except ConfigError as error:
        size = _NAMED_SIZE.search(model)
        if size is None:
            raise ConfigError(f"{error}\n{advice}".strip()) from None
        checkpoint, estimate = by_parameters(size[1], size[2])
        return checkpoint, f"no config.json found; {estimate}"


def precision_in(name: str) -> str | None:
    """Return the precision that a model's name states, such as `-FP8` or `-AWQ`, or None."""
    return next((kind for kind, words in _NAMED_PRECISIONS.items() if words.search(name)), None)


def by_parameters(params: str, active: str | None = None) -> tuple[Checkpoint, str]:
    """Return a model of this many parameters, and a note with the sizes that were assumed. The sizes between
    those of `KNOWN` are interpolated."""
    total = _count("--params", params, _LARGEST if active is None else _LARGEST_MOE)
    if active is None:
        known = KNOWN.get(params.lower())
        checkpoint = _build_checkpoint(known._asdict()) if known else _dense(total)
    else:
        used = _count("--active", active, _LARGEST)
        if used >= total:
            raise ConfigError(f"--active {active} must be less than --params {params}")
        checkpoint = _mixture(total, used)
    facts = checkpoint.facts
    note = (
        f"an estimate from the size alone: {len(facts.layers)} layers, hidden size {facts.hidden}, "
        f"{facts.heads} heads, {facts.kv_heads} KV heads of {facts.head_dim}"
    )
    if facts.moe is not None:
        note += f", {facts.moe.experts} experts of {facts.moe.intermediate}, {_EXPERTS_PER_TOKEN} per token"
        note += "; with latent attention (MLA, as in DeepSeek-V3) the KV cache is smaller"
    return checkpoint, note


def _count(flag: str, text: str, largest: float) -> float:
    """Return a number of parameters, such as 7B or 1.2T."""
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{flag} {text!r} is not a number of parameters such as 600M, 7B, 175B or 1.2T")
    count = float(match[1]) * _UNITS[match[2].lower()]
    if not _SMALLEST <= count <= largest:
        limits = f"{_SMALLEST / 1e9:g}B to {largest / 1e9:g}B"
        raise ConfigError(f"{flag} {text}: sizes are estimated from {limits}; beyond that, {_REMEDY}")
    return count


def _dense(params: float) -> Checkpoint:
    """Estimate a dense model: layers and hidden size interpolated between those of `KNOWN`, and the
    intermediate size from the remaining parameters."""
    rows = [
        (count_parameters(_build_checkpoint(known._asdict()).facts).total, known) for known in KNOWN.values()
    ]
    sizes = np.log([total for total, _ in rows])
    hidden, layers = (
        float(np.exp(np.interp(np.log(params), sizes, np.log([getattr(known, name) for _, known in rows]))))
        for name in ("hidden", "layers")
    )
    unit = _HEAD_DIM * _KV_HEADS
    rounded = max(round(hidden / unit), 1) * unit
    checkpoint = _build_checkpoint(
        {
            "layers": round(layers),
            "hidden": rounded,
            "heads": rounded // _HEAD_DIM,
            "kv_heads": _KV_HEADS,
            "intermediate": 0,
            "vocab": _VOCAB,
            "max_len": _MAX_LEN,
            "tied": int(params < 2e9),
        }
    )
    rest = params - count_parameters(checkpoint.facts).total
    per_unit = 3 * rounded * round(layers) * 256
    return replace(
        checkpoint, facts=replace(checkpoint.facts, intermediate=256 * max(round(rest / per_unit), 1))
    )


def _mixture(params: float, active: float) -> Checkpoint:
    """Estimate a mixture of experts: a dense model of the active size, with its intermediate size divided
    among the experts of a token, and as many experts as the total number of parameters needs."""
    checkpoint = _dense(active)
    facts = checkpoint.facts
    size = max(round(facts.intermediate / _EXPERTS_PER_TOKEN / _HEAD_DIM), 1) * _HEAD_DIM
    layers = len(facts.layers)
    beside = count_parameters(replace(facts, intermediate=0)).total
    experts = max(round((params - beside) / (layers * facts.hidden * (3 * size + 1))), _EXPERTS_PER_TOKEN)
    moe = MoeFacts(experts, size, Routing(_EXPERTS_PER_TOKEN))
    sparse = tuple(replace(layer, moe=True) for layer in facts.layers)
    return replace(
        checkpoint, facts=replace(facts, architecture="Qwen3MoeForCausalLM", moe=moe, layers=sparse)
    )


def _parse(text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in _SIZES or not value.isdecimal():
            raise ConfigError(f"{part!r} is not a size of a model; known: {', '.join(_SIZES)}, each =NUMBER")
        sizes[name] = int(value)
    if missing := [name for name in _NEEDED if not sizes.get(name)]:
        raise ConfigError(f"a plan by sizes also needs {', '.join(missing)}")
    return sizes


def _build_checkpoint(sizes: dict[str, int]) -> Checkpoint:
    heads, max_len = sizes["heads"], sizes.get("max_len", 32768)
    head_dim = sizes.get("head_dim", sizes["hidden"] // heads)
    layer = LayerFacts(RopeFacts(dim=head_dim, max_len=max_len))
    facts = ArchFacts(
        architecture="LlamaForCausalLM",
        vocab=sizes["vocab"],
        hidden=sizes["hidden"],
        intermediate=sizes["intermediate"],
        heads=heads,
        kv_heads=sizes.get("kv_heads", heads),
        head_dim=head_dim,
        norm_eps=1e-5,
        layers=(layer,) * sizes["layers"],
        max_len=max_len,
        tied=bool(sizes.get("tied")),
    )
    return Checkpoint(
        path=Path("."),
        format="hf",
        facts=facts,
        dtype="bfloat16",
        derived_max_len=max_len,
        bos_id=None,
        eos_ids=(),
    )

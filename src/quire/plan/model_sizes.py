"""The model of a plan: on disk, on the hub, or given by its sizes."""

import re
from pathlib import Path
from typing import Any, NamedTuple

from quire.checkpoint.facts import ArchFacts, LayerFacts, RopeFacts
from quire.checkpoint.hub import locate
from quire.checkpoint.model import Checkpoint, read_checkpoint
from quire.config.env import Env
from quire.config.plugins import load_plugins
from quire.errors import ConfigError

_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "max_len", "tied")
_NEEDED = ("layers", "hidden", "heads", "intermediate", "vocab")


class KnownSizes(NamedTuple):
    """A dense decoder with sizes that many models share."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    max_len: int


KNOWN = {
    "0.6b": KnownSizes(28, 1024, 16, 8, 3072, 151936, 40960),
    "1b": KnownSizes(16, 2048, 32, 8, 8192, 128256, 131072),
    "3b": KnownSizes(28, 3072, 24, 8, 8192, 128256, 131072),
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
"""By the size in model names."""
_NAMED_SIZE = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?)b(?![a-z])", re.IGNORECASE)


def subject(model: str, env: Env, **options: Any) -> tuple[Checkpoint, str]:
    """Return the model, and a note if it was approximated."""
    load_plugins()
    if "=" in model:
        return _build_checkpoint(_parse(model)), ""
    if Path(model).exists() or Path(model).suffix == ".gguf":
        return read_checkpoint(locate(model, cache_root=env.cache_root)), ""
    try:
        # Without weights: config.json is enough.
        path = locate(model, cache_root=env.cache_root, load_format="dummy", **options)
        return read_checkpoint(path), ""
    except ConfigError as error:
        size = _NAMED_SIZE.search(model)
        if size is None or (known := KNOWN.get(size[0].lower())) is None:
            raise ConfigError(
                f"{error}\nWithout its config.json, give sizes instead of a name, such as "
                "layers=80,hidden=8192,heads=64,kv_heads=8,intermediate=28672,vocab=128256, or a name with "
                f"one of {', '.join(KNOWN)} in it"
            ) from None
        sizes = {name: int(value) for name, value in known._asdict().items()}
        return _build_checkpoint(
            sizes
        ), f"no config.json found: assuming the usual sizes of a {size[0]} model"


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

"""Where weights come from: the protocol, the table of formats, and which one a checkpoint is in."""

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from quire.checkpoint.model import Checkpoint
from quire.errors import ConfigError, nearest
from quire.layers.scope import Target
from quire.loader.shards import STATE
from quire.quant.format import Format
from quire.registry import LazyTable

FORMATS = LazyTable(
    "load format",
    {
        "safetensors": "quire.loader.safetensors:SafetensorsSource",
        "pt": "quire.loader.pt:PickleSource",
        "gguf": "quire.loader.gguf:GGUFSource",
        "dummy": "quire.loader.dummy:DummySource",
        "sharded_state": "quire.loader.sharded:ShardedSource",
    },
)


class Source(Protocol):
    """Made from (checkpoint, seed). Names are those of a Hugging Face checkpoint."""

    num_readers: int
    """How many threads may fill at a time."""

    def shapes(self, targets: Mapping[str, Target]) -> Mapping[str, tuple[int, ...]]:
        """The shape of every tensor there is."""
        ...

    def order(self, targets: Mapping[str, Target]) -> Iterable[str]:
        """The names of `targets` in the order that reads fastest."""
        ...

    def format(self, plain: Format) -> Format:
        """The one in which layers may stay as they are stored, with `plain` for those that may not."""
        ...

    def fill(self, target: Target) -> None:
        """Copy one tensor, or what the target takes of it and no more, converting to the type and device of
        its target."""
        ...


def put(stored: Tensor, target: Target) -> None:
    """Copy a tensor of a file, or what the target takes of it."""
    check_type(stored.dtype, target)
    whole = stored.reshape(target.shape)
    if target.is_whole:
        target.tensor.copy_(whole)
        return
    assert target.axis is not None
    for own, into in target.slices():
        into.copy_(whole.narrow(target.axis, own.start, own.stop - own.start))


def check_type(stored: torch.dtype, target: Target) -> None:
    """Numbers that mean something only beside a scale are not converted."""
    into = target.tensor
    narrow = into.dtype.itemsize == 1 or not into.is_floating_point()
    if narrow and stored != into.dtype:
        raise ConfigError(
            f"{target.name} is stored as {stored}, but its quantization says {into.dtype}: config.json "
            "and the weights are not of one model"
        )


def detect(checkpoint: Checkpoint, load_format: str) -> str:
    """The key of FORMATS that `load_format` means for this checkpoint."""
    known = ("auto", *FORMATS)
    if load_format not in known:
        hint = nearest(load_format, list(known))
        raise ConfigError(f"unknown load_format {load_format!r}; known: {', '.join(known)}{hint}")
    if load_format == "auto":
        if checkpoint.format == "gguf":
            return "gguf"
        if (checkpoint.path / STATE).is_file():
            return "sharded_state"
        has_safetensors = any(checkpoint.path.glob("*.safetensors*"))
        return "safetensors" if has_safetensors or not any(checkpoint.path.glob("*.bin*")) else "pt"
    if load_format != "dummy" and (load_format == "gguf") != (checkpoint.format == "gguf"):
        kind = "a GGUF file" if checkpoint.format == "gguf" else "a model directory"
        raise ConfigError(
            f"load_format {load_format!r} does not fit {checkpoint.path}, which is {kind}; use auto"
        )
    return load_format

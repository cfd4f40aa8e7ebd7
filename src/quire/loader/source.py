"""Sources of weights: the protocol, the table of load formats, and their detection."""

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from quire.checkpoint.model import Checkpoint
from quire.checkpoint.quant.hqq import FILE as HQQ_FILE
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


class Source:
    """Interface of sources of weights: it finds the tensors of a checkpoint by their Hugging Face names, and
    fills those of the model. A source is built from (checkpoint, seed)."""

    num_readers = 1
    """Number of threads that may call `fill` at a time."""

    def shapes(self, targets: Mapping[str, Target]) -> Mapping[str, tuple[int, ...]]:
        raise NotImplementedError

    def order(self, targets: Mapping[str, Target]) -> Iterable[str]:
        """Return the names of `targets` in the order that is fastest to read."""
        return [name for name in self.shapes(targets) if name in targets]

    def format(self, plain: Format) -> Format:
        """Return the weight format of layers: as stored if this source supports it, otherwise `plain`."""
        return plain

    def fill(self, target: Target) -> None:
        """Copy the tensor `target.name`, or the target's shard of it, into the target, whose dtype and device
        it gets."""
        raise NotImplementedError


def put(stored: Tensor, target: Target) -> None:
    """Copy a checkpoint tensor that is in memory, or the target's shard of it, into the target."""
    check_type(stored.dtype, target)
    tensor = stored.reshape(target.shape)
    if target.is_whole:
        target.tensor.copy_(tensor)
        return
    assert target.axis is not None
    for span, into in target.slices():
        into.copy_(tensor.narrow(target.axis, span.start, span.stop - span.start))


def check_type(stored: torch.dtype, target: Target) -> None:
    """Raise if a quantized tensor would be converted to another dtype, since its values depend on a scale."""
    into = target.tensor
    narrow = into.dtype.itemsize == 1 or not into.is_floating_point()
    if narrow and stored != into.dtype:
        raise ConfigError(
            f"{target.name} is stored as {stored}, but its quantization says {into.dtype}: config.json "
            "does not match the weights"
        )


def detect(checkpoint: Checkpoint, load_format: str) -> str:
    """Return the load format, a key of FORMATS: `load_format` itself or, for `auto`, that of the checkpoint's
    files. Raise a ConfigError if it does not fit the checkpoint."""
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
        has_pickles = any(checkpoint.path.glob("*.bin*")) or (checkpoint.path / HQQ_FILE).is_file()
        return "pt" if has_pickles and not has_safetensors else "safetensors"
    if load_format != "dummy" and (load_format == "gguf") != (checkpoint.format == "gguf"):
        kind = "a GGUF file" if checkpoint.format == "gguf" else "a model directory"
        raise ConfigError(
            f"load_format {load_format!r} does not fit {checkpoint.path}, which is {kind}; use auto"
        )
    return load_format


def is_of_other_stage(name: str, layers: range | None) -> bool:
    """Return whether a tensor belongs to another pipeline stage than the one with these layers; None: all
    layers are here."""
    number = re.search(r"\.(\d+)\.", name)
    return layers is not None and (number is None or int(number[1]) not in layers)

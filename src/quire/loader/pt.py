"""Weights from pytorch_model.bin files and files saved by hqq, read without running any code in them."""

import io
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from quire.checkpoint.model import Checkpoint
from quire.checkpoint.quant.hqq import FILE as HQQ_FILE
from quire.errors import ConfigError
from quire.layers.scope import Target
from quire.loader.shards import find_shards
from quire.loader.source import Source, put


class PickleSource(Source):
    """Source of the tensors of pytorch_model*.bin, or of a file that hqq has saved."""

    def __init__(self, checkpoint: Checkpoint, seed: int) -> None:
        self._tensors: dict[str, Tensor] = {}
        if (checkpoint.path / HQQ_FILE).is_file():
            self._tensors = load_pickle(checkpoint.path / HQQ_FILE)
            return
        for path in find_shards(checkpoint.path, "pytorch_model", ".bin"):
            self._tensors |= load_pickle(path)

    def shapes(self, targets: Mapping[str, Target]) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def fill(self, target: Target) -> None:
        put(self._tensors[target.name], target)


def load_pickle(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a weight file by name; their bytes are mapped, not copied."""
    return _plain_tensors(
        str(path), lambda: torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    )


def load_pickle_bytes(name: str, data: memoryview) -> dict[str, Tensor]:
    """Return the tensors of a file that was read into memory; `name` is used in error messages."""
    return _plain_tensors(
        name, lambda: torch.load(io.BytesIO(data), map_location="cpu", mmap=False, weights_only=True)
    )


def _flatten(state: dict[Any, Any], prefix: str = "", depth: int = 2) -> Iterator[tuple[str, Any]]:
    """Yield the values of a nested dictionary by dotted name. hqq saves a dictionary for each layer;
    older versions put the scales into an inner dictionary, `meta`, which is not part of names."""
    for key, value in state.items():
        if isinstance(value, dict) and depth:
            yield from _flatten(value, prefix if key == "meta" else f"{prefix}{key}.", depth - 1)
        else:
            yield f"{prefix}{key}", value


def _plain_tensors(name: str, load: Callable[[], Any]) -> dict[str, Tensor]:
    """Return the tensors, by name, that `load` reads from the file `name`. Raise for sparse tensors, since
    torch does not check their indices."""
    try:
        state = load()
    except (UnpicklingError, RuntimeError, ValueError, OSError, EOFError) as error:
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        reason = first_line.partition(". In PyTorch")[0]  # torch goes on to advise loading it with its code
        raise ConfigError(f"{name} cannot be read as plain weights: {reason}") from error
    if not isinstance(state, dict):
        raise ConfigError(f"{name} holds a {type(state).__name__}, expected tensors by name")
    tensors = {key: tensor for key, tensor in _flatten(state) if isinstance(tensor, Tensor)}
    for key, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            layout = str(tensor.layout).removeprefix("torch.")
            raise ConfigError(
                f"{name}: {key} has the layout {layout} on the device {tensor.device.type}; weights must be "
                "strided tensors with data: save it as tensor.to_dense(), or as a .safetensors file"
            )
    return tensors

"""Weights from pytorch_model.bin files, read without running any code in them."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor

from quire.config.model import Checkpoint
from quire.errors import ConfigError
from quire.layers.scope import Target
from quire.loader.shards import find_shards
from quire.loader.source import put
from quire.quant.format import Format


class PickleSource:
    """The tensors of pytorch_model*.bin."""

    num_readers = 1

    def __init__(self, checkpoint: Checkpoint, seed: int) -> None:
        self._tensors: dict[str, Tensor] = {}
        for path in find_shards(checkpoint.path, "pytorch_model", ".bin"):
            self._tensors |= load_pickle(path)

    def shapes(self, targets: Mapping[str, Target]) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def order(self, targets: Mapping[str, Target]) -> Iterable[str]:
        return [name for name in self._tensors if name in targets]

    def format(self, plain: Format) -> Format:
        return plain

    def fill(self, target: Target) -> None:
        put(self._tensors[target.name], target)


def load_pickle(path: Path) -> dict[str, Tensor]:
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (UnpicklingError, RuntimeError, OSError, EOFError) as error:
        raise ConfigError(f"{path} cannot be read as plain weights: {str(error).splitlines()[0]}") from error
    if not isinstance(state, dict):
        raise ConfigError(f"{path} holds a {type(state).__name__}, expected tensors by name")
    return {str(name): tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}

"""Weights of sentence-transformers modules and task heads, in folders and files beside the model's."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from quire.checkpoint.model import Checkpoint
from quire.errors import ConfigError
from quire.layers.scope import Target
from quire.loader.pt import load_pickle
from quire.loader.source import Source, put
from quire.quant.format import Format


class ExtraModules(Source):
    """Source of the weights of sentence-transformers modules and task heads, which are small and lie beside
    the model's weights. Their names begin with the names of their folders."""

    def __init__(self, source: Source, checkpoint: Checkpoint) -> None:
        self.source, self.num_readers = source, source.num_readers
        self.tensors = {
            f"{dense.folder}.{name}": tensor
            for dense in checkpoint.pooling.dense
            for name, tensor in _read(checkpoint.path / dense.folder).items()
        } | {
            f"{head.name}.{name}": tensor
            for head in checkpoint.pooling.task_heads
            if head.file
            for name, tensor in load_pickle(checkpoint.path / head.file).items()
        }

    def shapes(self, targets: Mapping[str, Target]) -> Mapping[str, tuple[int, ...]]:
        return {**self.source.shapes(targets)} | {
            name: tuple(tensor.shape) for name, tensor in self.tensors.items()
        }

    def order(self, targets: Mapping[str, Target]) -> Iterable[str]:
        return [*self.source.order(targets), *(name for name in self.tensors if name in targets)]

    def format(self, plain: Format) -> Format:
        return self.source.format(plain)

    def fill(self, target: Target) -> None:
        if target.name in self.tensors:
            put(self.tensors[target.name], target)
        else:
            self.source.fill(target)


def _read(folder: Path) -> dict[str, Tensor]:
    if (file := folder / "model.safetensors").is_file():
        return load_file(file)
    if (file := folder / "pytorch_model.bin").is_file():
        return load_pickle(file)
    raise ConfigError(f"no weights in {folder}: looked for model.safetensors and pytorch_model.bin")

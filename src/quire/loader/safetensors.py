"""Weights from safetensors files, mapped and copied one tensor at a time."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from quire.config.model import Checkpoint
from quire.errors import ConfigError
from quire.layers.scope import Target
from quire.loader.shards import find_shards
from quire.loader.source import put
from quire.quant.format import Format


class SafetensorsSource:
    """The tensors of safetensors files, mapped and read one by one."""

    def __init__(self, checkpoint: Checkpoint, seed: int) -> None:
        self._files = {path: _open(path) for path in find_shards(checkpoint.path, "model", ".safetensors")}
        self._home = {name: path for path, file in self._files.items() for name in file.keys()}  # noqa: SIM118

    def shapes(self, targets: Mapping[str, Target]) -> Mapping[str, tuple[int, ...]]:
        return {
            name: tuple(self._files[path].get_slice(name).get_shape()) for name, path in self._home.items()
        }

    def order(self, targets: Mapping[str, Target]) -> Iterable[str]:
        return [name for name in self._home if name in targets]

    def format(self, plain: Format) -> Format:
        return plain

    def fill(self, target: Target) -> None:
        name, path = target.name, self._home[target.name]
        try:
            put(self._files[path].get_tensor(name), target)
        except SafetensorError as error:
            raise ConfigError(f"cannot read {name} from {path}: {error}; download the file again") from error


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{path} is not a whole safetensors file ({error}); it is truncated or corrupt, download it again"
        ) from error

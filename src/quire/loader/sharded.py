"""Sharded state: a model saved as its kernels read it, with files per rank; loaded without repacking."""

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from quire.checkpoint.model import Checkpoint
from quire.checkpoint.reader import ConfigReader, read_json
from quire.errors import ConfigError
from quire.kernels.cpu import native
from quire.layers.scope import BindsKernels, Target
from quire.loader.safetensors import SafetensorsSource, merged_entries
from quire.loader.shards import STATE, write_json, write_tensors
from quire.quant.experts import StoredExperts
from quire.quant.weight import Weight

VERSION = 1
"""Version of the weight layouts; increased when an older state would be read wrongly."""
PART = "model-rank-{rank}-part-{part}.safetensors"
_PART_BYTES = 5 << 30


@dataclass(frozen=True, slots=True)
class ShardedStateKey:
    """Settings of the engine that saved a sharded state; an engine with other settings needs other tensors
    and cannot load the state."""

    architecture: str
    dtype: str
    device: str
    quantization: str | None
    tensor_parallel_size: int = 1
    version: int = VERSION

    @classmethod
    def of(
        cls, architecture: str, dtype: torch.dtype, device: torch.device, method: str | None, size: int = 1
    ) -> "ShardedStateKey":
        kind = f"{device.type} ({platform.machine()}{'' if native.library() else ', no native kernels'})"
        if device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(device)
            kind = f"cuda (capability {major}.{minor})"
        return cls(architecture, str(dtype).removeprefix("torch."), kind, method, size)


def save_state(
    model: nn.Module, key: ShardedStateKey, stored: Mapping[str, tuple[int, ...]], folder: Path, rank: int = 0
) -> int:
    """Write all parameters of one tensor-parallel rank into files of `folder`, with the key; return their
    size in bytes. `stored` holds the shapes of the tensors, by name, of the checkpoint that the model was
    loaded from."""
    refuse_unsaved(model)
    part: dict[str, Tensor] = {}
    num_parts = num_bytes = part_bytes = 0
    for name, parameter in model.named_parameters():
        if part and part_bytes + parameter.nbytes > _PART_BYTES:
            write_tensors(folder / PART.format(rank=rank, part=num_parts), part)
            num_parts, part, part_bytes = num_parts + 1, {}, 0
        part[name] = parameter.detach().cpu().contiguous()
        part_bytes += parameter.nbytes
        num_bytes += parameter.nbytes
    write_tensors(folder / PART.format(rank=rank, part=num_parts), part)
    shapes = {name: list(shape) for name, shape in stored.items()}
    write_json(folder / STATE, asdict(key) | {"stored": shapes})
    return num_bytes


def refuse_unsaved(model: nn.Module) -> None:
    """Raise a ConfigError if some weights of the model cannot be restored from a sharded state (see
    `repacked_kind`)."""
    if kind := repacked_kind(model):
        raise ConfigError(
            f"weights of the kind {kind} cannot be saved as a sharded state; load the checkpoint itself"
        )


def repacked_kind(model: nn.Module) -> str:
    """Return the class name of the first weight that a sharded state cannot store: the class overrides
    `finish`, and so may keep data that are no parameters. Empty if there is none."""
    for module in model.modules():
        finish = getattr(type(module), "finish", None)
        if isinstance(module, Weight | StoredExperts) and finish not in (Weight.finish, StoredExperts.finish):
            return type(module).__name__
    return ""


class ShardedSource(SafetensorsSource):
    """Source of the parameters of a model from a sharded state, in the layouts in which they were saved."""

    def __init__(self, checkpoint: Checkpoint, seed: int) -> None:
        self.folder = checkpoint.path
        if not (self.folder / STATE).is_file():
            raise ConfigError(
                f"{self.folder} holds no saved state ({STATE} is missing); make one with "
                "`quire save-sharded-state MODEL -o DIR`, or leave load_format out"
            )
        state = ConfigReader(str(self.folder / STATE), read_json(self.folder / STATE))
        self.saved_key = {name: state.get(name) for name in ShardedStateKey.__dataclass_fields__}
        self.saved_key["tensor_parallel_size"] = self.saved_key["tensor_parallel_size"] or 1
        self.stored = {name: tuple(shape) for name, shape in (state.get("stored") or {}).items()}
        super().__init__(checkpoint, seed)

    def _find(self, checkpoint: Checkpoint) -> list[Path]:
        return []

    def open(self, rank: int) -> None:
        """Open the files of one tensor-parallel rank."""
        paths = sorted(
            self.folder.glob(PART.format(rank=rank, part="*")), key=lambda path: (len(path.name), path)
        )
        if not paths:
            raise ConfigError(
                f"{self.folder} holds no {PART.format(rank=rank, part=0)}; save the state again"
            )
        self.entries = merged_entries(paths)

    def shapes(self, targets: Mapping[str, Target]) -> Mapping[str, tuple[int, ...]]:
        return self.stored

    def check(self, key: ShardedStateKey) -> None:
        """Raise a ConfigError if the state was saved for other settings than `key`, before anything is
        read."""
        for name, value in asdict(key).items():
            if self.saved_key[name] != value:
                raise ConfigError(
                    f"the state in {self.folder} was saved for {name} {self.saved_key[name]!r}, but this "
                    f"engine has {value!r}; save it again with `quire save-sharded-state` and the flags and "
                    "machine of this engine, or load the model's checkpoint itself"
                )

    def targets(self, model: nn.Module) -> dict[str, Target]:
        """Return a target for each saved parameter, by name. Parameters of `model` with another shape or
        dtype than the saved ones are replaced."""
        refuse_unsaved(model)
        parameters, modules = dict(model.named_parameters()), dict(model.named_modules())
        unknown = [name for name in self.entries if name.rpartition(".")[0] not in modules]
        if unknown:
            raise ConfigError(
                f"the state in {self.folder} holds {unknown[0]}, which this version does not know; "
                "save it again with `quire save-sharded-state`, or load the model's checkpoint itself"
            )
        for name in parameters.keys() - self.entries.keys():
            owner, _, last = name.rpartition(".")
            setattr(modules[owner], last, None)
        for name, entry in self.entries.items():
            owner, _, last = name.rpartition(".")
            parameter = parameters.get(name)
            if parameter is None or (parameter.shape, parameter.dtype) != (entry.shape, entry.dtype):
                device = next(iter(parameters.values())).device
                tensor = torch.empty(entry.shape, dtype=entry.dtype, device=device)
                if parameter is None:
                    setattr(modules[owner], last, nn.Parameter(tensor, requires_grad=False))
                else:
                    parameter.data = tensor
        return {name: Target(name, tensor) for name, tensor in model.named_parameters()}


def bind_kernels(model: nn.Module) -> None:
    """Choose the kernels of all layers of a model whose parameters were restored from a sharded state."""
    for module in model.modules():
        if isinstance(module, Weight | StoredExperts):
            module.find_kernels()
    for module in model.modules():
        if isinstance(module, BindsKernels):
            module.bind_kernels()

"""Writes a model directory in the format of compressed-tensors."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from torch import Tensor

from quire.errors import ConfigError
from quire.loader.shards import write_json, write_tensors
from quire.logs import get_logger
from quire.quantize.schemes import RoundingScheme
from quire.quantize.stored import SourceModel

logger = get_logger(__name__)

_UNQUANTIZED = re.compile(
    r"(^|\.)(lm_head|embed\w*|wte|wpe|\w*norm\w*|\w*router\w*|gate|shared_expert_gate|conv1d|score|classifier)$"
    r"|(^|\.)(x_proj|dt_proj)$"
    r"|(^|\.)(vision_tower|vision_model|visual|multi_modal_projector)\."
)
"""Modules that stay unquantized: embeddings and head, norms, routers, Mamba's time-step and scan projections,
and vision encoders."""
_GROUPS = (128, 64, 32)
"""Default group sizes; the first one that divides the inputs of all layers is used."""
_FILE_BYTES = 4 << 30
"""A file is written when its tensors have this many bytes."""


class RoundingPlan:
    """The weights of a model that are quantized, and the group size of their scales."""

    def __init__(
        self, stored: SourceModel, scheme: RoundingScheme, group: int | None, ignore: Iterable[str]
    ) -> None:
        patterns = [re.compile(pattern) for pattern in ignore]
        self.stored, self.scheme = stored, scheme
        modules = {
            name.removesuffix(".weight"): shape
            for name, shape in stored.shapes.items()
            if name.endswith(".weight") and len(shape) == 2
        }
        self.modules = {
            module: shape
            for module, shape in modules.items()
            if not _UNQUANTIZED.search(module) and not any(pattern.search(module) for pattern in patterns)
        }
        """Maps the names of modules to quantize to the shapes of their weights."""
        self.ignored = sorted({"lm_head", *modules} - {*self.modules})
        self._check_supported()
        self.group = self._choose_group(group) if scheme.grouped else 0

    def _check_supported(self) -> None:
        stored, path = self.stored, self.stored.checkpoint.path
        if stored.checkpoint.facts.transposed:
            raise ConfigError(
                f"{path}: a {stored.checkpoint.facts.architecture} has weights with inputs before outputs, "
                "which compressed-tensors does not support; use another model"
            )
        whole = [name for name, shape in stored.shapes.items() if len(shape) == 3 and ".experts." in name]
        if whole:
            raise ConfigError(
                f"{path}: {whole[0]} holds all experts in one tensor, which compressed-tensors does not "
                "support; use a checkpoint with a tensor for each expert"
            )
        if not self.modules:
            raise ConfigError(f"{path}: nothing is left to quantize; ignore fewer layers")

    def _choose_group(self, requested: int | None) -> int:
        for group in [requested] if requested else _GROUPS:
            odd = [(name, shape[1]) for name, shape in self.modules.items() if shape[1] % group]
            if not odd:
                if requested is None and group != _GROUPS[0]:
                    logger.info(
                        "Using groups of %d inputs, since %d does not divide the inputs of all layers",
                        group,
                        _GROUPS[0],
                    )
                return group
        name, inputs = odd[0]
        fits = [
            str(group) for group in _GROUPS if all(shape[1] % group == 0 for shape in self.modules.values())
        ]
        remedy = f"use --group-size {' or '.join(fits)}" if fits else f"leave it out with --ignore '{name}'"
        raise ConfigError(f"{name} has {inputs} inputs, which groups of {group} do not divide; {remedy}")

    def apply(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return the tensors to write for the model's tensor `name`, by name: packed values and scales if the
        tensor is quantized, otherwise the tensor itself."""
        module = name.removesuffix(".weight")
        if module in self.modules and name.endswith(".weight"):
            parts = self.scheme.pack(tensor.float(), self.group, self.stored.dtype)
            return {f"{module}.{suffix}": part.contiguous() for suffix, part in parts.items()}
        return {name: tensor.to(self.stored.dtype) if self.stored.is_gguf else tensor}


class Files:
    """Writer of the safetensors files of a directory; `close` gives the files their final names and writes
    the index."""

    def __init__(self, folder: Path, file_bytes: int = _FILE_BYTES) -> None:
        self.folder = folder
        self.file_bytes = file_bytes
        self._pending: dict[str, Tensor] = {}
        self._written: list[list[str]] = []
        self.num_bytes = 0

    def add(self, tensors: dict[str, Tensor]) -> None:
        self._pending |= tensors
        if sum(tensor.nbytes for tensor in self._pending.values()) >= self.file_bytes:
            self._write()

    def _write(self) -> None:
        file = self.folder / f"part-{len(self._written)}.safetensors"
        write_tensors(file, self._pending)
        self.num_bytes += sum(tensor.nbytes for tensor in self._pending.values())
        self._written.append(list(self._pending))
        self._pending = {}

    def close(self) -> None:
        if self._pending:
            self._write()
        count, weight_map = len(self._written), dict[str, str]()
        for i, names in enumerate(self._written):
            file = f"model-{i + 1:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors"
            (self.folder / f"part-{i}.safetensors").rename(self.folder / file)
            weight_map |= dict.fromkeys(names, file)
        if count > 1:
            index = {"metadata": {"total_size": self.num_bytes}, "weight_map": weight_map}
            write_json(self.folder / "model.safetensors.index.json", index)


def write_compressed(plan: RoundingPlan, to: Path, progress: Callable[[], object]) -> int:
    """Write the quantized model, calling `progress` after each tensor; return the bytes of its tensors."""
    stored = plan.stored
    config = stored.config()
    stored.copy_rest(to)
    files = Files(to)
    for name, tensor in stored.tensors():
        files.add(plan.apply(name, tensor))
        progress()
    files.close()
    quantization = plan.scheme.config(plan.group, plan.ignored)
    write_json(to / "config.json", config | {"quantization_config": quantization})
    return files.num_bytes

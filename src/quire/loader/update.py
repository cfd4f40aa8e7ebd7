"""Updates of a loaded model's weights in place: new tensors are staged layer by layer, then copied at once.

A layer is loaded once and may repack its weights, so that new weights cannot be written into it. New weights
are loaded into a copy of the layer as it was before loading, its twin. The finished copy has the layout that
the kernels read, and is copied to the same addresses: CUDA graphs and recorded CPU steps stay valid."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quire.checkpoint.model import Checkpoint
from quire.config.parallel import Stage
from quire.errors import RequestError
from quire.layers.linear import Linear
from quire.layers.moe import Experts
from quire.layers.scope import Begins, LoadedModule, Loads, Target
from quire.loader.load import is_ignored, list_names, stored_name
from quire.loader.sharded import repacked_kind
from quire.loader.source import is_of_other_stage, put
from quire.quant.experts import StoredExperts
from quire.quant.unquantized import PlainExperts, PlainWeight
from quire.quant.weight import Weight, frozen_parameter, placeholder_parameter

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of tensors in an update; the tensors are converted to the layer's dtype."""


class TensorInfo(NamedTuple):
    """Name, dtype and shape of a tensor in an update."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(slots=True)
class _Twin:
    """A layer, and its twin: a copy of the layer from before loading, without memory."""

    layer: Any
    empty: Any
    targets: dict[str, tuple[int, ...]]
    """Shapes of the layer's checkpoint tensors, by name."""


class LayerTwins:
    """Copies without memory (twins) of a model's layers, as the layers were before their weights were
    loaded."""

    def __init__(self, checkpoint: Checkpoint, stage: Stage) -> None:
        self.checkpoint, self.stage = checkpoint, stage
        self.by_name: dict[str, _Twin] = {}
        """Maps the name of each tensor that the model loads to the twin of its layer."""
        self._by_stored: dict[str, str] = {}
        """Maps names of tensors in the checkpoint, which may have another prefix, to the model's names."""

    def record(self, model: nn.Module, stored: Mapping[str, tuple[int, ...]]) -> None:
        """Copy the layers of a model before it is loaded; `stored` maps the checkpoint's names to shapes."""
        self.by_name.clear()
        for layer in (module for module in model.modules() if isinstance(module, Loads)):
            targets = list(layer.targets())
            twin = _Twin(layer, _without_memory(layer), {target.name: target.shape for target in targets})
            self.by_name |= dict.fromkeys(twin.targets, twin)
        self._by_stored = {stored_name(name, stored): name for name in self.by_name}

    def find(self, name: str) -> str | None:
        """Return the model's name of a tensor, given this name or the name in the checkpoint; None if the
        model does not load such a tensor."""
        return name if name in self.by_name else self._by_stored.get(name)

    def is_unused(self, name: str) -> bool:
        """Return whether a tensor can be ignored: it follows from other tensors, or belongs to another
        pipeline stage."""
        layers = self.stage.layers(len(self.checkpoint.facts.layers)) if self.stage.count > 1 else None
        return is_ignored(name, self.checkpoint) or is_of_other_stage(name, layers)


class StagedUpdate:
    """New weights of some layers. The model is not changed before `commit`."""

    def __init__(self, twins: LayerTwins) -> None:
        self._twins = twins
        self._staged: dict[int, tuple[_Twin, Any, set[str]]] = {}
        """Maps the id of a layer's twin to (twin, copy of the layer with new weights, names of the tensors
        that are still missing)."""

    def check(self, infos: Iterable[TensorInfo]) -> None:
        """Raise a RequestError that names the first tensor that does not fit the model."""
        for info in infos:
            name = self._twins.find(info.name)
            if name is None and self._twins.is_unused(info.name):
                continue
            if name is None:
                raise RequestError(f"{info.name}: the model has no such weight; send names of its checkpoint")
            shape = self._twins.by_name[name].targets[name]
            if [size for size in info.shape if size != 1] != [size for size in shape if size != 1]:
                raise RequestError(f"{info.name} has the shape {info.shape}, but the model's is {shape}")
            if info.dtype not in FLOATS:
                known = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
                sent = str(info.dtype).removeprefix("torch.")
                raise RequestError(f"{info.name} has the dtype {sent}; an update has {known}")

    @torch.no_grad()
    def put(self, name: str, tensor: Tensor) -> None:
        """Load a tensor that `check` has accepted into a copy of its layer, which `commit` copies to the
        model."""
        target_name = self._twins.find(name)
        if target_name is None:
            return
        twin = self._twins.by_name[target_name]
        if id(twin) not in self._staged:
            layer = _with_memory(twin.empty)
            if isinstance(layer, Begins):
                layer.begin()
            self._staged[id(twin)] = twin, layer, set(twin.targets)
        _, layer, missing = self._staged[id(twin)]
        if not missing:
            raise RequestError(f"{name} is sent twice in one update")
        put(tensor, _target(layer, target_name))
        missing.discard(target_name)
        if not missing:
            layer.finish()

    @torch.no_grad()
    def close(self) -> None:
        """Complete layers of which only some tensors were sent with the model's current tensors; raise a
        RequestError if a layer cannot be completed."""
        for twin, layer, missing in self._staged.values():
            if missing:
                self._complete(twin, layer, missing)
            _check_alike(twin.layer, layer)

    def _complete(self, twin: _Twin, layer: Any, missing: set[str]) -> None:
        """Fill the tensors that were not sent with those of the model."""
        if not _is_kept_as_loaded(twin.layer):
            sent = sorted(twin.targets.keys() - missing)
            raise RequestError(
                f"{list_names(sent)}: the layer is stored in another form, so that all its tensors are"
                f" needed: send {list_names(sorted(missing))} as well"
            )
        for name in missing:
            _target(layer, name).tensor.copy_(_target(twin.layer, name).tensor)
        missing.clear()
        layer.finish()

    @torch.no_grad()
    def commit(self) -> int:
        """Copy the staged weights into the model; return the number of layers."""
        for twin, layer, _ in self._staged.values():
            _copy_into(twin.layer, layer)
        num_layers = len(self._staged)
        self._staged.clear()
        return num_layers


def fixed_reason(model: nn.Module) -> str:
    """Return why the weights of the model cannot be updated; empty if they can."""
    kind = repacked_kind(model)
    return kind and (
        f"weights of the kind {kind} cannot be updated: the checkpoint stores them quantized, and a trainer"
        " sends plain values. Start with the plain checkpoint, and with --quantization fp8 or int8 for less"
        " memory"
    )


def _target(layer: Loads, name: str) -> Target:
    return next(target for target in layer.targets() if target.name == name)


def _is_kept_as_loaded(layer: Any) -> bool:
    """Return whether the layer computes with its weights as they were loaded, without repacking."""
    if isinstance(layer, Linear):
        return isinstance(layer.weight, PlainWeight) and not layer.orders() and not layer.transposed
    if isinstance(layer, Experts):
        is_plain = isinstance(layer.weights, PlainExperts) and not layer.plain
        return is_plain and layer.names.layout != "interleaved"
    return isinstance(layer, LoadedModule) and type(layer).finish is LoadedModule.finish


def _copied(module: nn.Module, convert: Callable[[Any], Any]) -> Any:
    """Copy a layer with its weights; `convert` makes the parameters of the copy. Buffers and other layers
    inside of it are shared. The parts of LoRA adapters belong to the loaded layer and are left out."""
    copied = copy.copy(module)
    attributes = copied.__dict__ = dict(module.__dict__)
    attributes["_parameters"] = {
        name: None if parameter is None else convert(parameter)
        for name, parameter in module._parameters.items()
    }
    attributes["_buffers"] = dict(module._buffers)
    attributes["_modules"] = {
        name: child if child is None or isinstance(child, Loads) else _copied(child, convert)
        for name, child in module._modules.items()
    }
    for name, value in module.__dict__.items():
        if isinstance(value, list | tuple) and value and all(isinstance(x, Weight) for x in value):
            attributes[name] = type(value)(_copied(child, convert) for child in value)
    attributes |= {name: None for name in ("adapters", "lora_layer") if name in attributes}
    return copied


class _Place(NamedTuple):
    """A parameter of a twin, without memory, and the device of the loaded parameter."""

    like: Tensor
    device: torch.device
    is_expanded: bool
    """Whether the parameter is a placeholder until the layer begins to load."""


_SMALL = 1 << 16
"""Maximum number of elements of a parameter whose initial values are kept; larger parameters start as
zeros."""


def _without_memory(layer: Any) -> Any:
    def convert(parameter: Tensor) -> Tensor | _Place:
        is_expanded = parameter.numel() > 1 and not any(parameter.stride())
        if parameter.numel() <= _SMALL and not is_expanded:
            return parameter.detach().clone()
        return _Place(parameter.detach().to("meta"), parameter.device, is_expanded)

    return _copied(layer, convert)


def _with_memory(layer: Any) -> Any:
    def convert(place: Tensor | _Place) -> nn.Parameter:
        if isinstance(place, Tensor):
            return frozen_parameter(place.clone())
        shape, dtype = place.like.shape, place.like.dtype
        if place.is_expanded:
            return placeholder_parameter(*shape, dtype=dtype, device=place.device)
        return frozen_parameter(torch.zeros(shape, dtype=dtype, device=place.device))

    return _copied(layer, convert)


def _tensors(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a layer by path: parameters, buffers and plain attributes."""
    groups = module._parameters, module._buffers, module.__dict__
    for name, value in (item for group in groups for item in group.items()):
        if isinstance(value, Tensor):
            yield prefix + name, value
    for name, child in module._modules.items():
        if child is not None and not isinstance(child, Loads):
            yield from _tensors(child, f"{prefix}{name}.")


def _pairs(live: nn.Module, staged: nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (name, old tensor, new tensor) for each tensor that the loaded layer and its staged copy do not
    share. Caches are left out, since the copy has none."""
    staged_tensors = dict(_tensors(staged))
    for name, tensor in _tensors(live):
        if name in staged_tensors and staged_tensors[name] is not tensor:
            yield name, tensor.detach(), staged_tensors[name].detach()


def _check_alike(live: nn.Module, staged: nn.Module) -> None:
    for name, old, new in _pairs(live, staged):
        if (old.shape, old.dtype, old.device) != (new.shape, new.dtype, new.device):
            raise RequestError(
                f"{type(live).__name__}.{name} cannot be updated in place: it would change from {old.dtype}"
                f" {tuple(old.shape)} to {new.dtype} {tuple(new.shape)}"
            )


def _copy_into(live: nn.Module, staged: nn.Module) -> None:
    for _, old, new in _pairs(live, staged):
        old.copy_(new)
    for module in live.modules():
        if isinstance(module, Weight | StoredExperts):
            module.refresh_kernels()

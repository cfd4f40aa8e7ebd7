"""Offloading of layers: weights are in host memory and are copied in turn to two buffers on the device."""

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import psutil
import torch
from torch import Tensor, UntypedStorage, nn

from quire.errors import ConfigError
from quire.kernels.host_memory import host_memory, pin, unpin
from quire.layers.scope import Loads, Target
from quire.logs import get_logger
from quire.memory import NUM_OFFLOAD_BUFFERS, OffloadedLayers, choose_offloaded, human
from quire.system.process import all_objects

log = get_logger(__name__)

_ALIGNMENT = 256
"""Alignment of tensors in a buffer, as in memory that CUDA allocates."""
_SMALL = 1 << 16
"""Tensors below this size stay on the device: they take little memory, and some are read between steps."""
_INITIAL = 1 << 20
"""Tensors below this size are not freed while a model is built: scales may have initial values."""


class TensorPlace(NamedTuple):
    """A storage on the device with one or several tensors of a layer, and its offset in the device buffer, in
    bytes."""

    storage: UntypedStorage
    offset: int
    num_bytes: int


@dataclass(slots=True)
class OffloadedLayer:
    """A layer with weights in host memory."""

    module: nn.Module
    places: list[TensorPlace]
    host: Tensor
    """Bytes of all offloaded tensors of the layer, as they lie in the buffer."""
    buffer: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    """Part of a device buffer that `host` is copied to."""


class LayerOffload:
    """Loads a model that does not fit on the device. Memory of a layer is allocated for its first weight;
    some layers move to host memory as soon as all their weights are loaded.

    Kernels refer to tensors that share memory with the parameters of a layer. `place` moves all these tensors
    into a buffer.
    """

    def __init__(
        self, wanted_bytes: float, device: torch.device, *, small: int = _SMALL, initial: int = _INITIAL
    ) -> None:
        """Build a `LayerOffload` that moves layers with at least `wanted_bytes` in total to host memory.
        Tensors below `small` bytes stay on the device, and those below `initial` bytes keep their memory
        while the model is built."""
        self.layers: list[OffloadedLayer] = []
        """The offloaded layers, in the order of the model once they are placed."""
        self.buffers: list[Tensor] = []
        self.is_pinned = True
        """Whether the host memory is pinned, as copies in CUDA graphs require."""
        self._wanted_bytes, self._device = wanted_bytes, device
        self._small, self._initial = small, initial
        self._built: list[nn.Module] = []
        self._targets: dict[Loads, list[Target]] = {}
        """Targets of the modules for which no weight is loaded yet."""
        self._freed: dict[int, int] = {}
        """Bytes of the storages that are freed until their module begins to load, by storage id."""
        self._left: list[set[Loads]] = []
        """By layer: the modules that still lack weights."""
        self._loaded_bytes: list[int] = []
        """By layer: the bytes of its weights as they are loaded, before repacking."""
        self._chosen: OffloadedLayers | None = None
        self._host: dict[int, OffloadedLayer] = {}

    # ---- while the model is built and loaded

    def on_layer_built(self, layer: nn.Module) -> nn.Module:
        """Free the memory of a layer that was just built, until its weights are loaded; return the layer."""
        self._built.append(layer)
        modules = [x for x in layer.modules() if isinstance(x, Loads) and x not in self._targets]
        for module in modules:
            self._targets[module] = list(module.targets())
        for module in modules:
            for storage in self._storages(module):
                if storage.nbytes() >= max(self._initial, 1):
                    self._freed[storage._cdata] = storage.nbytes()
                    storage.resize_(0)
        return layer

    def targets(self, module: Loads) -> Iterable[Target]:
        """Return the targets of a module, as recorded before its memory was freed."""
        return self._targets.get(module) or module.targets()

    def layer_number(self, module: Loads) -> int:
        """Return the index of the first layer that contains this module; -1 for modules outside of the
        layers."""
        return next((number for number, left in enumerate(self._modules()) if module in left), -1)

    def begin(self, module: Loads) -> None:
        """Allocate the device memory of a module, before its first weight is loaded."""
        for storage in self._storages(module):
            if not storage.nbytes() and (num_bytes := self._freed.pop(storage._cdata, 0)):
                storage.resize_(num_bytes)
        self._targets.pop(module, None)

    def finish(self, module: Loads) -> None:
        """Record that a module has all its weights. If it was the last module of a layer to be offloaded,
        move the layer to host memory."""
        for number, left in enumerate(self._modules()):
            if module in left:
                left.remove(module)
                if not left:
                    self._finish_layer(number)

    def _modules(self) -> list[set[Loads]]:
        """Find the modules with weights in each layer: return, by layer, the modules that still lack
        weights."""
        if not self._left:
            for layer in self._built:
                modules = (module for module in layer.modules() if isinstance(module, Loads))
                targets = {module: some for module in modules if (some := self._targets.get(module))}
                self._left.append({*targets})
                sizes = (target.tensor.nbytes for some in targets.values() for target in some)
                self._loaded_bytes.append(sum(sizes))
        return self._left

    def _finish_layer(self, number: int) -> None:
        if self._chosen is None:
            self._chosen = self._choose(number)
        if number in self._chosen.layers:
            self._move_to_host(number)

    def _choose(self, number: int) -> OffloadedLayers:
        """Choose the layers to offload. The loaded layer `number` shows by what factor loading changes the
        size of weights. Raise a ConfigError if the host memory is too small."""
        places = self._places(number)
        scale = sum(place.num_bytes for place in places) / max(self._loaded_bytes[number], 1)
        chosen = choose_offloaded([int(scale * size) for size in self._loaded_bytes], self._wanted_bytes)
        free = psutil.virtual_memory().available
        if chosen.host_bytes > free:
            raise ConfigError(
                f"cpu_offload_gb={self._wanted_bytes / 2**30:g} needs {human(chosen.host_bytes)} of host"
                f" memory for {len(chosen.layers)} layers, and {human(free)} are free: lower it, or use a"
                " quantized checkpoint"
            )
        return chosen

    def _storages(self, module: Loads) -> list[UntypedStorage]:
        """Return the storages on the device that hold a module's parameters and targets."""
        tensors = [target.tensor for target in self._targets.get(module, ())]
        if isinstance(module, nn.Module):
            tensors += module.parameters()
        storages = (tensor.untyped_storage() for tensor in tensors)
        return list({x._cdata: x for x in storages if x.device.type == self._device.type}.values())

    # ---- moving weights

    def _places(self, number: int) -> list[TensorPlace]:
        """Return the storages of a layer's tensors and their offsets in a buffer. Modules that several layers
        share are left out."""
        shared = Counter(module for layer in self._built for module in layer.modules())
        layer, places, end = self._built[number], dict[int, TensorPlace](), 0
        for module in (module for module in layer.modules() if shared[module] == 1):
            for parameter in module.parameters(recurse=False):
                storage = parameter.untyped_storage()
                is_here = storage.device.type == self._device.type and storage.resizable()
                if is_here and storage.nbytes() >= self._small and storage._cdata not in places:
                    places[storage._cdata] = TensorPlace(storage, end, storage.nbytes())
                    end = -(-(end + storage.nbytes()) // _ALIGNMENT) * _ALIGNMENT
        return list(places.values())

    def _move_to_host(self, number: int) -> None:
        places = self._places(number)
        if not places:
            return
        host = host_memory(places[-1].offset + places[-1].num_bytes)
        self.is_pinned = self._device.type == "cuda" and pin(host) and self.is_pinned
        for storage, offset, num_bytes in places:
            host[offset : offset + num_bytes].copy_(storage_bytes(storage))
            storage.resize_(0)
        self._host[number] = OffloadedLayer(self._built[number], places, host)

    def place(self) -> None:
        """Move the tensors of the offloaded layers into the buffers, after the whole model is loaded."""
        for module in list(self._targets):
            self.begin(module)
        sizes = {number: len(layer.host) for number, layer in self._host.items()}
        others = [number for number in reversed(range(len(self._built))) if number not in sizes]
        while sizes and others and sum(sizes.values()) < self._wanted_bytes:  # layers of different sizes
            self._move_to_host(others[0])
            sizes[others[0]] = len(self._host[others[0]].host) if others[0] in self._host else 0
            others.pop(0)
        self.layers, num = [self._host[number] for number in sorted(self._host)], len(self._built)
        if not self.layers:
            log.warning(
                "cpu_offload_gb has no effect: the two GPU buffers for offloaded layers would need as much "
                "memory as all %d layers. Leave it out",
                num,
            )
            return
        largest = max(len(layer.host) for layer in self.layers)
        self.buffers = [
            torch.zeros(largest, dtype=torch.uint8, device=self._device) for _ in range(NUM_OFFLOAD_BUFFERS)
        ]
        moves: dict[int, tuple[UntypedStorage, int]] = {}
        for number, layer in enumerate(self.layers):
            buffer = self.buffers[number % NUM_OFFLOAD_BUFFERS]
            layer.buffer = buffer[: len(layer.host)]
            moves |= {x.storage._cdata: (buffer.untyped_storage(), x.offset) for x in layer.places}
        _move_tensors(moves)
        assert not self._still_used(), "a tensor of an offloaded layer is held outside of Python"
        for layer in self.layers:
            layer.places = []
        log.info(
            "Offloaded %d of %d layers to host memory (%s); buffers to copy them to take %s of GPU memory",
            len(self.layers),
            num,
            human(self.host_bytes),
            human(self.buffer_bytes),
        )

    def _still_used(self) -> bool:
        return any(
            torch._C._storage_Use_Count(place.storage._cdata) > 1
            for layer in self.layers
            for place in layer.places
        )

    # ---- afterwards

    @property
    def host_bytes(self) -> int:
        """Return the bytes of all offloaded weights, which every step copies to the device."""
        return sum(len(layer.host) for layer in self.layers)

    @property
    def buffer_bytes(self) -> int:
        return sum(len(buffer) for buffer in self.buffers)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in one of the device buffers of offloaded layers."""
        storage = tensor.untyped_storage()._cdata
        return any(storage == buffer.untyped_storage()._cdata for buffer in self.buffers)

    def close(self) -> None:
        """Release the host memory and the buffers. On a GPU, wait until no copy from the host memory is
        running."""
        if self._device.type == "cuda":
            with contextlib.suppress(torch.AcceleratorError):  # a failed device copies nothing
                torch.cuda.synchronize()
            for layer in self._host.values():
                if layer.host.is_pinned():
                    unpin(layer.host)
        self._host, self.layers, self.buffers = {}, [], []


def storage_bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@torch.inference_mode()
def _move_tensors(moves: dict[int, tuple[UntypedStorage, int]]) -> None:
    """Make all live tensors refer to other storages, without copying data: `moves` maps old storage ids to
    (new storage, byte offset)."""
    for tensor in _live_tensors():
        if (move := moves.get(tensor.untyped_storage()._cdata)) is not None:
            storage, offset = move
            start = offset // tensor.itemsize + tensor.storage_offset()
            tensor.set_(storage, start, tensor.size(), tensor.stride())


def _live_tensors() -> Iterator[Tensor]:
    """Yield all tensors of this process that Python can reach."""
    for value in all_objects():
        if type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided:
            yield value

"""Prefetch of offloaded layers: each is copied to the device while the layers before it compute."""

from functools import partial
from typing import Any, Protocol

from torch import nn

from quire.loader.offload import OffloadedLayer
from quire.memory import NUM_OFFLOAD_BUFFERS


class LayerCopies(Protocol):
    """Copies of offloaded layers beside the computation. Layers are numbered in the order of the model."""

    def fork(self) -> None:
        """Let all copies that start later wait for the computation that was launched so far."""

    def copy(self, number: int) -> None:
        """Start to copy the weights of a layer to its device buffer."""

    def wait(self, number: int) -> None:
        """Let the computation wait for the copy of a layer."""

    def join(self) -> None:
        """Let the computation wait for all copies."""


class LayerPrefetch:
    """Copies the offloaded layers of a model to the device in every forward pass, through hooks of its
    modules. Layer i uses device buffer i % 2. Its copy begins when the computation of layer i - 2 is
    submitted, and waits on the device for the end of that computation. A CUDA graph of the forward pass
    contains the copies: they fork from the captured stream at the first layer, and the stream waits for each
    copy before the layer that it belongs to."""

    def __init__(self, model: nn.Module, layers: list[OffloadedLayer], copies: LayerCopies) -> None:
        self._copies, self._num_layers = copies, len(layers)
        self._next = 0
        """The next layer to compute."""
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end, always_call=True)
        for number, layer in enumerate(layers):
            layer.module.register_forward_pre_hook(partial(self._before, number))
            layer.module.register_forward_hook(partial(self._after, number))

    def _begin(self, *_: Any) -> None:
        self._next = 0
        self._copies.fork()
        for number in range(min(NUM_OFFLOAD_BUFFERS, self._num_layers)):
            self._copies.copy(number)

    def _before(self, number: int, *_: Any) -> None:
        assert number == self._next, f"offloaded layer {number} runs in place of layer {self._next}"
        self._copies.wait(number)

    def _after(self, number: int, *_: Any) -> None:
        self._next = number + 1
        if (following := number + NUM_OFFLOAD_BUFFERS) < self._num_layers:
            self._copies.fork()
            self._copies.copy(following)

    def _end(self, *_: Any) -> None:
        if self._next < self._num_layers:  # the forward pass failed, and copies are in flight
            self._copies.join()

"""Copies of offloaded layers to the device on a separate stream."""

from collections.abc import Sequence

import torch

from quire.loader.offload import OffloadedLayer


class CudaLayerCopies:
    """Copies offloaded layers from pinned host memory to the device on a second stream. While a CUDA graph of
    the forward pass is captured, these copies become part of the graph."""

    def __init__(self, layers: Sequence[OffloadedLayer], device: torch.device) -> None:
        self._layers = layers
        self._stream = torch.cuda.Stream(device)
        self._computed = torch.cuda.Event()
        self._copied = [torch.cuda.Event() for _ in layers]

    def fork(self) -> None:
        self._computed.record()
        self._stream.wait_event(self._computed)

    def copy(self, number: int) -> None:
        layer = self._layers[number]
        with torch.cuda.stream(self._stream):
            layer.buffer.copy_(layer.host, non_blocking=True)
            self._copied[number].record()

    def wait(self, number: int) -> None:
        torch.cuda.current_stream().wait_event(self._copied[number])

    def join(self) -> None:
        torch.cuda.current_stream().wait_stream(self._stream)

"""CUDA graphs of vision and audio encoders, for batches of items with recurring shapes."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.logs import get_logger
from quire.models.towers import GraphableTower

log = get_logger(__name__)

MOST_VECTORS = 1536
"""Maximum number of embeddings of a batch that is captured: in larger batches the launch overhead, which a
graph saves, does not matter."""
MAX_GRAPHS = 8
TIMES = 3
"""Number of occurrences of a combination of item shapes from which on it is captured."""
_MAX_COUNTED = 1024
"""Maximum number of combinations of shapes to count; beyond it, all counts are reset."""
Arrays = Mapping[str, Tensor]
Run = Callable[[], list[Tensor]]
Capture = Callable[[Run, Any], tuple[list[Tensor], Callable[[], None]]]
"""Function that captures a run as a CUDA graph in a memory pool. It returns the outputs of the run and a
function that replays the graph."""


@dataclass(frozen=True, slots=True)
class _Graph:
    """The graph of a batch of items with certain shapes."""

    inputs: list[dict[str, Tensor]]
    outputs: list[Tensor]
    play: Callable[[], None]
    layout: Any
    """Layout tensors that the graph reads; this reference keeps them in place."""

    def __call__(self, items: Sequence[Arrays]) -> list[Tensor]:
        for arrays, item in zip(self.inputs, items, strict=True):
            for name, array in item.items():
                arrays[name].copy_(array)
        self.play()
        return [output.clone() for output in self.outputs]


class TowerGraphs:
    """An encoder with CUDA graphs of recurring batches; the least recently used graph is dropped."""

    def __init__(self, tower: GraphableTower, capture: Capture | None = None) -> None:
        self.tower = tower
        self.max_bytes = 0
        """Memory limit of all graphs; none is captured before it is set."""
        self._capture = capture or captured
        self._graphs: dict[Any, _Graph] = {}
        """Graphs by modality and shapes, the least recently used first."""
        self._counts: Counter[Any] = Counter()
        self._pool: Any = None
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._graphs)

    def encode(self, modality: str, items: Sequence[Arrays], num_vectors: int) -> list[Tensor]:
        key = modality, tuple(_shapes(item) for item in items)
        graph = self._graphs.pop(key, None)
        if graph is None and num_vectors <= MOST_VECTORS and self._is_due(key):
            graph = self._capture_batch(modality, items)
        if graph is None:
            return self.tower.compute(modality, items, self.tower.lay_out(modality, items))
        self._graphs[key] = graph
        return graph(items)

    def forget(self) -> None:
        """Drop all graphs, since they contain addresses of weights, which will change."""
        self._graphs, self._pool, self._num_bytes = {}, None, 0
        self._counts.clear()

    def _is_due(self, key: Any) -> bool:
        if len(self._counts) >= _MAX_COUNTED:
            self._counts.clear()
        self._counts[key] += 1
        return self._counts[key] >= TIMES and self.max_bytes > 0

    def _capture_batch(self, modality: str, items: Sequence[Arrays]) -> _Graph | None:
        """Capture a batch. Return None if the capture fails, after which no batch is captured any more, or if
        all graphs exceed `max_bytes`."""
        while len(self._graphs) >= MAX_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        inputs = [{name: array.clone() for name, array in item.items()} for item in items]
        layout, before = self.tower.lay_out(modality, inputs), _taken_bytes()
        self._pool = self._pool or _new_pool()
        try:
            outputs, play = self._capture(lambda: self.tower.compute(modality, inputs, layout), self._pool)
        except RuntimeError as error:
            log.warning("Capturing CUDA graphs of the multimodal encoder failed; it runs eagerly: %s", error)
            self.max_bytes = 0
            return None
        self._num_bytes += max(_taken_bytes() - before, 0)
        if self._num_bytes > self.max_bytes:
            log.info("CUDA graphs of the multimodal encoder reached their memory limit: all are dropped")
            self.forget()
            return None
        return _Graph(inputs, outputs, play, layout)


def captured(run: Run, pool: Any) -> tuple[list[Tensor], Callable[[], None]]:
    """Capture a run as a CUDA graph on a separate stream, while other threads may wait for steps. Return the
    outputs and a function that replays the graph."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # libraries allocate their per-stream memory before the capture
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            outputs = run()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return outputs, graph.replay


def _shapes(item: Arrays) -> tuple[Any, ...]:
    return tuple((name, item[name].shape, item[name].dtype) for name in sorted(item))


def _new_pool() -> Any:
    return torch.cuda.graph_pool_handle() if torch.cuda.is_available() else object()


def _taken_bytes() -> int:
    return torch.cuda.memory_reserved() if torch.cuda.is_available() else 0

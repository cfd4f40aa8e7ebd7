"""CUDA graphs of towers: batches of items whose shapes come again, played by one call."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.logs import get_logger
from quire.models.towers import Repeats

log = get_logger(__name__)

MOST_VECTORS = 1536
"""Of a batch that is captured. Of larger ones the device has work for longer than it takes to launch it."""
MAX_GRAPHS = 8
TIMES = 3
"""How often a batch has come when it is captured."""
_MAX_COUNTED = 1024
"""Shapes that are counted; then all begin anew."""
Arrays = Mapping[str, Tensor]
Run = Callable[[], list[Tensor]]
Capture = Callable[[Run, Any], tuple[list[Tensor], Callable[[], None]]]
"""What came of it, and what plays it again in the same place; the other argument is the pool of memory."""


@dataclass(frozen=True, slots=True)
class _Graph:
    """A batch of items of certain shapes."""

    inputs: list[dict[str, Tensor]]
    outputs: list[Tensor]
    play: Callable[[], None]
    layout: Any
    """What it reads; it lies where it did as long as this is held."""

    def __call__(self, items: Sequence[Arrays]) -> list[Tensor]:
        for own, item in zip(self.inputs, items, strict=True):
            for name, array in item.items():
                own[name].copy_(array)
        self.play()
        return [each.clone() for each in self.outputs]


class TowerGraphs:
    """A tower, and graphs of the batches that it has had a few times: those that were used last."""

    def __init__(self, tower: Repeats, capture: Capture | None = None) -> None:
        self.tower = tower
        self.max_bytes = 0
        """What all graphs may take; none is captured before that is known."""
        self._capture = capture or captured
        self._graphs: dict[Any, _Graph] = {}
        """By modality and shapes, the oldest first."""
        self._counts: Counter[Any] = Counter()
        self._pool: Any = None
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._graphs)

    def encode(self, modality: str, items: Sequence[Arrays], num_vectors: int) -> list[Tensor]:
        key = modality, tuple(_shapes(item) for item in items)
        graph = self._graphs.pop(key, None)
        if graph is None and num_vectors <= MOST_VECTORS and self._is_due(key):
            graph = self._captured(modality, items)
        if graph is None:
            return self.tower.compute(modality, items, self.tower.lay_out(modality, items))
        self._graphs[key] = graph
        return graph(items)

    def forget(self) -> None:
        """They read weights where these lay."""
        self._graphs, self._pool, self._num_bytes = {}, None, 0
        self._counts.clear()

    def _is_due(self, key: Any) -> bool:
        if len(self._counts) >= _MAX_COUNTED:
            self._counts.clear()
        self._counts[key] += 1
        return self._counts[key] >= TIMES and self.max_bytes > 0

    def _captured(self, modality: str, items: Sequence[Arrays]) -> _Graph | None:
        """None: it cannot be, or there is no room for it; then no other is tried."""
        while len(self._graphs) >= MAX_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        inputs = [{name: array.clone() for name, array in item.items()} for item in items]
        layout, before = self.tower.lay_out(modality, inputs), _taken_bytes()
        self._pool = self._pool or _new_pool()
        try:
            outputs, play = self._capture(lambda: self.tower.compute(modality, inputs, layout), self._pool)
        except RuntimeError as error:
            log.warning("The tower cannot be captured, and runs without graphs: %s", error)
            self.max_bytes = 0
            return None
        self._num_bytes += max(_taken_bytes() - before, 0)
        if self._num_bytes > self.max_bytes:
            log.info("Graphs of the tower have taken their memory, and begin anew")
            self.forget()
            return None
        return _Graph(inputs, outputs, play, layout)


def captured(run: Run, pool: Any) -> tuple[list[Tensor], Callable[[], None]]:
    """In a stream of its own, beside threads that wait for other steps."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # what libraries keep for a stream is there before
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

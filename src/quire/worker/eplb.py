"""Expert-parallel load balancing (EPLB): experts move between devices by their load, one layer per step."""

import math
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.config.expert_parallel import Eplb
from quire.config.expert_placement import Placement, balance, copies_between, imbalance
from quire.layers.moe import Experts
from quire.logs import get_logger
from quire.parallel.group import Group

log = get_logger(__name__)


class Balancer:
    """Counts the tokens of experts over a window of steps, and periodically computes a new placement of the
    experts on the devices.

    All devices run the same steps and have the same loads, so that they compute the same placement at the
    same step.
    """

    def __init__(self, layers: Sequence[Experts], group: Group, eplb: Eplb) -> None:
        self.layers, self.group, self.eplb = layers, group, eplb
        for layer in layers:
            layer.weights.by_expert()  # raises if the weights cannot move
        self._count_interval = math.gcd(eplb.window_size, eplb.step_interval)
        """Number of steps after which the token counts of experts are recorded; the window and the interval
        are multiples of it."""
        self._window: deque[Tensor] = deque(maxlen=eplb.window_size // self._count_interval)
        self._num_steps = 0
        self._unplaced: deque[tuple[Experts, list[int]]] = deque()
        """Layers that wait for a new placement, with their loads."""

    def begin(self) -> None:
        """Reset the counts, so that steps before the first request, such as those of the warm-up, do not
        count."""
        for layer in self.layers:
            assert layer.loads is not None
            layer.loads.zero_()

    @torch.inference_mode()
    def step(self) -> None:
        """Update the counts after a step, and move experts to a new placement every `step_interval` steps:
        one layer per step with `use_async`, otherwise all layers at once."""
        self._num_steps += 1
        if self._num_steps % self._count_interval == 0:
            counted = [layer.loads for layer in self.layers if layer.loads is not None]
            self._window.append(torch.stack(counted))
            self.begin()
        if self._num_steps % self.eplb.step_interval == 0:
            self._collect_loads()
        if self._unplaced:
            self._place(*self._unplaced.popleft())
        while self._unplaced and not self.eplb.use_async:
            self._place(*self._unplaced.popleft())

    def _collect_loads(self) -> None:
        loads = self.group.all_reduce(torch.stack(list(self._window)).sum(0).to(torch.int32)).tolist()
        self._unplaced = deque(zip(self.layers, loads, strict=True))
        if self.eplb.log_balancedness:
            imbalances = [imbalance(_placement(layer), load) for layer, load in self._unplaced]
            log.info(
                "EPLB: the busiest GPU had %.2f times its layer's mean load, %.2f times in the worst layer",
                sum(imbalances) / len(imbalances),
                max(imbalances),
            )

    def _place(self, layer: Experts, loads: list[int]) -> None:
        places, before = layer.places, _placement(layer)
        assert places is not None
        after = balance(loads, self.group.size, before.num_slots, before)
        if after != before:
            move(layer, self.group, before, after)
            places.set(after)


def _placement(layer: Experts) -> Placement:
    assert layer.places is not None
    return layer.places.placement


def move(layer: Experts, group: Group, before: Placement, after: Placement) -> None:
    """Copy the weights of all experts of a layer that have another slot in the placement `after` than
    `before`, between devices and within a device. All ranks of the group must call it."""
    todo = copies_between(before, after)
    out = sorted((m for m in todo if m.source == group.rank), key=lambda m: m.target)
    into = sorted((m for m in todo if m.target == group.rank), key=lambda m: m.source)
    sent = [sum(m.target == rank for m in out) for rank in range(group.size)]
    received = [sum(m.source == rank for m in into) for rank in range(group.size)]
    for rows in layer.weights.by_expert():
        going = [rows[m.source_slot] for m in out]
        packed = torch.stack(going) if going else rows[0].new_empty(0, len(rows[0]))
        for m, row in zip(into, group.all_to_all(packed, sent, received), strict=True):
            rows[m.target_slot].copy_(row)

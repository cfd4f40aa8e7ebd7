"""Checkpoints of SSM states on the device: copies between the rows of requests and slots behind them."""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from quire.data.step_plan import Ints, StepPlan
from quire.kernels.host_to_device import copy_to_device
from quire.layers.ssm import SSMMixer

_AT_ONCE = 16
"""Most states of a layer that are copied together; they take memory twice meanwhile."""


class StateCheckpoints:
    """Copies the states of all layers of a worker. The slots are rows of the same tensors, after those of
    requests and of padding, so that kernels and CUDA graphs do not depend on them."""

    def __init__(self, layers: Iterable[SSMMixer], num_rows: int) -> None:
        self.tensors = [tensor for layer in layers for tensor in layer.bound if tensor.numel()]
        self.num_rows = num_rows
        """The row of padding; slot s is row `num_rows + s`."""

    def restore(self, plan: StepPlan) -> None:
        """Copy the states of admitted rows from their checkpoints, before the plan computes."""
        if restored := [(self.num_rows + new.state, new.row) for new in plan.admitted if new.state]:
            self._copy(*np.array(restored, np.int32).T)

    def save(self, plan: StepPlan) -> None:
        """Copy the states of rows to checkpoints, after the plan has computed."""
        if plan.saves.size:
            rows, slots = plan.saves
            self._copy(rows, self.num_rows + slots)

    @torch.inference_mode()
    def _copy(self, sources: Ints, targets: Ints) -> None:
        if not self.tensors:
            return
        pairs = np.stack((sources, targets)).astype(np.int64)
        places: Tensor = copy_to_device(pairs, self.tensors[0].device)
        for at in range(0, len(sources), _AT_ONCE):
            source, target = places[:, at : at + _AT_ONCE]
            for tensor in self.tensors:
                tensor.index_copy_(0, target, tensor.index_select(0, source))

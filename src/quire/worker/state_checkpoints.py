"""Checkpoints of SSM states on the device: copies between the states of rows and the slots of checkpoints."""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from quire.data.step_plan import Ints, StepPlan
from quire.kernels.host_to_device import copy_to_device
from quire.layers.ssm import SSMMixer

_AT_ONCE = 16
"""Maximum number of states of a layer that are copied at once; the copy needs temporary memory of their
size."""


class StateCheckpoints:
    """Copies SSM states of all layers of a worker to checkpoints and back. Checkpoints lie in the same
    tensors, after the states of rows and of padding, so that kernels and CUDA graphs do not depend on
    them."""

    def __init__(self, layers: Iterable[SSMMixer], num_rows: int, states_per_row: int = 1) -> None:
        self.tensors = [tensor for layer in layers for tensor in layer.bound if tensor.numel()]
        self.states_per_row = states_per_row
        self.last = (num_rows + 1) * states_per_row - 1
        """Index of the last padding state; the checkpoint in slot s has the index `last` + s."""

    def restore(self, plan: StepPlan) -> None:
        """Copy SSM states from checkpoints to the rows of newly admitted requests that continue from one,
        before the plan is computed."""
        restored = [(new.state, new.row, new.num_computed) for new in plan.admitted if new.state]
        if restored:
            slots, rows, num_tokens = np.array(restored, np.int32).T
            self._copy(self.last + slots, self._states_after(rows, num_tokens))

    def save(self, plan: StepPlan) -> None:
        """Copy SSM states of rows to the checkpoints that the plan requests, after the plan is computed."""
        if plan.saves.size:
            rows, slots, num_tokens = plan.saves
            self._copy(self._states_after(rows, num_tokens), self.last + slots)

    def _states_after(self, rows: Ints, num_tokens: Ints) -> Ints:
        """Return the indices of the rows' states after `num_tokens` tokens, as `SSMSequences` orders them."""
        states: Ints = rows * self.states_per_row + num_tokens % self.states_per_row
        return states

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

"""StoredExperts: all experts of a layer in some format."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire.kernels.cpu.moe import CpuExperts
from quire.quant.sharding import Shard
from quire.quant.weight import Piece, StoredTensors, empty_parameter


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The sizes of a layer's experts, and their compute dtype."""

    experts: int
    hidden: int
    intermediate: int
    activation: str
    bias: bool
    dtype: torch.dtype
    device: torch.device
    inner: Shard | None = None
    """Shard of the intermediate size; None: the whole size."""

    def matrices(self) -> dict[str, tuple[Shard, Shard]]:
        """Map gate, up and down to the (shard of outputs, shard of inputs) of an expert's matrix."""
        up = self.inner or Shard(self.intermediate), Shard(self.hidden)
        return {"gate": up, "up": up, "down": up[::-1]}


class StoredExperts(StoredTensors):
    """The tensors of all experts of a layer; they are empty until the checkpoint is loaded."""

    mix: Callable[..., Tensor]
    """Computes the weighted sum of the selected experts' outputs (`mix` of `kernels/reference/moe.py`); set
    by `finish`."""
    adapts: bool = True
    """Whether `mix` supports LoRA adapters; set together with `mix`."""

    def __init__(self, shape: ExpertShape) -> None:
        super().__init__()
        self.shape = shape
        self.gate_up_bias = self._bias(2 * shape.intermediate)
        self.down_bias = self._bias(shape.hidden)

    def _bias(self, size: int) -> nn.Parameter | None:
        shape = self.shape
        return (
            empty_parameter(shape.experts, size, dtype=shape.dtype, device=shape.device)
            if shape.bias
            else None
        )

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self.mix(x, ids, weights)

    def parts(self) -> dict[str, dict[str, Piece]]:
        """Return the tensors to load by part (`gate` and `up`, or `gate_up`, and `down`) and by suffix of
        their checkpoint names. The first axis is that of the experts; a weight is [experts, outputs,
        inputs]."""
        raise NotImplementedError

    def bias_parts(self) -> dict[str, Piece]:
        """Return the bias tensors by `gate_up` and `down`; empty if the experts have no biases."""
        biases = {"gate_up": self.gate_up_bias, "down": self.down_bias}
        return {name: Piece(bias, 1) for name, bias in biases.items() if bias is not None}

    def reorder(self, order: Tensor) -> None:
        """Put the outputs of `gate_up` into the order of the indices `order`, after loading and before
        `finish`."""
        biases = [self.bias_parts()["gate_up"]] if self.shape.bias else []
        for tensor, axis, *_ in (*self.parts()["gate_up"].values(), *biases):
            if axis is not None:
                for expert in tensor:
                    expert.copy_(expert.index_select(axis - 1, order.to(expert.device)))

    def copy_up_to_gate(self) -> None:
        """Copy the weights of `up` to the gate, after loading and before `finish`."""
        parts = self.parts()
        for suffix, piece in parts["up"].items():
            parts["gate"][suffix].tensor.copy_(piece.tensor)

    def refresh_kernels(self) -> None:
        """Update copies of the weights in the layouts of kernels, after the weights were changed in place."""
        if isinstance(self.mix, CpuExperts):
            self.mix.refresh()

    def by_expert(self) -> list[list[Tensor]]:
        """Return the weights that kernels read: for each tensor a list of uint8 tensors, one per expert.
        Expert load balancing moves an expert by copying these bytes."""
        if isinstance(self.mix, CpuExperts):
            return self.mix.by_expert()
        return [_split_bytes(tensor, self.shape.experts) for tensor in self.parameters() if tensor.numel()]

    @property
    def biases(self) -> list[nn.Parameter]:
        return [bias for bias in (self.gate_up_bias, self.down_bias) if bias is not None]


def are_fused(parts: tuple[str, ...]) -> bool:
    """Return whether gate and up are one tensor, given the names of the expert projections. Two names may
    also be `up` and `down` without a gate."""
    return len(parts) == 2 and not parts[0].endswith(".up_proj")


def _split_bytes(tensor: Tensor, num: int) -> list[Tensor]:
    """Return the bytes of a tensor of `num` experts as one uint8 tensor per expert."""
    assert tensor.is_contiguous() and tensor.numel() % num == 0
    return list(tensor.detach().flatten().view(torch.uint8).view(num, -1))

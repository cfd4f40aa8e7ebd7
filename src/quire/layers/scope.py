"""Scope: where in the model a layer is built, and with what."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from quire.attention.backend import AttentionBackend
from quire.kernels.ops import Ops
from quire.kernels.reference import Reference
from quire.quant.experts import ExpertMethod, PlainExperts
from quire.quant.method import LinearMethod
from quire.quant.plain import Plain


def _plain(parts: tuple[str, ...]) -> LinearMethod:
    return Plain()


def _plain_experts(parts: tuple[str, ...]) -> ExpertMethod:
    return PlainExperts()


def _unknown(name: str) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Scope:
    """Passed down while a model is built; `scope / "q_proj"` is the scope of a child.

    All that a layer may know of its surroundings comes from here, so that a model file never mentions it. A
    group of devices that share the layers would stand here too, and layers ask it for their share of a size.
    """

    dtype: torch.dtype
    device: torch.device
    backend: AttentionBackend
    max_len: int
    """The longest sequence that will be computed."""
    linear: Callable[[tuple[str, ...]], LinearMethod] = _plain
    """The format of the layer that is made of the parts of the checkpoint with these names."""
    experts: Callable[[tuple[str, ...]], ExpertMethod] = _plain_experts
    """The same for a layer's experts."""
    is_stored: Callable[[str], bool] = _unknown
    """Whether the checkpoint has a tensor of this name, for layers that are stored in one way or another."""
    across: bool = False
    """Whether the checkpoint has the weights of linear layers with inputs before outputs."""
    ops: Ops = Reference()
    name: str = ""
    """Dotted, as in the checkpoint."""

    def __truediv__(self, child: str | int) -> "Scope":
        return replace(self, name=f"{self.name}.{child}" if self.name else str(child))

    def beside(self, name: str) -> str:
        """The dotted name of a sibling."""
        parent, dot, _ = self.name.rpartition(".")
        return f"{parent}{dot}{name}"

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=self.dtype, device=self.device)


@runtime_checkable
class Loads(Protocol):
    """A layer with weights."""

    def targets(self) -> Iterator[tuple[str, Tensor]]:
        """The name of each checkpoint tensor that this layer needs, and the (part of a) tensor it fills."""
        ...

    def finish(self) -> None:
        """Called once after loading."""
        ...

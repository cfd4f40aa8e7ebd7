"""Scope: where in the model a layer is built, and with what."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from quire.attention.backend import AttentionBackend
from quire.comm.group import ALONE, Group
from quire.kernels.ops import Ops
from quire.kernels.reference import Reference
from quire.quant.experts import ExpertShape, StoredExperts
from quire.quant.plain import PlainFormat
from quire.quant.weight import LinearShape, Weight

_PLAIN = PlainFormat()


def _unknown(name: str) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Scope:
    """Passed down while a model is built; `scope / "q_proj"` is the scope of a child.

    All that a layer may know of its surroundings comes from here, so that a model file never mentions it.
    """

    dtype: torch.dtype
    device: torch.device
    backend: AttentionBackend
    max_len: int
    """The longest sequence that will be computed."""
    linear: Callable[[tuple[str, ...], LinearShape], Weight] = _PLAIN.linear
    """Makes the weight of the layer that is made of the parts of the checkpoint with these names."""
    experts: Callable[[tuple[str, ...], ExpertShape], StoredExperts] = _PLAIN.experts
    """The same for a layer's experts."""
    group: Group = ALONE
    """Who share each layer: asked for the share of a size, and told what is to be added up."""
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


class Target(NamedTuple):
    """A tensor of the checkpoint by name, and the (part of a) tensor that it fills."""

    name: str
    tensor: Tensor
    axis: int | None = None
    """Along which a group divides it; None: each device has all of it."""
    stacked: tuple[int, ...] = ()
    """Sizes of what lies one after the other along that axis, if more than one thing: each is divided."""
    is_text: bool = False
    """Room for the bytes of a text, of which the checkpoint may have fewer."""


@runtime_checkable
class Begins(Protocol):
    """A layer that is told before its first weight is loaded; its targets may be other tensors then."""

    def begin(self) -> None: ...


@runtime_checkable
class Equips(Protocol):
    """A layer that takes over what its finished weight can do; `finish` includes it."""

    def equip(self) -> None: ...


@runtime_checkable
class Loads(Protocol):
    """A layer with weights."""

    def targets(self) -> Iterator[Target]:
        """All that this layer needs of the checkpoint."""
        ...

    def finish(self) -> None:
        """Called once after loading."""
        ...

"""Scope: where in the model a layer is built, and with what."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from quire.attention.backend import AttentionBackend
from quire.config.parallel import Stage
from quire.kernels.ops import Ops
from quire.kernels.reference.ops import Reference
from quire.layers.lora import AdapterSlots
from quire.parallel.all2all import ExpertDispatch
from quire.parallel.group import ALONE, Group
from quire.quant.experts import ExpertShape, StoredExperts
from quire.quant.plain import PlainFormat
from quire.quant.sharding import Runs
from quire.quant.weight import LinearShape, Piece, TextTensor, Weight

_PLAIN = PlainFormat()


def _unknown(name: str) -> bool:
    return False


def _shapeless(name: str) -> tuple[int, ...]:
    return ()


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
    ep: ExpertDispatch | None = None
    """The way to experts on other devices; None: all are here, or a share of each."""
    stage: Stage = Stage()
    """Which of the model's layers are built here."""
    is_stored: Callable[[str], bool] = _unknown
    """Whether the checkpoint has a tensor of this name, for layers that are stored in one way or another."""
    shape_of: Callable[[str], tuple[int, ...]] = _shapeless
    """The shape that it has there."""
    across: bool = False
    """Whether the checkpoint has the weights of linear layers with inputs before outputs."""
    ops: Ops = Reference()
    adapters: AdapterSlots | None = None
    """Where adapters are kept that requests may ask for; None: there are none."""
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
    runs: Runs = ()
    """What lies one after the other along that axis in the checkpoint, and what of it the tensor takes."""
    is_flat: bool = False
    """Whether the checkpoint has all of it in one row or column."""
    is_text: bool = False
    """Room for the bytes of a text, of which the checkpoint may have fewer."""

    @property
    def is_whole(self) -> bool:
        return self.axis is None or all(run.is_whole for run in self.runs)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of all that the checkpoint has."""
        if self.is_whole:
            return tuple(self.tensor.shape)
        assert self.axis is not None
        size = sum(run.all for run in self.runs)
        return (*self.tensor.shape[: self.axis], size, *self.tensor.shape[self.axis + 1 :])

    def turned(self) -> "Target":
        """The same of a checkpoint that has the other axis first."""
        axis = None if self.axis is None else self.tensor.ndim - 1 - self.axis
        return self._replace(tensor=self.tensor.t(), axis=axis)

    def spans(self) -> Iterator[tuple[slice, int]]:
        """What is taken of the stored axis, part by part, and how many zeros come behind each."""
        first = 0
        for run in self.runs:
            size = min(run.size, run.all - run.start)
            yield slice(first + run.start, first + run.start + size), run.size - size
            first += run.all

    def slices(self) -> Iterator[tuple[slice, Tensor]]:
        """Which part of the stored axis goes where; the rest is set to zero."""
        assert self.axis is not None
        at = 0
        for span, num_zeros in self.spans():
            size = span.stop - span.start
            self.tensor.narrow(self.axis, at + size, num_zeros).zero_()
            if size:
                yield span, self.tensor.narrow(self.axis, at, size)
            at += size + num_zeros


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


def target_of(name: str, piece: Piece, runs: Runs, *, by_inputs: bool = False) -> Target:
    """A piece of a weight of which this device has these outputs, or inputs."""
    axis, unit = (piece.inputs, piece.per_input) if by_inputs else (piece.outputs, piece.per_output)
    own = () if axis is None else tuple(run.per(unit) for run in runs)
    return Target(name, piece.tensor, axis, own, piece.is_flat, isinstance(piece, TextTensor))


def once(group: Group, bias: Tensor) -> None:
    """Let the bias of results that are summed over a group be that of its first device alone."""
    if group.rank:
        bias.zero_()

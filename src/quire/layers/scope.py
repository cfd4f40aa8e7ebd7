"""Scope: the context in which a layer is built: checkpoint name, dtype, device, weight format and others."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from quire.attention.backend import AttentionBackend
from quire.config.parallel import Stage
from quire.kernels.ops import Ops
from quire.kernels.reference.ops import Reference
from quire.layers.lora import AdapterSlots
from quire.parallel.all2all import ExpertDispatch
from quire.parallel.group import ALONE, Group
from quire.quant.experts import ExpertShape, StoredExperts
from quire.quant.sharding import Runs
from quire.quant.unquantized import PlainFormat
from quire.quant.weight import LinearShape, Piece, TextTensor, Weight

_PLAIN = PlainFormat()


def unchanged(layer: nn.Module) -> nn.Module:
    """Return the layer: the default of `Scope.on_layer_built`."""
    return layer


class DecoderNames(NamedTuple):
    """Checkpoint names of the parts of a decoder; the defaults are Llama's."""

    body: str = "model"
    embedding: str = "embed_tokens"
    positions: str = "embed_positions"
    layers: str = "layers"
    last_norm: str = "norm"
    head: str = "lm_head"
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    """Names of the norms before attention and before the MLP, or of one norm before both."""
    after_norms: tuple[str, ...] = ()
    """Names of the norms after attention and after the MLP."""
    attention: str = "self_attn"
    qkv: str = "qkv_proj"
    """Name of the fused query, key and value projection."""
    qkv_by_head: bool = False
    """Whether the rows of the fused QKV weight are grouped by KV head: its queries, its key, its value."""
    qk_norms: tuple[str, str] = ("q_norm", "k_norm")
    out: str = "o_proj"
    ssm: str = "mamba"
    """Name of the SSM mixer in layers without attention."""
    mlp: str = "mlp"
    mlp_names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    """Names of gate, up and down; or of a fused gate and up, and down; or of up and down of an MLP without
    gate."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Context in which a layer is built, passed down the model. `scope / "q_proj"` is the scope of a child.

    Parallelism, quantization and devices reach a layer through its scope, so that model files do not mention
    them.
    """

    dtype: torch.dtype
    device: torch.device
    backend: AttentionBackend
    max_len: int
    """Length of the longest sequence (max_model_len)."""
    linear: Callable[[tuple[str, ...], LinearShape], Weight] = _PLAIN.linear
    """Builds the weight of a linear layer; arguments: the checkpoint names of its parts, and its shape."""
    experts: Callable[[tuple[str, ...], ExpertShape], StoredExperts] = _PLAIN.experts
    """Builds the weights of a layer's experts; arguments: the checkpoint names of their parts, and a
    shape."""
    group: Group = ALONE
    """Tensor-parallel group of the layer."""
    ep: ExpertDispatch | None = None
    """Expert-parallel dispatch; None if every device has all experts or a tensor-parallel shard of each."""
    stage: Stage = Stage()
    """Pipeline stage: the range of the model's layers that is built here."""
    is_stored: Callable[[str], bool] = lambda name: False
    """Returns whether the checkpoint has a tensor of a name; used for layers with several stored layouts."""
    shape_of: Callable[[str], tuple[int, ...]] = lambda name: ()
    """Returns the shape of a tensor in the checkpoint by its name; () if there is no such tensor."""
    transposed: bool = False
    """Whether the checkpoint stores linear weights as [inputs, outputs]."""
    ops: Ops = Reference()
    adapters: AdapterSlots | None = None
    """Slots of LoRA adapters; None if LoRA is off."""
    on_layer_built: Callable[[nn.Module], nn.Module] = unchanged
    """Function that is called with each decoder layer once it is built, and returns the layer to use."""
    names: DecoderNames = DecoderNames()
    name: str = ""
    """Dotted name of the layer in the checkpoint."""

    def __truediv__(self, child: str | int) -> "Scope":
        """Return the scope of a child; an empty name stands for this scope."""
        if child == "":
            return self
        return replace(self, name=f"{self.name}.{child}" if self.name else str(child))

    def sibling(self, name: str) -> str:
        parent, dot, _ = self.name.rpartition(".")
        return f"{parent}{dot}{name}"

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=self.dtype, device=self.device)


class Target(NamedTuple):
    """The name of a checkpoint tensor, and the tensor (or part of one) that it is loaded into."""

    name: str
    tensor: Tensor
    axis: int | None = None
    """Axis that is sharded over the tensor-parallel group; None if the tensor is replicated."""
    runs: Runs = ()
    """Consecutive parts of `axis` in the checkpoint, with the range of each part that this device loads."""
    is_flat: bool = False
    """Whether the checkpoint may store the tensor flattened, in another shape of as many elements."""
    is_text: bool = False
    """Whether the tensor holds the bytes of a text, which may be shorter than the tensor."""

    @property
    def is_whole(self) -> bool:
        return self.axis is None or all(run.is_whole for run in self.runs)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the unsharded tensor in the checkpoint."""
        if self.is_whole:
            return tuple(self.tensor.shape)
        assert self.axis is not None
        size = sum(run.all for run in self.runs)
        return (*self.tensor.shape[: self.axis], size, *self.tensor.shape[self.axis + 1 :])

    def transposed(self) -> "Target":
        """Return the target for a checkpoint that stores the transposed matrix."""
        axis = None if self.axis is None else self.tensor.ndim - 1 - self.axis
        return self._replace(tensor=self.tensor.t(), axis=axis)

    def spans(self) -> Iterator[tuple[slice, int]]:
        """Yield each slice of `axis` in the checkpoint that is loaded, and the number of zeros after it."""
        first = 0
        for run in self.runs:
            size = min(run.size, run.all - run.start)
            yield slice(first + run.start, first + run.start + size), run.size - size
            first += run.all

    def slices(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield each loaded slice of `axis` with the part of `tensor` that it fills; set padding to zero."""
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
    """A layer with a hook that runs before its first weight is loaded. The hook may change its targets."""

    def begin(self) -> None: ...


@runtime_checkable
class BindsKernels(Protocol):
    """A layer that chooses the kernels of its loaded weight in `bind_kernels`; `finish` calls that method."""

    def bind_kernels(self) -> None: ...


@runtime_checkable
class Loads(Protocol):
    """A layer that loads weights from the checkpoint."""

    def targets(self) -> Iterator[Target]:
        """Yield the checkpoint tensors that this layer loads, with the tensors that they fill."""

    def finish(self) -> None:
        """Process the weights once after loading."""


class LoadedModule(nn.Module):
    """Base of modules with weights that are used as loaded."""

    def finish(self) -> None:
        """Do nothing: the weights are used as loaded."""


def target_of(name: str, piece: Piece, runs: Runs, *, by_inputs: bool = False) -> Target:
    """Return the load target of one checkpoint tensor (`piece`) of a weight, such as its scales. The tensor
    is sharded like the weight's inputs if `by_inputs`, else like its outputs."""
    axis, unit = (piece.inputs, piece.per_input) if by_inputs else (piece.outputs, piece.per_output)
    scaled = () if axis is None else tuple(run.per(unit) for run in runs)
    return Target(name, piece.tensor, axis, scaled, piece.is_flat, isinstance(piece, TextTensor))


def zero_on_other_ranks(group: Group, bias: Tensor) -> None:
    """Set the bias to zero on all ranks but the first of the group, so that an all-reduce of the outputs adds
    it once."""
    if group.rank:
        bias.zero_()

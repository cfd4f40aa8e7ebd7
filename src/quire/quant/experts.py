"""ExpertMethod: the format of a layer's experts, and the unquantized one."""

import functools
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from quire.kernels import native
from quire.kernels.cpu_experts import Experts
from quire.kernels.experts import ExpertWeights, mix
from quire.kernels.linear import FORMS, Matrix


class ExpertShape(NamedTuple):
    """The sizes of a layer's experts."""

    experts: int
    hidden: int
    intermediate: int
    activation: str
    bias: bool = False


class ExpertMethod(Protocol):
    """Stateless; what it needs at run time are tensors of the layer."""

    def create(
        self, layer: nn.Module, shape: ExpertShape, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Give `layer` its tensors, unfilled."""
        ...

    def parts(self, layer: nn.Module, shape: ExpertShape) -> dict[str, Tensor]:
        """The views that loading fills, with an expert's own in front: `gate` and `up` or both as `gate_up`
        [experts, outputs, inputs], `down`, and where there are biases `gate_up_bias` and `down_bias`."""
        ...

    def finish(self, layer: nn.Module, shape: ExpertShape) -> None:
        """Called once after loading: repack."""
        ...

    def apply(self, layer: nn.Module, shape: ExpertShape, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """`kernels/experts.py` mix: what the chosen experts make of each token, weighed and added up."""
        ...


class PlainExperts:
    """Experts whose weights are as they were stored. `kept_as`: a narrower type than the model's, in which
    they stay; the products widen them."""

    def __init__(self, kept_as: torch.dtype | None = None) -> None:
        self.kept_as = kept_as

    def create(
        self, layer: nn.Module, shape: ExpertShape, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        num, hidden, inner, *_ = shape
        for name, size in (("gate_up", (num, 2 * inner, hidden)), ("down", (num, hidden, inner))):
            tensor = torch.empty(size, dtype=self.kept_as or dtype, device=device)
            layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        add_biases(layer, shape, dtype, device)

    def parts(self, layer: nn.Module, shape: ExpertShape) -> dict[str, Tensor]:
        parts: dict[str, Tensor] = dict(layer.named_parameters())
        gate, up = parts["gate_up"].split(shape.intermediate, dim=1)
        return parts | {"gate": gate, "up": up}

    def finish(self, layer: nn.Module, shape: ExpertShape) -> None:
        """The weights are used as they were loaded, by our own kernels."""
        gate_up, down, *biases = layer.parameters()
        if gate_up.is_cuda:
            from quire.kernels.triton.experts import mix as mix_on_gpu

            weights, activation = ExpertWeights(gate_up, down, *biases), shape.activation
            layer.__dict__["mix"] = functools.partial(mix_on_gpu, experts=weights, activation=activation)
        if gate_up.device.type == "cpu" and gate_up.dtype in FORMS and native.library() is not None:
            gates, downs = ([Matrix.plain(weight) for weight in of] for of in (gate_up, down))
            layer.__dict__["mix"] = Experts([[part] for part in gates], downs, shape.activation, *biases)

    def apply(self, layer: nn.Module, shape: ExpertShape, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        experts: Callable[[Tensor, Tensor, Tensor], Tensor] | None = layer.__dict__.get("mix")
        if experts is not None:
            return experts(x, ids, weights)
        return mix(x, ids, weights, ExpertWeights(**dict(layer.named_parameters())), shape.activation)


def add_biases(layer: nn.Module, shape: ExpertShape, dtype: torch.dtype, device: torch.device) -> None:
    """Those of gate and up, and of down, unfilled, where there are any."""
    sizes = {"gate_up_bias": 2 * shape.intermediate, "down_bias": shape.hidden} if shape.bias else {}
    for name, size in sizes.items():
        tensor = torch.empty(shape.experts, size, dtype=dtype, device=device)
        layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

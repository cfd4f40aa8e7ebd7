"""The unquantized weight."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.kernels import native
from quire.kernels.experts import Routing
from quire.kernels.linear import FORMS, Matrix, Product
from quire.kernels.ops import Entry, choose
from quire.kernels.quantized import Lookup
from quire.quant.method import add_bias, reorder_rows, row_parts


class Plain:
    """`kept_as`: a narrower type than the model's, in which the weight stays; the product widens it."""

    def __init__(self, kept_as: torch.dtype | None = None) -> None:
        self.kept_as = kept_as

    def create(
        self,
        layer: nn.Module,
        size_in: int,
        sizes_out: tuple[int, ...],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        weight = torch.empty(sum(sizes_out), size_in, dtype=self.kept_as or dtype, device=device)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        add_bias(layer, sum(sizes_out) if bias else 0, dtype, device)

    def parts(self, layer: nn.Module, sizes_out: tuple[int, ...]) -> list[dict[str, Tensor]]:
        return row_parts(layer, sizes_out)

    def reorder(self, layer: nn.Module, sizes_out: tuple[int, ...], orders: list[Tensor]) -> None:
        reorder_rows(layer, sizes_out, orders)

    def finish(self, layer: nn.Module) -> None:
        """The weight is used as it was loaded, by our own kernels."""
        weight, bias = layer.get_parameter("weight"), layer._parameters["bias"]
        if weight.is_cuda:
            from quire.kernels.triton.matmul import gated, linear
            from quire.kernels.triton.qkv import enter
            from quire.kernels.triton.routing import choose as choose_experts

            layer.__dict__["product"] = functools.partial(linear, weight=weight, bias=bias)
            layer.__dict__["gated"] = functools.partial(gated, weight=weight) if bias is None else None
            layer.__dict__["entered"] = functools.partial(enter, weight=weight, bias=bias)
            layer.__dict__["chosen"] = functools.partial(choose_experts, router=weight, router_bias=bias)
        if weight.device.type == "cpu" and weight.dtype in FORMS and native.library() is not None:
            layer.__dict__["product"] = Product([Matrix.plain(weight)], bias)
            layer.__dict__["lookup"] = Lookup(Matrix.plain(weight))

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        product: Callable[[Tensor], Tensor] | None = layer.__dict__.get("product")
        if product is not None:
            return product(x)
        return F.linear(x, layer.get_parameter("weight"), layer._parameters["bias"])

    def gated(self, layer: nn.Module, x: Tensor) -> Tensor | None:
        product: Callable[[Tensor], Tensor] | None = layer.__dict__.get("gated")
        return None if product is None else product(x)

    def entered(self, layer: nn.Module, x: Tensor, entry: Entry) -> Tensor | None:
        product: Callable[[Tensor, Entry], Tensor | None] | None = layer.__dict__.get("entered")
        return None if product is None else product(x, entry)

    def chosen(
        self, layer: nn.Module, x: Tensor, routing: Routing, bias: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        choose: Callable[..., tuple[Tensor, Tensor]] | None = layer.__dict__.get("chosen")
        return None if choose is None else choose(x, routing=routing, bias=bias)

    def rows(self, layer: nn.Module, ids: Tensor, dtype: torch.dtype) -> Tensor:
        weight = layer.get_parameter("weight")
        if weight.dtype != dtype:
            lookup: Lookup = layer.__dict__["lookup"]
            return lookup(ids, dtype)
        return choose(weight.device, weight.dtype).embed(ids, weight)

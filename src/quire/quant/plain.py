"""The unquantized weight."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Plain:
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
        weight = torch.empty(sum(sizes_out), size_in, dtype=dtype, device=device)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        if bias:
            empty = torch.empty(sum(sizes_out), dtype=dtype, device=device)
            layer.bias = nn.Parameter(empty, requires_grad=False)
        else:
            layer.register_parameter("bias", None)

    def parts(self, layer: nn.Module, sizes_out: tuple[int, ...]) -> list[dict[str, Tensor]]:
        tensors = {name: torch.split(tensor, list(sizes_out)) for name, tensor in layer.named_parameters()}
        return [{name: pieces[i] for name, pieces in tensors.items()} for i in range(len(sizes_out))]

    def finish(self, layer: nn.Module) -> None:
        """The weight is used as it was loaded."""

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        weight, bias = layer.get_parameter("weight"), layer._parameters["bias"]
        return F.linear(x, weight, bias)

"""GGUF weights that stay packed: multiplied block by block, on a CPU with native kernels."""

import torch
from torch import Tensor, nn

from quire.kernels import native
from quire.kernels.quantized import BLOCK, GROUP, PACKINGS, Packing, linear, pack, unpack_rows
from quire.quant.method import LinearMethod, add_bias, row_parts
from quire.quant.plain import Plain


def choose(parts: list[tuple[str | int, ...]], device: torch.device) -> LinearMethod:
    """For a layer of parts given as (ggml type, rows, columns): packed if all are of one type that the
    kernels know, else unpacked."""
    kinds = {kind for kind, *_ in parts}
    whole_groups = all(len(shape) == 2 and int(shape[0]) % GROUP == 0 for _, *shape in parts)
    kind = str(kinds.pop()) if len(kinds) == 1 else ""
    if kind not in PACKINGS or not whole_groups or device.type != "cpu" or native.library() is None:
        return Plain()
    return Packed(PACKINGS[kind])


class Packed:
    """The bytes of the file while loading, the order that the kernel reads best afterwards."""

    def __init__(self, packing: Packing) -> None:
        self.packing = packing

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
        shape = (sum(sizes_out), size_in // BLOCK * self.packing.block_bytes)
        layer.weight = nn.Parameter(torch.empty(shape, dtype=torch.uint8, device=device), requires_grad=False)
        add_bias(layer, sum(sizes_out) if bias else 0, dtype, device)

    def parts(self, layer: nn.Module, sizes_out: tuple[int, ...]) -> list[dict[str, Tensor]]:
        return row_parts(layer, sizes_out)

    def finish(self, layer: nn.Module) -> None:
        layer.weight = nn.Parameter(pack(layer.get_parameter("weight"), self.packing), requires_grad=False)

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        bias = layer._parameters["bias"]
        out = linear(x, layer.get_parameter("weight"), self.packing)
        return (out if bias is None else out.add_(bias)).to(x.dtype)

    def rows(self, layer: nn.Module, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return unpack_rows(layer.get_parameter("weight"), ids, self.packing).to(dtype)

"""Products with quantized weights in float64, which tests compare kernels with."""

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.kernels.reference.int8 import Int8Codes
from quire.kernels.reference.nf4 import Halves


def exact_product(x: Tensor, weight: Halves | Int8Codes, bias: Tensor | None = None) -> Tensor:
    """Compute x W^T + b in float64, rounded once at the end."""
    if isinstance(weight, Int8Codes):
        wide = weight.codes.double() * weight.scales.double()[..., None]
    else:
        wide = weight.widened(torch.float64)
    return F.linear(x.double(), wide, None if bias is None else bias.double()).to(x.dtype)

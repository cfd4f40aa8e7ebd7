"""Random inputs of kernels, on a CUDA device if there is one."""

import torch
from torch import Tensor

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPE = torch.bfloat16 if CUDA else torch.float16


def random(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    made = torch.randn(*shape, device=DEVICE).to(dtype)
    if CUDA:
        torch.cuda.synchronize()  # kernels may read a weight before the previous kernel has ended
    return made

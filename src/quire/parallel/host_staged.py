"""Groups that send tensors through the host, for ranks that share a GPU, which NCCL refuses. For tests."""

import os

import torch
from torch import Tensor

from quire.parallel.group import Sending, TorchGroup


def is_shared(device: torch.device) -> bool:
    """Whether several ranks share a GPU, which tests declare by QUIRE_TEST_SHARE_GPU=1."""
    return device.type == "cuda" and os.environ.get("QUIRE_TEST_SHARE_GPU") == "1"


class StagedGroup(TorchGroup):
    """A Gloo group for GPU tensors; sums are computed in float32."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x.copy_(super().all_reduce(_copy(x.float())))

    def gather(self, x: Tensor, axis: int = -1) -> Tensor:
        return super().gather(_copy(x), axis).to(x.device)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return super().reduce_scatter(_copy(x.float())).to(x)

    def all_to_all(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        return super().all_to_all(_copy(x), sent, received).to(x.device)

    def send(self, x: Tensor, to: int) -> None:
        super().send(_copy(x), to)

    def isend(self, x: Tensor, to: int) -> Sending:
        return super().isend(_copy(x), to)

    def receive(self, x: Tensor, source: int) -> None:
        staged = torch.empty(x.shape, dtype=x.dtype)
        super().receive(staged, source)
        x.copy_(staged)


def _copy(x: Tensor) -> Tensor:
    """Return a copy on the host."""
    return x.to("cpu", copy=True)

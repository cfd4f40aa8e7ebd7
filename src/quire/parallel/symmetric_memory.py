"""Small all-reduces between the GPUs of a machine, through symmetric memory."""

import platform
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from quire.logs import get_logger
from quire.parallel.group import Group, TorchGroup

log = get_logger(__name__)

ONE_SHOT_BYTES = 256 << 10
"""Up to this size each GPU reads all values of all other GPUs, with one barrier. Larger tensors need two
barriers: each GPU sums its share of the values, then reads the sums of the other shares."""
LARGEST_BYTES = 4 << 20
"""Bytes of the largest tensor that is summed through symmetric memory; for larger tensors NCCL is as fast."""
_DTYPES = (torch.bfloat16, torch.float32)
_TWO_SHOT_SIZES = (2, 4, 8)
"""Group sizes for which torch's all-reduce with two barriers is used; other groups sum small tensors only."""
_ALIGNMENT = 16
"""Alignment in bytes of the kernels' loads."""


class SymmetricGroup(TorchGroup):
    """A group of GPUs with access to each other's memory: small sums need no NCCL, also in CUDA graphs.

    All ranks add in the same order, so that their results are bitwise equal.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group)
        self._shared = symm_mem.empty(LARGEST_BYTES, dtype=torch.uint8, device=device)
        symm_mem.rendezvous(self._shared, group)

    def all_reduce(self, x: Tensor) -> Tensor:
        if not self._fits(x):
            return super().all_reduce(x)
        shared, name = self._shared[: x.nbytes].view(x.dtype).view(x.shape), self.group.group_name
        if x.nbytes <= ONE_SHOT_BYTES:
            return one_shot(shared, x, name)
        return two_shot(shared, x, name)

    def _fits(self, x: Tensor) -> bool:
        largest = LARGEST_BYTES if self.size in _TWO_SHOT_SIZES else ONE_SHOT_BYTES
        begin = x.storage_offset() * x.element_size()
        return (
            x.dtype in _DTYPES
            and 0 < x.nbytes <= largest
            and x.is_contiguous()
            and x.nbytes % _ALIGNMENT == begin % _ALIGNMENT == 0
        )


def one_shot(shared: Tensor, x: Tensor, group_name: str) -> Tensor:
    summed: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(shared, x, "sum", group_name)
    return summed


def two_shot(shared: Tensor, x: Tensor, group_name: str) -> Tensor:
    shared.copy_(x)
    summed: Tensor = torch.ops.symm_mem.two_shot_all_reduce_out(shared, "sum", group_name, x)
    return summed


class PeerAddress(NamedTuple):
    """The machine and GPU of a group member."""

    machine: str
    device_index: int


def with_symmetric_memory(group: Group, device: torch.device) -> Group:
    """Return a group with all-reduce through symmetric memory if all members support it, otherwise the same
    group."""
    if device.type != "cuda" or not isinstance(group, TorchGroup):
        return group
    with torch.cuda.device(device):
        addresses = _gather_objects(group, PeerAddress(_machine(), torch.cuda.current_device()))
        reason = why_no_symmetric_memory(addresses, nvlinks())
        made, failure = (None, reason) if reason else _open_symmetric(group, device)
        failures = [text for text in _gather_objects(group, failure) if text]
    if made is None or failures:
        log.info("All-reduce between GPUs uses NCCL: %s", failures[0])
        return group
    return made


def _open_symmetric(group: TorchGroup, device: torch.device) -> tuple[Group | None, str | None]:
    try:
        return SymmetricGroup(group.group, device), None
    except RuntimeError as error:
        return None, f"no symmetric memory ({str(error).splitlines()[0]})"


def why_no_symmetric_memory(addresses: list[PeerAddress], links: list[list[int]]) -> str | None:
    """Return why these GPUs cannot read each other's memory fast; None if they can. `links` has the number of
    NVLinks between each pair of GPUs."""
    if len({address.machine for address in addresses}) > 1:
        return "the GPUs are on several machines"
    used = sorted({address.device_index for address in addresses})
    if used[-1] >= len(links):
        return f"GPU {used[-1]} is not visible here"
    apart = [(one, other) for one in used for other in used if one < other and not links[one][other]]
    return f"no NVLink between GPUs {apart[0][0]} and {apart[0][1]}" if apart else None


def nvlinks() -> list[list[int]]:
    """Return the number of NVLinks between each pair of visible GPUs; empty if it is unknown."""
    try:
        from torch._C._autograd import DeviceType
        from torch._C._distributed_c10d import _detect_dma_connectivity  # type: ignore[attr-defined]

        links: list[list[int]] = _detect_dma_connectivity(DeviceType.CUDA, "nvlink").matrix
    except (ImportError, RuntimeError) as error:
        log.debug("The NVLinks between GPUs are unknown: %s", error)
        return []
    return links


def _machine() -> str:
    """Return a name that identifies the running system across containers."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return platform.node() + (boot.read_text() if boot.exists() else "")


def _gather_objects(group: TorchGroup, value: Any) -> list[Any]:
    values: list[Any] = [None] * group.size
    dist.all_gather_object(values, value, group=group.group)
    return values

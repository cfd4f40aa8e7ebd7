"""SymmetricGroup: small sums between the GPUs of a machine, each reading the memory of the others."""

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
"""Up to here each GPU reads all numbers of all others: one meeting. Beyond, only its share of them, and then
the sums of the other shares: half a ring's steps, two meetings."""
LARGEST_BYTES = 4 << 20
"""Beyond this NCCL is no slower: its rings fill the links."""
_DTYPES = (torch.bfloat16, torch.float32)
_TWO_SHOT_SIZES = (2, 4, 8)
"""What torch's kernels are made for."""
_ALIGNMENT = 16
"""Bytes: what the kernels load at once."""


class SymmetricGroup(TorchGroup):
    """GPUs that see each other's memory: small sums need no NCCL. In a CUDA graph as outside of one.

    All add in the same order, so that they hold the same bits afterwards.
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
    """Where a member of a group is."""

    machine: str
    device_index: int


def with_quick_sums(group: Group, device: torch.device) -> Group:
    """The same group, with the way through memory if all of its members have it."""
    if device.type != "cuda" or not isinstance(group, TorchGroup):
        return group
    with torch.cuda.device(device):
        seats = _ask_all(group, PeerAddress(_machine(), torch.cuda.current_device()))
        reason = why_not(seats, nvlinks())
        made, failure = (None, reason) if reason else _meet(group, device)
        failures = [each for each in _ask_all(group, failure) if each]
    if made is None or failures:
        log.info("Sums between GPUs go through NCCL: %s", failures[0])
        return group
    return made


def _meet(group: TorchGroup, device: torch.device) -> tuple[Group | None, str | None]:
    try:
        return SymmetricGroup(group.group, device), None
    except RuntimeError as error:
        return None, f"no symmetric memory ({str(error).splitlines()[0]})"


def why_not(seats: list[PeerAddress], links: list[list[int]]) -> str | None:
    """Why these cannot read each other's memory quickly; None if they can. `links` are those between the
    GPUs of a machine."""
    if len({seat.machine for seat in seats}) > 1:
        return "the GPUs are on several machines"
    used = sorted({seat.device_index for seat in seats})
    if used[-1] >= len(links):
        return f"GPU {used[-1]} is not visible here"
    apart = [(one, other) for one in used for other in used if one < other and not links[one][other]]
    return f"no NVLink between GPUs {apart[0][0]} and {apart[0][1]}" if apart else None


def nvlinks() -> list[list[int]]:
    """How many there are between each two GPUs that this process sees; none where nobody can say."""
    try:
        from torch._C._autograd import DeviceType
        from torch._C._distributed_c10d import _detect_dma_connectivity  # type: ignore[attr-defined]

        found: list[list[int]] = _detect_dma_connectivity(DeviceType.CUDA, "nvlink").matrix
    except (ImportError, RuntimeError) as error:
        log.debug("The links between GPUs are not known: %s", error)
        return []
    return found


def _machine() -> str:
    """Names the running system, containers apart."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return platform.node() + (boot.read_text() if boot.exists() else "")


def _ask_all(group: TorchGroup, mine: Any) -> list[Any]:
    answers: list[Any] = [None] * group.size
    dist.all_gather_object(answers, mine, group=group.group)
    return answers

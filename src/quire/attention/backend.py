"""What an attention backend is, and how one is chosen.

Within a layer all keys and values of the batch are written (`Ops.rotate_and_write`) before any attention is
computed: a sequence may read blocks that another sequence of the same batch writes.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quire.attention.batch import Batch
from quire.config.machine import Machine
from quire.errors import ConfigError
from quire.registry import LazyTable

BACKENDS = LazyTable(
    "attention backend",
    {
        "CPU_ATTN": "quire.attention.cpu_attn:CPUAttention",
        "TRITON_ATTN": "quire.attention.triton_attn:TritonAttention",
        "FLASH_ATTN": "quire.attention.flash_attn:FlashAttention",
        "FLASHINFER": "quire.attention.flashinfer:FlashInfer",
        "TORCH_SDPA": "quire.attention.torch_sdpa:TorchSDPA",
    },
)
"""In order of preference."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The attention of one layer."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window: int | None = None
    """How many tokens, itself included, a token sees; None: all before it."""
    scale: float | None = None
    """Factor on the scores; None: 1 / sqrt(head_dim)."""
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap); None: as they are."""
    sinks: bool = False
    """Whether each head has a logit that takes part in its softmax and has no value."""
    uses_alibi: bool = False
    """Whether each head has a slope: what its scores lose for each token between query and key (ALiBi)."""
    reaches: bool = False
    """Whether tokens may see some that follow them (`Batch.reach`)."""
    k_scale: float = 1.0
    """An 8-bit cache holds keys divided by this."""
    v_scale: float = 1.0
    cache_dtype: torch.dtype | None = None
    """The type of the cache where a backend is chosen; None: the same as `dtype`."""

    @property
    def scales(self) -> tuple[float, float]:
        return self.k_scale, self.v_scale

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale


class AttentionBackend(Protocol):
    """The caches of a layer are [num_blocks, block_size, kv_heads, head_dim] each."""

    name: str
    capturable: bool
    """Whether a decode is the same launches whatever the lengths, so that a CUDA graph can hold it."""
    captures_prompts: bool
    """Whether that goes for a batch of which `Batch.are_any` is said."""

    def fits(self, spec: AttentionSpec, machine: Machine) -> str | None:
        """Why this backend cannot serve `spec` on `machine`; None if it can."""
        ...

    def plan(self, batch: Batch) -> None:
        """Once per step, before the first layer: sets `batch.attention`."""
        ...

    def forward(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: Batch,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> Tensor:
        """[T, heads, head_dim] queries -> the same shape. `sinks` [heads] are logits that take part in each
        head's softmax and have no value. `alibi_slopes` [heads], in float32, are what each head's scores lose
        for each token between query and key."""
        ...


def named(dtype: torch.dtype | None) -> str:
    """float16, not torch.float16"""
    return str(dtype).removeprefix("torch.")


def why_no_gpu(machine: Machine) -> str | None:
    """Why kernels for GPUs of today do not run here; None if they do."""
    if machine.device != "cuda":
        return f"runs on a GPU, this is {machine.device}"
    if machine.capability < (8, 0):
        return f"needs compute capability 8.0, this is {'.'.join(map(str, machine.capability))}"
    return None


def why_no_package(spec: AttentionSpec) -> str | None:
    """Why the attention of other packages does not do for a model; None if it does."""
    if spec.dtype not in (torch.bfloat16, torch.float16):
        return f"computes float16 and bfloat16, not {named(spec.dtype)}"
    if spec.reaches:
        return "lets no token see what follows it, as those of this model do"
    if spec.sinks:
        return "is used without sinks"
    if spec.uses_alibi:
        return "is used without slopes, which this model's heads have"
    return None


def choose(name: str | None, spec: AttentionSpec, machine: Machine) -> AttentionBackend:
    """The backend called `name`, or without a name the first that fits."""
    reasons = {}
    for candidate in [name.upper()] if name else BACKENDS:
        backend: AttentionBackend = BACKENDS[candidate]()
        reason = backend.fits(spec, machine)
        if reason is None:
            return backend
        reasons[candidate] = reason
    said = "; ".join(f"{candidate}: {reason}" for candidate, reason in reasons.items())
    if name:
        able = [other for other in BACKENDS if BACKENDS[other]().fits(spec, machine) is None]
        instead = f" or take {' or '.join(able)}" if able else ""
        raise ConfigError(f"attention backend {said}; leave it out to have one chosen{instead}")
    raise ConfigError(f"no attention backend fits this model on this machine ({said})")

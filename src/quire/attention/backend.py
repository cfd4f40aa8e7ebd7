"""The attention backend protocol, and the choice of a backend.

Within a layer all keys and values of the batch are written (`Ops.rotate_and_write`) before attention runs: a
sequence may read blocks that another sequence of the same batch writes.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quire.attention.batch import Batch
from quire.config.attention_backends import BACKENDS
from quire.config.machine import Machine
from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Attention parameters of one layer."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window: int | None = None
    """Sliding window: number of tokens that a token attends to, itself included; None for full attention."""
    scale: float | None = None
    """Factor of the scores; None for 1 / sqrt(head_dim)."""
    softcap: float | None = None
    """Soft cap of the scores, softcap * tanh(s / softcap); None for no cap."""
    sinks: bool = False
    """Whether each head has an attention sink: a logit in the softmax without a value."""
    uses_alibi: bool = False
    """Whether the model uses ALiBi slopes."""
    bidirectional: bool = False
    """Whether tokens may attend to later tokens (`Batch.last_visible`)."""
    k_scale: float = 1.0
    """Scale of the keys: an 8-bit cache holds keys divided by this scale."""
    v_scale: float = 1.0
    """Scale of the values, like `k_scale`."""
    chunked: bool = False
    """Whether tokens attend only within chunks of `window` positions, counted from the first token."""
    cache_dtype: torch.dtype | None = None
    """KV cache dtype, on which the choice of a backend depends; None if it equals `dtype`."""

    @property
    def scales(self) -> tuple[float, float]:
        return self.k_scale, self.v_scale

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale


class AttentionBackend(Protocol):
    """An attention implementation. The caches of a layer are [num_blocks, block_size, kv_heads, head_dim]."""

    name: str
    capturable: bool
    """Whether a CUDA graph can capture decodes: the launches do not depend on sequence lengths."""
    captures_prompts: bool
    """Whether a CUDA graph can also capture batches that may contain prompts (`Batch.are_mixed`)."""

    def fits(self, spec: AttentionSpec, machine: Machine) -> str | None:
        """Return the reason why this backend does not support `spec` on `machine`; None if it does."""

    def plan(self, batch: Batch) -> None:
        """Compute the metadata that `forward` needs for this batch and store it in `batch.attention`; called
        once per step, before the first layer."""

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
        """Return the attention output [T, heads, head_dim] of queries `q` of the same shape over the paged
        cache. `sinks` [heads] are logits that join the softmax without a value. `alibi_slopes` [heads] are
        float32."""


def named(dtype: torch.dtype | None) -> str:
    """Return the dtype's name without the prefix "torch."."""
    return str(dtype).removeprefix("torch.")


def why_no_gpu(machine: Machine) -> str | None:
    """Return the reason why GPU kernels do not run on this machine; None if they do."""
    if machine.device != "cuda":
        return f"runs on a GPU, this is {machine.device}"
    if machine.capability < (8, 0):
        return f"needs compute capability 8.0, this is {'.'.join(map(str, machine.capability))}"
    return None


def why_no_package(spec: AttentionSpec) -> str | None:
    """Return the reason why neither flash_attn nor flashinfer can compute `spec`; None if `spec` rules out
    neither."""
    if spec.dtype not in (torch.bfloat16, torch.float16):
        return f"computes float16 and bfloat16, not {named(spec.dtype)}"
    if spec.bidirectional:
        return "does not support bidirectional attention, which this model needs"
    if spec.chunked:
        return "does not support chunked attention, which this model has"
    if spec.sinks:
        return "does not support attention sinks, which this model has"
    if spec.uses_alibi:
        return "does not support ALiBi slopes, which this model has"
    return None


def choose(name: str | None, spec: AttentionSpec, machine: Machine) -> AttentionBackend:
    """Return the backend called `name`; without a name, the first backend that fits `spec` and `machine`."""
    reasons = {}
    for candidate in [name.upper()] if name else BACKENDS:
        backend: AttentionBackend = BACKENDS[candidate]()
        reason = backend.fits(spec, machine)
        if reason is None:
            return backend
        reasons[candidate] = reason
    listed = "; ".join(f"{candidate}: {reason}" for candidate, reason in reasons.items())
    if name:
        usable = [other for other in BACKENDS if BACKENDS[other]().fits(spec, machine) is None]
        instead = f" or use {' or '.join(usable)}" if usable else ""
        raise ConfigError(f"attention backend {listed}; omit it to have one chosen{instead}")
    raise ConfigError(f"no attention backend fits this model on this machine ({listed})")

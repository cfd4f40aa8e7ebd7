"""Batch: the tensors of one forward pass, built by `worker/device.py` and read by every layer."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.parallel.all2all import EPTokens


class LoRATokens(NamedTuple):
    """LoRA adapter slot of each token of a forward pass in which at least one token has an adapter."""

    slots: Tensor
    """[T] int32, adapter slot of each token, -1 for none"""
    uses_extra_vocab: bool = False
    """Whether some adapter adds tokens: ids may exceed the model's vocabulary, and logits are wider."""
    assigned: Any = None
    """Kernel metadata computed from `slots`, once per step."""


@dataclass(slots=True)
class Batch:
    """Inputs of one forward pass over T tokens of B sequences, which are concatenated. Fields that end in
    `_host` are in host memory."""

    token_ids: Tensor
    """[T] int64"""
    positions: Tensor
    """[T] int64, position of each token in its sequence"""
    slots: Tensor
    """[T] int64, KV cache slot of each token (block id * block size + offset); below 0: not to be cached"""
    query_starts: Tensor
    """[B + 1] int32, index in this batch of the first token of each sequence, and the end of the last
    sequence"""
    seq_lens: Tensor
    """[B] int32, length of each sequence including the tokens of this batch; 0 is padding"""
    rows: Tensor
    """[B] int32, row of each sequence in `block_tables`"""
    block_tables: Tensor
    """[rows, blocks of the longest sequence] int32; entries beyond a sequence are undefined"""
    logit_tokens: Tensor
    """[N] int64, indices of the tokens of this batch whose logits are computed"""
    query_lens_host: NDArray[np.int32]
    seq_lens_host: NDArray[np.int32]
    mrope_positions: Tensor | None = None
    """int64, RoPE positions that differ from `positions`: [T], or [3, T] M-RoPE positions of time, height and
    width"""
    angles: dict[Any, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """M-RoPE tables by `Rope` module: cosines and sines of the batch's positions, and each token's row in
    them."""
    are_decodes: bool = False
    """Whether each sequence is a decode, with or without draft tokens. `query_lens_host` is valid then, but
    `seq_lens_host` is not: the step runs in a CUDA graph, or draft tokens were counted on the device only."""
    are_mixed: bool = False
    """Whether the batch is that of a CUDA graph for prompts and decodes. The lengths are then only on the
    device; `query_lens_host` has upper limits. The last sequence pads the batch: it has at least one token
    and no keys."""
    token_types: Tensor | None = None
    """[T] int64, token type ids of models that read pairs of texts: 1 for the second text"""
    embeds: tuple[Tensor, Tensor] | None = None
    """Indices [K] int64 of the tokens that have input embeddings instead of ids, and these embeddings [K,
    hidden]"""
    last_visible: Tensor | None = None
    """[T] int32, last position that each token attends to, non-decreasing in a sequence; None if causal"""
    lora: LoRATokens | None = None
    """Adapter slots of the tokens; None if no token has an adapter."""
    logit_lora: LoRATokens | None = None
    """Adapter slots of the tokens in `logit_tokens`; None if no token of the batch has an adapter."""
    intermediate_tensors: Tensor | None = None
    """[2, T, hidden], output of the previous pipeline stage: hidden states and residual. None in the first
    stage, which reads `token_ids`."""
    ep: EPTokens | None = None
    """Numbers of tokens for expert parallelism over data-parallel engines; None if all engines have the same
    number of tokens, without padding."""
    routes: list[Tensor] | None = None
    """Expert ids [T, per_token] of each MoE layer so far; all KV cache groups share the list. None if
    requests do not return expert ids."""
    attention: Any = None
    """Metadata of the attention backend, set by its `plan(batch)` once per step."""
    state: Any = None
    """Metadata of SSM layers, built once per step."""
    others: "tuple[Batch, ...]" = ()
    """Batches of the same tokens for the second and later KV cache groups; slots, block tables and attention
    metadata differ."""

    @property
    def groups(self) -> "tuple[Batch, ...]":
        """Return the batch of each KV cache group; the first is this batch."""
        return (self, *self.others)

    @property
    def max_query_len(self) -> int:
        return int(self.query_lens_host.max())

    @property
    def max_seq_len(self) -> int:
        return int(self.seq_lens_host.max())

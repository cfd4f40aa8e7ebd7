"""Batch: the tensors of one forward pass. Built by `worker/device.py`, read by every layer, kept by none."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(slots=True)
class Batch:
    """T tokens of B sequences, one after the other. `_host` copies of what is read on both sides."""

    token_ids: Tensor
    """[T] int64"""
    positions: Tensor
    """[T] int64, each token's place in its own sequence"""
    slots: Tensor
    """[T] int64, where each token's key and value go: block id * block size + offset; nowhere if below 0"""
    query_starts: Tensor
    """[B + 1] int32, first token of each sequence in this batch"""
    seq_lens: Tensor
    """[B] int32, tokens of each sequence that exist once this batch is written; 0 is padding"""
    rows: Tensor
    """[B] int32, the row of each sequence in `block_tables`"""
    block_tables: Tensor
    """[rows, blocks of the longest sequence] int32, what lies beyond a sequence means nothing"""
    logit_tokens: Tensor
    """[N] int64, the tokens of this batch whose logits are wanted"""
    query_lens_host: NDArray[np.int32]
    seq_lens_host: NDArray[np.int32]
    turns: Tensor | None = None
    """int64, where heads do not turn by the place of a token: [T] by what instead, or [3, T] by which time,
    height and width"""
    angles: dict[Any, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """What ropes made of [3, T] turns, once per step."""
    are_decodes: bool = False
    """Whether each sequence is a decode, with drafts or without: lengths on the host mean nothing."""
    are_any: bool = False
    """Whether they are whatever the device says: on the host only the most tokens that one may have is known.
    The last sequence is what pads the batch, of one token at least, and has no keys."""
    token_types: Tensor | None = None
    """[T] int64, for models that read pairs of texts: 1 for tokens of the second"""
    embeds: tuple[Tensor, Tensor] | None = None
    """[K] int64, tokens of which there are vectors in place of ids, and [K, hidden] those vectors"""
    reach: Tensor | None = None
    """[T] int32, the last place of its sequence that each token sees; falls in none. None: its own"""
    adapters: Tensor | None = None
    """[T] int32, the slot of each token's adapter, -1 without; None: no token has one"""
    logit_adapters: Tensor | None = None
    """[N] int32, the same of `logit_tokens`"""
    is_wide: bool = False
    """Whether some adapter has tokens of its own: ids may be beyond the vocabulary, and logits are."""
    before: Tensor | None = None
    """[2, T, hidden], what the stage before made of the tokens: what its last layer said, and what that is
    added to. None in the first stage, which reads `token_ids`."""
    aux_hidden_states: tuple[Tensor, ...] = ()
    """[T, hidden] each, what the model noted of its states on the way, for a draft."""
    num_real: int | None = None
    """Tokens that are no padding; None: unknown, or all."""
    room: int | None = None
    """Tokens that each of the engines in step makes room for; None: as many as there are here."""
    attention: Any = None
    """What the attention backend's `plan(batch)` made of all this, once per step."""
    state: Any = None
    """The same for layers that keep a state."""
    beside: Tensor | None = None
    """[T, hidden], what a layer leaves for the next one to add, in models that have such layers."""
    topk_indices: Any = None
    """What the last indexer picked for each token; see `attention/sparse_indices.py`."""
    first: Tensor | None = None
    """[T, hidden], what the embedding made of the tokens, for models whose layers read it again."""
    crossed: "Batch | None" = None
    """The same tokens as they see what none of them stands for: each as a sequence of its own. Made by models
    that have such layers."""
    others: "tuple[Batch, ...]" = ()
    """The same batch as groups of layers see it that have blocks of their own: slots, block tables and
    attention differ."""

    @property
    def groups(self) -> "tuple[Batch, ...]":
        """By group of layers; the first one's is the batch itself."""
        return (self, *self.others)

    @property
    def max_query_len(self) -> int:
        return int(self.query_lens_host.max())

    @property
    def max_seq_len(self) -> int:
        return int(self.seq_lens_host.max())

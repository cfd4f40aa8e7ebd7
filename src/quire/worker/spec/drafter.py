"""Drafters: draft models and heads that propose tokens; the last tokens may be on the device only."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from quire.attention.backend import AttentionBackend
from quire.attention.batch import Batch
from quire.checkpoint.draft import Draft
from quire.checkpoint.facts import ArchFacts
from quire.config.engine import EngineConfig
from quire.errors import ConfigError
from quire.kernels.cpu.tape import Tapes
from quire.loader import load_model
from quire.memory import DTYPE_BYTES, activation_bytes
from quire.models import DRAFTS
from quire.models.drafts import DraftHead
from quire.parallel.world import World

MAX_MLA_DRAFTS = 7
"""Maximum number of draft tokens of a row with MLA: together with the last token they fill a query tile of
the kernel."""
_MAX_TAPED = 64
"""Maximum number of tokens of a step on a CPU that is recorded as a tape of kernel calls and replayed; in
larger steps the overhead of the calls is small."""
_WARMUP_TOKENS = 1024
"""Number of tokens by which steps that compile kernels may exceed max_num_batched_tokens."""

SampleDrafts = Callable[[Tensor, Tensor], Tensor]
"""Function that samples tokens [B] from logits [B, vocab] for positions [B]."""


class SequenceEnds(NamedTuple):
    """The last tokens of B sequences that get drafts, all on the device."""

    rows: Tensor
    """[B] int32, the rows of the sequences"""
    ids: Tensor
    """[B, 2] int64, the last two tokens"""
    last: Tensor
    """[B] int64, the position of the last token"""
    num_slots: Tensor
    """[B] int64, how many tokens the blocks of each sequence have room for; nothing is written beyond"""
    tables: Tensor
    """[layer groups, rows, blocks] int32, the block tables"""
    sample: SampleDrafts | None = None
    """Sampling function of drafts; None for greedy drafts."""

    def pick(self, logits: Tensor, ahead: int) -> Tensor:
        """Return draft tokens [B] from logits [B, vocab]; their positions are `ahead` after the sequences'
        last tokens."""
        return logits.argmax(-1) if self.sample is None else self.sample(logits, self.last + ahead)


class TargetStates(NamedTuple):
    """The results of a step of B sequences for a draft head, all on the device."""

    next_ids: Tensor
    """[B] int64, the token after the last accepted one: the one just sampled, or the prompt's next"""
    num_kept: Tensor
    """[B] int64, the number of each sequence's tokens in the batch without rejected drafts"""
    states: tuple[Tensor, ...]
    """Hidden states of the target, [T, hidden] each: of intermediate layers, or the input of its LM head."""


def last_kept(batch: Batch, num_kept: Tensor) -> Tensor:
    """Return [B] int64, the index in the batch of the last accepted token of each sequence. A sequence
    without tokens is padding; its index is that of the batch's last token, which is padding too."""
    ends = batch.query_starts[:-1].long() + num_kept - 1
    return torch.where(num_kept > 0, ends, len(batch.token_ids) - 1)


class Drafter(Protocol):
    """Proposes draft tokens for the sequences of a step."""

    observes: bool
    """Whether the drafter reads each step of the target right after the step (`observe`). If not, it must
    `catch_up` on all tokens of a sequence but the last two before it proposes."""

    def observe(self, batch: Batch, target: TargetStates) -> None:
        """Update the drafter with a step of the target model: the batch of the step and its results."""

    def catch_up(self, batch: Batch) -> None:
        """Compute tokens that the draft model has not computed yet."""

    def propose(self, ends: SequenceEnds, most: int) -> Tensor:
        """Return [B, most] int64, the proposed tokens; undefined where a sequence has no cache slots."""

    def forget(self) -> None:
        """Drop everything that contains addresses of weights or cache: the addresses will change."""


class _DraftBatches:
    """Builds the batches in which a draft model or head computes draft tokens. On a CPU, small batches reuse
    the buffers of the last batch of their size, so that recorded kernel calls (tapes) can be replayed."""

    def __init__(self, backend: AttentionBackend, block_size: int, max_taped: int) -> None:
        self.backend = backend
        self.block_size = block_size
        self.max_taped = max_taped
        self._batches: dict[tuple[int, ...], Batch] = {}
        self._tapes = Tapes()

    def forget(self) -> None:
        self._tapes = Tapes()

    def planned(self, batch: Batch) -> Batch:
        for group in batch.groups:
            self.backend.plan(group)
        return batch

    def hidden(self, model: Callable[[Batch], Tensor], batch: Batch) -> Tensor:
        """Return the hidden states of a batch, valid until the next call. Small batches on a CPU replay
        recorded kernel calls."""
        key = _key(batch)
        if self._batches.get(key) is batch:
            return self._tapes.run(key, lambda: model(batch))
        return model(batch)

    def _reuse_buffers(self, batch: Batch) -> Batch:
        """Return a small batch on a CPU in the buffers of the last batch of its size; return other batches as
        they are."""
        if len(batch.token_ids) > self.max_taped or batch.token_ids.device.type != "cpu":
            return batch
        kept = self._batches.setdefault(_key(batch), batch)
        if kept is not batch:
            for name in ("token_ids", "positions", "seq_lens", "rows"):
                getattr(kept, name).copy_(getattr(batch, name))
            for group, new in zip(kept.groups, batch.groups, strict=True):
                group.slots.copy_(new.slots)
                group.seq_lens_host = kept.seq_lens.numpy()
        return kept

    def build(self, ends: SequenceEnds, ids: Tensor, ahead: int) -> Batch:
        """Build the batch of `ids` [B, n]; the last ones are `ahead` positions after the sequences' last
        tokens."""
        (count, width), device = ids.shape, ids.device
        flat, rows = ids.flatten(), ends.rows
        if device.type == "cpu":  # the buffers of `ends` may be overwritten
            flat, rows = flat.clone(), rows.clone()
        positions, seq_lens, slots = place(ends, ahead, width, self.block_size)
        # Kernels on a GPU read the real lengths; the host has upper bounds of them.
        most = ends.tables.shape[2] * self.block_size
        lens = seq_lens.numpy() if device.type == "cpu" else np.full(count, most, np.int32)
        batch = Batch(
            token_ids=flat,
            positions=positions,
            slots=slots[0],
            query_starts=torch.arange(0, (count + 1) * width, width, dtype=torch.int32, device=device),
            seq_lens=seq_lens,
            rows=rows,
            block_tables=ends.tables[0],
            logit_tokens=positions,
            query_lens_host=np.full(count, width, np.int32),
            seq_lens_host=lens,
            are_decodes=device.type != "cpu",
        )
        others = zip(slots[1:], ends.tables[1:], strict=True)
        batch.others = tuple(replace(batch, slots=slot, block_tables=table) for slot, table in others)
        return self.planned(self._reuse_buffers(batch))


def place(ends: SequenceEnds, ahead: int, width: int, block_size: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the positions [B * width] int64, the sequence lengths [B] int32 and, for each layer group, the
    cache slots [B * width] of the last `width` tokens of each sequence, if the sequence is extended by
    `ahead` tokens. Beyond the blocks of a sequence, positions are valid for reading, and slots are negative
    so that nothing is written."""
    device = ends.last.device
    if device.type == "cuda":
        from quire.kernels.triton import spec as drafts

        return drafts.place(ends.rows, ends.last, ends.num_slots, ends.tables, ahead, width, block_size)
    end = ends.last + ahead
    there = torch.minimum(end, ends.num_slots - 1).clamp(min=width - 1)
    positions = there[:, None] + torch.arange(1 - width, 1, device=device)
    blocks = ends.tables[:, ends.rows.long()[:, None], positions // block_size].long()
    slots = torch.where((end < ends.num_slots)[:, None], blocks * block_size + positions % block_size, -1)
    return positions.flatten(), there.int() + 1, list(slots.flatten(1))


def _key(batch: Batch) -> tuple[int, ...]:
    """Return a key of a batch's numbers of tokens and sequences and of its block tables; batches with the
    same key differ only in the values of their tensors."""
    return len(batch.token_ids), len(batch.seq_lens), batch.block_tables.data_ptr()


class ModelDrafter:
    """Proposes tokens by a separate draft model. Each proposal begins with the last two tokens of a sequence.
    The last but one was not computed if it was the last accepted draft; otherwise it is computed a second
    time, which is harmless."""

    observes = False

    def __init__(
        self, model: Any, backend: AttentionBackend, *, block_size: int, max_taped: int, vocab: int
    ) -> None:
        self.model = model
        self.batches = _DraftBatches(backend, block_size, max_taped)
        self.forget = self.batches.forget
        self.vocab = vocab
        """Number of token ids that the draft model shares with the target."""

    def observe(self, batch: Batch, target: TargetStates) -> None:
        """Ignore the step: the draft model catches up before it proposes."""

    def catch_up(self, batch: Batch) -> None:
        batch.token_ids.clamp_(0, self.vocab - 1)
        self.model(self.batches.planned(batch))

    def propose(self, ends: SequenceEnds, most: int) -> Tensor:
        ids, drafts = ends.ids.clamp(0, self.vocab - 1), list[Tensor]()
        for number in range(most):
            hidden = self.batches.hidden(self.model, self.batches.build(ends, ids, number))
            logits = self.model.logits(hidden if number else hidden[1::2])[:, : self.vocab]
            drafts.append(ends.pick(logits, number + 1))
            ids = drafts[-1][:, None]
        return torch.stack(drafts, 1)


class HeadDrafter:
    """Proposes tokens by a head on the hidden states of the target. Each token is computed at the position of
    the token before it, together with the hidden states of that token."""

    observes = True

    def __init__(
        self, model: DraftHead, backend: AttentionBackend, *, block_size: int, max_taped: int, states: Tensor
    ) -> None:
        self.model = model
        self.batches = _DraftBatches(backend, block_size, max_taped)
        self.forget = self.batches.forget
        self.states = states
        """[2, rows, hidden] for each row: the output of the head for the last token, and the target's hidden
        states that belong to the next token."""

    def observe(self, batch: Batch, target: TargetStates) -> None:
        at = last_kept(batch, target.num_kept)
        shifted = batch.token_ids.roll(-1).clamp_(min=0).index_copy_(0, at, target.next_ids)
        first = replace(batch, token_ids=shifted, **_DRAFT_FIELDS)
        first.others = tuple(replace(group, attention=None) for group in batch.others)
        states = target.states[0] if len(target.states) == 1 else torch.cat(target.states, 1)
        outputs = self.model(self.batches.planned(first), self.model.input_states(states))
        for row_states, computed in zip(self.states, outputs, strict=True):
            row_states.index_copy_(0, batch.rows.long(), computed[at])

    def catch_up(self, batch: Batch) -> None:
        raise AssertionError("a draft head reads every step of the target")

    def propose(self, ends: SequenceEnds, most: int) -> Tensor:
        out, states = self.states[:, ends.rows.long()]
        drafts: list[Tensor] = []
        for number in range(most):
            drafts.append(self.model.target_ids(ends.pick(self.model.logits(out), number + 1)))
            if number < most - 1:
                out, states = self.model(self.batches.build(ends, drafts[-1][:, None], number), states)
        return torch.stack(drafts, 1)


_DRAFT_FIELDS: dict[str, Any] = {
    "mrope_positions": None,
    "lora": None,
    "logit_lora": None,
    "embeds": None,
    "last_visible": None,
    "intermediate_tensors": None,
    "ep": None,
    "attention": None,
    "state": None,
    "others": (),
}
"""Fields of `Batch` that the draft's batch does not take over from the target's."""


def check_ahead(backend: str, num_drafts: int, *, uses_mla: bool) -> None:
    """Raise ConfigError if draft tokens are not possible on a GPU: the attention backend needs sequence
    lengths on the host, where they are not known with drafts, or there are too many drafts for MLA."""
    if backend != "TRITON_ATTN":
        raise ConfigError(
            f"speculative decoding on a GPU needs attention_backend TRITON_ATTN, not {backend}: sequence "
            "lengths are known to the device only"
        )
    if uses_mla and num_drafts > MAX_MLA_DRAFTS:
        raise ConfigError(
            f"num_speculative_tokens={num_drafts} is above the limit of {MAX_MLA_DRAFTS} for MLA on a GPU; "
            "lower it"
        )


def load_draft(
    config: EngineConfig, draft: Draft, backend: AttentionBackend, device: torch.device, world: World
) -> Any:
    is_part = draft.method == "mtp"
    quant = None if draft.checkpoint.format == "gguf" else draft.checkpoint.quant
    return load_model(
        draft.checkpoint,
        dtype=getattr(torch, config.model.dtype),
        device=device,
        backend=backend,
        max_model_len=config.model.max_model_len,
        load_format=config.load.load_format,
        show_progress=False,
        seed=config.model.seed,
        packed=True,
        quant=config.quant if is_part else quant,
        build=DRAFTS[draft.facts.architecture] if draft.facts.drafts else None,
        world=world,
        partly=is_part,
    )


def draft_bytes(config: EngineConfig, facts: ArchFacts) -> int:
    """Return the maximum bytes that the draft model needs after a step of the target model: the hidden states
    of the target that it reads, its own activations, and its logits."""
    limits, dtype, target = config.scheduler, config.model.dtype, config.checkpoint.facts
    num_tokens = limits.max_num_batched_tokens + limits.max_num_seqs
    num_aux = 0 if facts.drafts is None else len(facts.drafts.aux_layers)
    states = num_tokens * (1 + num_aux) * target.hidden * DTYPE_BYTES[dtype]
    activations = activation_bytes(facts, dtype, num_tokens=num_tokens, num_seqs=limits.max_num_seqs)
    return states + limits.max_num_seqs * target.vocab * 4 + activations


def open_drafter(
    config: EngineConfig, model: Any, target: Any, backend: AttentionBackend, device: torch.device
) -> Drafter:
    """Build the drafter of a loaded draft model or head, and let the target record hidden states for it."""
    assert config.draft is not None
    facts, spec = config.draft.facts, config.speculation
    is_eager = config.model.enforce_eager or (spec is not None and spec.enforce_eager)
    sizes = {"block_size": config.cache.block_size, "max_taped": 0 if is_eager else _MAX_TAPED}
    if facts.drafts is None:
        return ModelDrafter(model, backend, **sizes, vocab=min(facts.vocab, config.checkpoint.facts.vocab))
    model.set_target(target)
    if facts.drafts.aux_layers:
        target.set_aux_hidden_state_layers(
            facts.drafts.aux_layers, config.scheduler.max_num_batched_tokens + _WARMUP_TOKENS, device
        )
    room = 2, config.scheduler.max_num_seqs + 1, facts.hidden
    states = torch.zeros(room, dtype=getattr(torch, config.model.dtype), device=device)
    return HeadDrafter(model, backend, **sizes, states=states)

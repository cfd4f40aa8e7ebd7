"""Drafter: the tokens that a draft proposes behind a step of the target. Nothing here needs the host to know
what the target drew."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.attention.backend import AttentionBackend
from quire.attention.batch import Batch
from quire.capacity import DTYPE_BYTES, activation_bytes
from quire.comm.world import World
from quire.config.draft import Draft
from quire.config.engine import EngineConfig
from quire.config.facts import ArchFacts
from quire.data.plan import Ints
from quire.errors import ConfigError
from quire.kernels.tape import Tapes
from quire.loader import load_model
from quire.models import DRAFTS
from quire.models.drafting import DraftHead

MOST_LATENT = 7
"""Drafts of a row: with its own token they make a tile of queries."""
_MAX_TAPED = 64
"""Tokens: what is computed of more has work enough to hide the calls."""


class Told(NamedTuple):
    """What a step of B sequences leaves for the drafts behind it, all on the device."""

    next_ids: Tensor
    """[B] int64, the token behind the last one that counts: the one just drawn, or the prompt's next"""
    num_kept: Tensor
    """[B] int64, how many of its tokens in the batch count: all but the drafts that were not accepted"""
    num_slots: Tensor
    """[B] int64, how many tokens its blocks have room for: beyond them nothing is written"""
    has_seen: bool
    """Whether the draft has seen every token of each sequence in front of the last one that counts"""
    states: Tensor
    """[T, n * hidden] of the batch's tokens, as the target noted them (`Batch.taps`), or its head sees them;
    a draft that is a model of its own does not look at them"""
    draw: Callable[[Tensor, Tensor], Tensor] | None = None
    """Tokens by [B, V] logits and the [B] positions where they would stand; None: the likeliest"""

    def pick(self, logits: Tensor, positions: Tensor) -> Tensor:
        return logits.argmax(-1) if self.draw is None else self.draw(logits, positions)


class Drafter(Protocol):
    """Proposes tokens."""

    def propose(self, batch: Batch, told: Told, most: int) -> Tensor:
        """[B, most] int64: the tokens that may follow each of `next_ids`. `batch` is the target's. Has to be
        called behind each step, with 0 if nothing is wanted of it: the draft has to see every token. What is
        proposed to a sequence without room for it means nothing."""

    def forget(self) -> None:
        """Weights and cache will lie elsewhere."""


class _Ahead:
    """Batches for the tokens behind those of a batch of the target. Those of few tokens lie where the last of
    their size lay, so that what is computed of them can be played again."""

    def __init__(self, backend: AttentionBackend, block_size: int, max_taped: int) -> None:
        self.backend = backend
        self.block_size = block_size
        self.max_taped = max_taped
        self._sheets: dict[tuple[int, ...], Batch] = {}
        self._tapes = Tapes()

    def forget(self) -> None:
        self._tapes = Tapes()

    def planned(self, batch: Batch) -> Batch:
        for group in batch.groups:
            self.backend.plan(group)
        return batch

    def hidden(self, model: Callable[[Batch], Tensor], batch: Batch) -> Tensor:
        """What the model makes of a batch from here; on a CPU, of a small one, without a call by operation.
        Valid until the next one."""
        key = _key(batch)
        if self._sheets.get(key) is batch and batch.token_ids.device.type == "cpu":
            return self._tapes.run(key, lambda: model(batch))
        return model(batch)

    def _placed(self, batch: Batch) -> Batch:
        """The same where the last of its size lay."""
        if len(batch.token_ids) > self.max_taped:
            return batch
        kept = self._sheets.setdefault(_key(batch), batch)
        if kept is not batch:
            for name in ("token_ids", "positions", "seq_lens", "rows"):
                getattr(kept, name).copy_(getattr(batch, name))
            for group, new in zip(kept.groups, batch.groups, strict=True):
                group.slots.copy_(new.slots)
                group.seq_lens_host = self.lens(batch, kept.seq_lens)
        return kept

    def lens(self, batch: Batch, seq_lens: Tensor, more: int = 0) -> Ints:
        """Lengths as backends want to know them in advance: as they are on a CPU, and where kernels read them
        on the device no less than that, which is at most so many more than in `batch`."""
        if seq_lens.device.type == "cpu":
            return seq_lens.numpy()
        if not self.backend.capturable:
            return seq_lens.cpu().numpy()
        width = batch.block_tables.shape[1] * self.block_size
        return np.minimum(batch.seq_lens_host + more, width).astype(np.int32)

    def slots(self, group: Batch, seqs: Tensor, positions: Tensor, num_slots: Tensor) -> Tensor:
        """Of these positions of sequences, -1 where there is none."""
        blocks = positions.clamp(max=group.block_tables.shape[1] * self.block_size - 1) // self.block_size
        found = group.block_tables[group.rows.long()[seqs], blocks].long() * self.block_size
        return torch.where(positions < num_slots[seqs], found + positions % self.block_size, -1)

    def behind(self, batch: Batch, ids: Tensor, last: Tensor, num_slots: Tensor, most: int) -> Batch:
        """`ids` [B, n] of which the last stand at the positions `last` [B] of their sequences, at most so
        many tokens behind those of `batch`."""
        count, width = ids.shape
        back = torch.arange(width - 1, -1, -1, device=ids.device)
        # Where there is no room, a place that exists is read.
        ends = torch.minimum(last, num_slots - 1).clamp(min=width - 1)
        positions = (ends[:, None] - back).flatten()
        seqs = torch.arange(count, device=ids.device).repeat_interleave(width)
        seq_lens = torch.where(batch.seq_lens > 0, ends.int() + 1, 0)
        wanted = torch.where(last < num_slots, num_slots, 0)
        made = replace(
            batch,
            token_ids=ids.flatten().clone(),
            positions=positions,
            slots=self.slots(batch, seqs, positions, wanted),
            query_starts=torch.arange(0, (count + 1) * width, width, dtype=torch.int32, device=ids.device),
            seq_lens=seq_lens,
            rows=batch.rows.clone(),
            query_lens_host=np.full(count, width, np.int32),
            seq_lens_host=self.lens(batch, seq_lens, most),
            **_NOTHING,
        )
        made.others = tuple(
            replace(made, slots=self.slots(group, seqs, positions, wanted), block_tables=group.block_tables)
            for group in batch.others
        )
        return self.planned(self._placed(made))

    def longer(self, batch: Batch, next_ids: Tensor, at: Tensor, num_slots: Tensor) -> Batch:
        """The batch with one more place for each sequence, and `next_ids` in the places `at` of it."""
        lens, num_tokens, device = batch.query_lens_host, len(batch.token_ids), batch.token_ids.device
        count = len(lens)
        kept = _sent(np.arange(num_tokens) + np.repeat(np.arange(count), lens), device)
        new = _sent(np.cumsum(lens + 1) - 1, device)
        ends = batch.query_starts[1:].long() - 1
        seqs = torch.arange(count, device=device)
        after = batch.positions[ends] + 1
        positions = _merged(batch.positions, kept, torch.minimum(after, num_slots - 1), new)
        seq_lens = torch.where(batch.seq_lens > 0, batch.seq_lens + 1, 0)
        made = replace(
            batch,
            token_ids=_merged(batch.token_ids, kept, next_ids, new).index_copy_(0, at, next_ids),
            positions=positions,
            slots=_merged(batch.slots, kept, self.slots(batch, seqs, after, num_slots), new),
            query_starts=batch.query_starts + torch.arange(count + 1, dtype=torch.int32, device=device),
            seq_lens=seq_lens,
            query_lens_host=lens + 1,
            seq_lens_host=self.lens(batch, seq_lens, 1),
            **_NOTHING,
        )
        made.others = tuple(
            replace(
                made,
                slots=_merged(group.slots, kept, self.slots(group, seqs, after, num_slots), new),
                block_tables=group.block_tables,
            )
            for group in batch.others
        )
        return self.planned(made)


_NOTHING: dict[str, Any] = {
    "turns": None,
    "embeds": None,
    "reach": None,
    "before": None,
    "taps": (),
    "num_real": None,
    "room": None,
    "attention": None,
    "state": None,
    "others": (),
}
"""What a draft's batch does not have of the target's."""


def _key(batch: Batch) -> tuple[int, ...]:
    """Batches of one key are alike but for what is in their tensors."""
    return len(batch.token_ids), len(batch.seq_lens), batch.block_tables.data_ptr()


def _sent(places: NDArray[Any], device: torch.device) -> Tensor:
    """To the device, without a wait for what it does."""
    found = torch.from_numpy(places)
    return found if device.type == "cpu" else found.pin_memory().to(device, non_blocking=True)


def _merged(old: Tensor, kept: Tensor, more: Tensor, new: Tensor) -> Tensor:
    """Old values in the places `kept`, and more in the places `new`."""
    return old.new_empty(len(old) + len(more)).index_copy_(0, kept, old).index_copy_(0, new, more)


class ModelDrafter:
    """Drafts by a model of its own, which has to see all tokens."""

    def __init__(
        self, model: Any, backend: AttentionBackend, *, block_size: int, max_taped: int, vocab: int
    ) -> None:
        self.model = model
        self.ahead = _Ahead(backend, block_size, max_taped)
        self.forget = self.ahead.forget
        self.vocab = vocab
        """The ids that it has in common with the target."""

    def propose(self, batch: Batch, told: Told, most: int) -> Tensor:
        kept = batch.query_starts[:-1].long() + told.num_kept
        last = batch.positions[kept - 1] + 1
        if told.has_seen:
            # But not the last one, if that was the last of its drafts: it is computed again.
            ids = torch.stack((batch.token_ids[kept - 1], told.next_ids), 1).clamp_(0, self.vocab - 1)
            ahead, at = self.ahead.behind(batch, ids, last, told.num_slots, 1), None
        else:
            at = kept + torch.arange(len(kept), device=kept.device)
            ahead = self.ahead.longer(batch, told.next_ids, at, told.num_slots)
            ahead.token_ids.clamp_(0, self.vocab - 1)
        drafts: list[Tensor] = []
        for number in range(max(most, 1)):
            hidden = self.ahead.hidden(self.model, ahead)
            if number == most:
                break
            hidden = hidden[1::2] if not number and at is None else hidden if number else hidden[at]
            place = last + number + 1
            drafts.append(told.pick(self.model.logits(hidden)[:, : self.vocab], place))
            if number < most - 1:
                ahead = self.ahead.behind(batch, drafts[-1][:, None], place, told.num_slots, number + 2)
        return _columns(drafts, told.next_ids)


def _columns(drafts: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack(drafts, 1) if drafts else like.new_empty(len(like), 0)


class HeadDrafter:
    """Drafts by a head on the states of the target. Each token is computed in the place of the one before it,
    whose states it goes with."""

    def __init__(
        self, model: DraftHead, backend: AttentionBackend, *, block_size: int, max_taped: int
    ) -> None:
        self.model = model
        self.ahead = _Ahead(backend, block_size, max_taped)
        self.forget = self.ahead.forget

    def propose(self, batch: Batch, told: Told, most: int) -> Tensor:
        at = batch.query_starts[:-1].long() + told.num_kept - 1
        shifted = batch.token_ids.roll(-1).clamp_(min=0).index_copy_(0, at, told.next_ids)
        first = replace(batch, token_ids=shifted, **_NOTHING)
        first.others = tuple(replace(group, attention=None) for group in batch.others)
        out, states = self.model(self.ahead.planned(first), self.model.states(told.states))
        drafts: list[Tensor] = []
        out, states, last = out[at], states[at], batch.positions[at]
        for number in range(most):
            place = last + number + 1
            drafts.append(self.model.names(told.pick(self.model.logits(out), place + 1)))
            if number < most - 1:
                ids = drafts[-1][:, None]
                ahead = self.ahead.behind(batch, ids, place, told.num_slots, number + 1)
                out, states = self.model(ahead, states)
        return _columns(drafts, told.next_ids)


def check_ahead(backend: str, num_drafts: int, *, latent: bool) -> None:
    """Refuse drafts where attention has to know on the host how long the sequences are."""
    if backend != "TRITON_ATTN":
        raise ConfigError(
            f"speculation on a GPU needs attention_backend TRITON_ATTN, not {backend}: the lengths of "
            "sequences are known to the device alone"
        )
    if latent and num_drafts > MOST_LATENT:
        raise ConfigError(
            f"num_speculative_tokens={num_drafts} is above the {MOST_LATENT} that latent attention takes on "
            "a GPU; lower it"
        )


def load_draft(
    config: EngineConfig, draft: Draft, backend: AttentionBackend, device: torch.device, world: World
) -> Any:
    """The draft's model with its weights, without a cache."""
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
    """The peak of a draft behind the largest step, whose states and logits are still there."""
    limits, dtype, target = config.scheduler, config.model.dtype, config.checkpoint.facts
    num_tokens = limits.max_num_batched_tokens + limits.max_num_seqs
    taps = 0 if facts.drafts is None else len(facts.drafts.taps)
    states = num_tokens * (1 + taps) * target.hidden * DTYPE_BYTES[dtype]
    own = activation_bytes(facts, dtype, num_tokens=num_tokens, num_seqs=limits.max_num_seqs)
    return states + limits.max_num_seqs * target.vocab * 4 + own


def open_drafter(
    config: EngineConfig, model: Any, target: Any, backend: AttentionBackend, device: torch.device
) -> Drafter:
    """The drafter of a loaded draft; the target notes what it needs from now on."""
    assert config.draft is not None
    facts = config.draft.facts
    sizes = {
        "block_size": config.cache.block_size,
        "max_taped": 0 if config.model.enforce_eager else _MAX_TAPED,
    }
    if facts.drafts is None:
        return ModelDrafter(model, backend, **sizes, vocab=min(facts.vocab, config.checkpoint.facts.vocab))
    model.adopt(target)
    if facts.drafts.taps:
        target.tap(facts.drafts.taps, config.scheduler.max_num_batched_tokens, device)
    return HeadDrafter(model, backend, **sizes)

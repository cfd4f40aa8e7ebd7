"""Drafter: the tokens that a draft proposes in front of a step. Nothing here needs the host to know what the
target drew."""

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
from quire.data.plan import Ints
from quire.errors import ConfigError
from quire.kernels.cpu.tape import Tapes
from quire.loader import load_model
from quire.memory import DTYPE_BYTES, activation_bytes
from quire.models import DRAFTS
from quire.models.draft_head import DraftHead
from quire.parallel.world import World

MOST_LATENT = 7
"""Drafts of a row: with its own token they make a tile of queries."""
_MAX_TAPED = 64
"""Tokens: what is computed of more has work enough to hide the calls."""
_MORE_TAPPED = 1024
"""Tokens of a step that is run to have kernels compiled may be so many more than of any other."""

Draw = Callable[[Tensor, Tensor], Tensor]
"""Tokens by [B, V] logits and the [B] positions where they would stand."""


class Ends(NamedTuple):
    """How B sequences end that want drafts, all on the device."""

    rows: Tensor
    """[B] int32"""
    ids: Tensor
    """[B, 2] int64, the last two tokens"""
    last: Tensor
    """[B] int64, where the last one stands"""
    num_slots: Tensor
    """[B] int64, how many tokens the blocks of each have room for: beyond them nothing is written"""
    tables: Tensor
    """[groups of layers, rows, blocks] int32"""
    draw: Draw | None = None
    """None: the likeliest."""

    def pick(self, logits: Tensor, ahead: int) -> Tensor:
        """The tokens so many places behind the last ones."""
        return logits.argmax(-1) if self.draw is None else self.draw(logits, self.last + ahead)


class Told(NamedTuple):
    """What a step of B sequences leaves for a draft that looks at the target's states, all on the device."""

    next_ids: Tensor
    """[B] int64, the token behind the last one that counts: the one just drawn, or the prompt's next"""
    num_kept: Tensor
    """[B] int64, how many of its tokens in the batch count: all but the drafts that were not accepted"""
    states: Tensor
    """Hidden states of the target, [T, n * hidden]: `Batch.aux_hidden_states`, or the input of its head."""


def last_kept(batch: Batch, num_kept: Tensor) -> Tensor:
    """[B] int64, where in the batch the last token of each sequence stands that counts. One without tokens
    pads the batch, as its last token does."""
    ends = batch.query_starts[:-1].long() + num_kept - 1
    return torch.where(num_kept > 0, ends, len(batch.token_ids) - 1)


class Drafter(Protocol):
    """Proposes tokens."""

    follows: bool
    """Whether it sees each step of the target, right behind it (`see`). If not, it has to `catch_up` with all
    tokens but the last two of a sequence before it proposes what comes behind them."""

    def see(self, batch: Batch, told: Told) -> None:
        """A step of the target."""

    def catch_up(self, batch: Batch) -> None:
        """Tokens that it has not seen."""

    def propose(self, ends: Ends, most: int) -> Tensor:
        """[B, most] int64, one or more of each: the tokens that may follow the last ones. What is proposed to
        a sequence without room for it means nothing."""

    def forget(self) -> None:
        """Weights and cache will lie elsewhere."""


class _Ahead:
    """Batches of tokens behind those of the target. On a CPU those of few lie where the last of their size
    lay, so that what is computed of them can be played again."""

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
        if self._sheets.get(key) is batch:
            return self._tapes.run(key, lambda: model(batch))
        return model(batch)

    def _placed(self, batch: Batch) -> Batch:
        """The same where the last of its size lay."""
        if len(batch.token_ids) > self.max_taped or batch.token_ids.device.type != "cpu":
            return batch
        kept = self._sheets.setdefault(_key(batch), batch)
        if kept is not batch:
            for name in ("token_ids", "positions", "seq_lens", "rows"):
                getattr(kept, name).copy_(getattr(batch, name))
            for group, new in zip(kept.groups, batch.groups, strict=True):
                group.slots.copy_(new.slots)
                group.seq_lens_host = kept.seq_lens.numpy()
        return kept

    def behind(self, ends: Ends, ids: Tensor, ahead: int) -> Batch:
        """`ids` [B, n] of which the last stand so many places behind the last tokens."""
        (count, width), device = ids.shape, ids.device
        flat, rows = ids.flatten(), ends.rows
        if device.type == "cpu":  # where what comes next may be written to the same
            flat, rows = flat.clone(), rows.clone()
        positions, seq_lens, slots = place(ends, ahead, width, self.block_size)
        lens = seq_lens.numpy() if device.type == "cpu" else self._longest(ends, count)
        made = Batch(
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
        made.others = tuple(replace(made, slots=each, block_tables=table) for each, table in others)
        return self.planned(self._placed(made))

    def _longest(self, ends: Ends, count: int) -> Ints:
        """Lengths as the host may know them, where kernels read the real ones: no less than those."""
        return np.full(count, ends.tables.shape[2] * self.block_size, np.int32)


def place(ends: Ends, ahead: int, width: int, block_size: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Positions [B * width] int64, lengths [B] int32 and, of each group of layers, slots [B * width] of the
    tokens up to `ahead` places behind the last one of each sequence. Where there is no room a place that
    exists is read, and nothing is written."""
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
    """Batches of one key are alike but for what is in their tensors."""
    return len(batch.token_ids), len(batch.seq_lens), batch.block_tables.data_ptr()


class ModelDrafter:
    """Drafts by a model of its own. It computes the last two tokens of a sequence, since it has not seen the
    one before the last if that was the last of its drafts; to see it again changes nothing."""

    follows = False

    def __init__(
        self, model: Any, backend: AttentionBackend, *, block_size: int, max_taped: int, vocab: int
    ) -> None:
        self.model = model
        self.ahead = _Ahead(backend, block_size, max_taped)
        self.forget = self.ahead.forget
        self.vocab = vocab
        """The ids that it has in common with the target."""

    def see(self, batch: Batch, told: Told) -> None:
        """It asks for what it wants to know."""

    def catch_up(self, batch: Batch) -> None:
        batch.token_ids.clamp_(0, self.vocab - 1)
        self.model(self.ahead.planned(batch))

    def propose(self, ends: Ends, most: int) -> Tensor:
        ids, drafts = ends.ids.clamp(0, self.vocab - 1), list[Tensor]()
        for number in range(most):
            hidden = self.ahead.hidden(self.model, self.ahead.behind(ends, ids, number))
            logits = self.model.logits(hidden if number else hidden[1::2])[:, : self.vocab]
            drafts.append(ends.pick(logits, number + 1))
            ids = drafts[-1][:, None]
        return torch.stack(drafts, 1)


class HeadDrafter:
    """Drafts by a head on the states of the target. Each token is computed in the place of the one before it,
    whose states it goes with."""

    follows = True

    def __init__(
        self,
        model: DraftHead,
        backend: AttentionBackend,
        *,
        block_size: int,
        max_taped: int,
        kept: Tensor,
    ) -> None:
        self.model = model
        self.ahead = _Ahead(backend, block_size, max_taped)
        self.forget = self.ahead.forget
        self.kept = kept
        """[2, rows, hidden]: what it made of the last token of each row, for its logits, and the states for
        the next one"""

    def see(self, batch: Batch, told: Told) -> None:
        at = last_kept(batch, told.num_kept)
        shifted = batch.token_ids.roll(-1).clamp_(min=0).index_copy_(0, at, told.next_ids)
        first = replace(batch, token_ids=shifted, **_NOTHING)
        first.others = tuple(replace(group, attention=None) for group in batch.others)
        made = self.model(self.ahead.planned(first), self.model.states(told.states))
        for kept, each in zip(self.kept, made, strict=True):
            kept.index_copy_(0, batch.rows.long(), each[at])

    def catch_up(self, batch: Batch) -> None:
        raise AssertionError("it has seen all")

    def propose(self, ends: Ends, most: int) -> Tensor:
        out, states = self.kept[:, ends.rows.long()]
        drafts: list[Tensor] = []
        for number in range(most):
            drafts.append(self.model.names(ends.pick(self.model.logits(out), number + 1)))
            if number < most - 1:
                out, states = self.model(self.ahead.behind(ends, drafts[-1][:, None], number), states)
        return torch.stack(drafts, 1)


_NOTHING: dict[str, Any] = {
    "turns": None,
    "embeds": None,
    "reach": None,
    "before": None,
    "aux_hidden_states": (),
    "num_real": None,
    "room": None,
    "attention": None,
    "state": None,
    "others": (),
}
"""What a draft's batch does not have of the target's."""


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
    num_aux = 0 if facts.drafts is None else len(facts.drafts.aux_layers)
    states = num_tokens * (1 + num_aux) * target.hidden * DTYPE_BYTES[dtype]
    own = activation_bytes(facts, dtype, num_tokens=num_tokens, num_seqs=limits.max_num_seqs)
    return states + limits.max_num_seqs * target.vocab * 4 + own


def open_drafter(
    config: EngineConfig, model: Any, target: Any, backend: AttentionBackend, device: torch.device
) -> Drafter:
    """The drafter of a loaded draft; the target notes what it needs from now on."""
    assert config.draft is not None
    facts, asked = config.draft.facts, config.speculation
    is_eager = config.model.enforce_eager or (asked is not None and asked.enforce_eager)
    sizes = {"block_size": config.cache.block_size, "max_taped": 0 if is_eager else _MAX_TAPED}
    if facts.drafts is None:
        return ModelDrafter(model, backend, **sizes, vocab=min(facts.vocab, config.checkpoint.facts.vocab))
    model.adopt(target)
    if facts.drafts.aux_layers:
        target.tap(facts.drafts.aux_layers, config.scheduler.max_num_batched_tokens + _MORE_TAPPED, device)
    room = 2, config.scheduler.max_num_seqs + 1, facts.hidden
    kept = torch.zeros(room, dtype=getattr(torch, config.model.dtype), device=device)
    return HeadDrafter(model, backend, **sizes, kept=kept)

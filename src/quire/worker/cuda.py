"""A CUDA device: rows that live there, steps that nobody waits for, decodes as captured graphs."""

from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.attention.batch import Batch
from quire.capacity import (
    GRAPH_BYTES,
    MAX_DRAWS,
    ladder,
    longest_short,
    rows_at_once,
    short_bytes,
    short_shapes,
)
from quire.config.engine import EngineConfig
from quire.config.layout import cache_specs
from quire.config.speculation import SpecFacts
from quire.data.plan import Ints, Masks, Pending, StepPlan
from quire.kernels.triton.launch import compiling
from quire.kernels.triton.masks import apply_masks
from quire.sampling.rehearsal import rehearse
from quire.sampling.sampler import Sampled, Sampler
from quire.worker.device import (
    ONE_TOKEN,
    Computed,
    Model,
    NewTokens,
    Passed,
    Step,
    batch_of,
    blank_batch,
)
from quire.worker.drafter import Drafter
from quire.worker.draws import Draws
from quire.worker.fronts import Fronts
from quire.worker.graphs import IN_FLIGHT, Graph, Graphs, pinned, wide_shapes
from quire.worker.landing import Landing, Read
from quire.worker.memory import Needs
from quire.worker.rows import Rows, Wide
from quire.worker.seen import Seen, sent
from quire.worker.sheet import Page, asked_of, bytes_of, sizes_of, tensors
from quire.worker.speculation import Followed, Speculation, read, take_back

_EACH_ONE: Ints = np.empty(0, np.int32)
_CAPTURE_S = 30.0
_LONG_STEP = 4096
"""Tokens of the longest prompt that is run to have kernels compiled."""
_HALVINGS = 6
"""What adapters add to prompts is computed in other ways for shorter ones."""
_MIXED = [(1, 24), (8, 6), (32, 12), (1, 79), (1, 159), (1, 191), (64, 256)]
"""Decodes beside a prompt of so many tokens, likewise: few and many of them, short tiles and long ones."""


class Cuda:
    """Block tables (by group of layers) and last tokens are by row, on the device; the row behind all others
    is padding."""

    def __init__(
        self,
        model: Model,
        all_rows: Rows,
        sample: Callable[..., Tensor],
        device: torch.device,
        drafts: SpecFacts | None = None,
    ) -> None:
        max_rows = len(all_rows.num_tokens)
        self.num_stages = 1 if model.link is None else model.link.num_stages
        in_flight = max(IN_FLIGHT, self.num_stages + 1)
        self.model = model
        self.sample = sample
        """Of logits, what is asked of them, and who is confined"""
        self.device = device
        self.block_tables = torch.zeros(all_rows.block_tables.shape, dtype=torch.int32, device=device)
        self.max_len = all_rows.tokens.shape[1]
        self.last_tokens = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)
        self.speculation = None if drafts is None else Speculation(drafts, all_rows, device)
        query_lens = [] if self.speculation is None else self.speculation.query_lens
        self.axes = int(all_rows.turns is not None)
        """Positions of a token by which heads turn that its place does not tell."""
        vectors = None if model.encoder is None else model.encoder.room
        self.graphs = Graphs(self.block_tables, model.room, in_flight, query_lens, self.axes, vectors)
        self._pinned = cycle([_Pinned() for _ in range(in_flight)])
        room, kind = max_rows, torch.int64
        if self.speculation is not None:
            room, kind = 2 * max_rows * self._most_draws + 1, torch.int32
        is_cuda = device.type == "cuda"
        self._landings = cycle(
            [(pinned(room, dtype=kind), torch.cuda.Event() if is_cuda else None) for _ in range(in_flight)]
        )
        self._draws = Draws(max_rows, room, all_rows.sampling.vocab, device)
        self._in_passing: Tensor | None = None
        self._all_rows = all_rows
        self._fronts: Fronts | None = None
        """Where a model drafts."""

    def needs(self, config: EngineConfig, weights: int, sampler: Sampler | None, bound: int = 0) -> Needs:
        """Measured: the largest step is run, with all that rows may ask for, and the largest that will be
        captured."""
        limits, link = config.scheduler, self.model.link

        def ask_for_everything(done: Computed) -> None:
            if sampler is None:
                return
            given = done.hidden, done.logits, done.asked
            rehearse(sampler, self.model.head_of_one, *given, num_logprobs=config.model.max_logprobs)

        self._compile(config)
        activations = self._peak(limits.max_num_batched_tokens, limits.max_num_seqs, ask_for_everything)
        activations += 0 if link is None else link.num_bytes(limits.max_num_batched_tokens)
        largest = self._most_decodes(config)
        wide = [size * each for size, each in wide_shapes(largest, self.graphs.query_lens)]
        sizes = sorted([*ladder(largest), *wide]) if self._captures(config) else []
        short = self._short(config)
        most_of_all = [(n, n) for n in sizes[-1:]] + [(n, seqs) for seqs, n in short[-1:]]
        graphs = (kinds := len(self._kinds)) * len(sizes) * GRAPH_BYTES
        graphs += max((self._peak(*each) for each in most_of_all), default=0)
        # Each graph keeps its results; only what it needs on the way is shared with the larger ones.
        facts, item = config.checkpoint.facts, getattr(torch, config.model.dtype).itemsize
        more_draws = min(limits.max_num_seqs * self._most_draws, MAX_DRAWS) - limits.max_num_seqs
        activations += max(more_draws, 0) * facts.vocab * item
        kept = facts.vocab + facts.hidden if self.model.draws else 2 * facts.hidden
        graphs += (kinds * sum(sizes) - max(sizes, default=0)) * kept * item
        graphs += kinds * sum(short_bytes(config, *each) for each in short)
        if self._fronts is not None and sizes:
            graphs += len(wide) * GRAPH_BYTES + max(wide, default=0) * facts.vocab * 4
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        counts = 0 if sampler is None or sampler.counts is None else sampler.counts.num_bytes
        return Needs(weights, activations, graphs, counts, other=total - free - weights - counts - bound)

    @property
    def _kinds(self) -> tuple[bool, ...]:
        """Whether rows of a step have adapters: no, and where some may, yes."""
        return (False,) if self.model.adapters is None else (False, True)

    def _most_decodes(self, config: EngineConfig) -> int:
        """In one step: those of a pipeline are spread over as many as it has stages."""
        return -(-config.scheduler.max_num_seqs // self.num_stages)

    def _captures(self, config: EngineConfig) -> bool:
        return self.model.attention.capturable and not config.model.enforce_eager

    @property
    def _most_draws(self) -> int:
        """Of a row in one step."""
        return 1 if self.speculation is None else 1 + self.speculation.most

    def _short(self, config: EngineConfig) -> list[tuple[int, int]]:
        """Shapes of steps with prompts: none where layers must know on the host how long these are."""
        can = self.model.attention.captures_prompts and self.model.link is None
        facts = config.checkpoint.facts
        kinds = {part.kind for spec in cache_specs(facts) if spec is not None for part in spec.parts}
        can &= self._captures(config) and self.model.ep is None and kinds <= {"full", "window"}
        if not can or (facts.media is not None and facts.media.crossed):
            return []
        return short_shapes(self._most_decodes(config) * self._most_draws, longest_short(config))

    def _compile(self, config: EngineConfig) -> None:
        """Have the kernels of all steps compiled: those of sizes between powers of two are among them."""
        limits = config.scheduler
        *others, last = ladder(limits.max_num_seqs)
        sizes = [last, *(size for size in others if size & (size - 1) == 0)]
        longest = min(limits.max_num_batched_tokens, _LONG_STEP)
        mixed = [_decodes(min(count, last), min(prompt, self.max_len)) for count, prompt in _MIXED]
        with compiling():
            vocab, dtype = config.checkpoint.facts.vocab, getattr(torch, config.model.dtype)
            if self.model.draws:
                self._mask_blank(vocab, dtype)
                for size in {1, last}:
                    self._sample_blank(size, vocab, dtype)
                for size in {1, min(limits.max_num_seqs, rows_at_once(vocab))}:
                    self._sample_blank(size, vocab, torch.float32)
            halved = range(1 if self.model.adapters is None else _HALVINGS)
            prompts = [self._split(max(longest >> times, 1), 1) for times in halved]
            for lens in (*mixed, *map(_decodes, sizes), *prompts):
                self._forward_blank(lens)
            for size, each in wide_shapes(last, self.graphs.query_lens):
                self._forward_blank(np.full(size, each, np.int32), are_decodes=True)
            for size, tokens in self._short(config):
                self._forward_any(self._split(tokens, size))
            if self._fronts is not None:
                self._compile_fronts(self._fronts, last, longest)
        torch.cuda.synchronize()

    @torch.inference_mode()
    def _forward_blank(self, lens: Ints, are_decodes: bool = False) -> None:
        for adapters in self._kinds:
            self._forward(*self._blank(lens, adapters), are_decodes)

    @torch.inference_mode()
    def _forward_any(self, lens: Ints) -> None:
        for adapters in self._kinds:
            batch, sheet = self._blank(lens, adapters)
            for group in batch.groups:
                group.are_any, group.query_lens_host = True, np.full_like(lens, lens.sum())
            self._forward(batch, sheet, are_decodes=False)

    def _forward(self, batch: Batch, sheet: dict[str, Tensor], are_decodes: bool) -> None:
        for group in batch.groups:
            group.are_decodes = are_decodes
        given = None
        if self.speculation is not None:
            given = self.speculation.derive(batch, sheet, self.block_tables)
        hidden = self.model.hidden(batch)
        if self.model.draws:
            self.model.head(hidden[batch.logit_tokens])
        if self.speculation is not None and given is not None:
            self._without_adapters()
            for later in (None, self._draws.later):
                self.speculation.verify(given, hidden, sheet["positions"], sheet["seeds"], later)

    @torch.inference_mode()
    def _compile_fronts(self, fronts: Fronts, most_rows: int, longest: int) -> None:
        self._without_adapters()
        for size, each in wide_shapes(most_rows, self.graphs.query_lens):
            fronts.compile(size, each - 1)
        if not fronts.drafter.follows:
            for lens in (self._split(longest, 1), *(_decodes(0, 2 * size) for size in (8, 128))):
                fronts.drafter.catch_up(self._blank(lens)[0])

    @torch.inference_mode()
    def _sample_blank(self, size: int, vocab: int, dtype: torch.dtype) -> None:
        asked = asked_of(self._blank(_decodes(size))[1])
        logits = torch.zeros((size, vocab), dtype=dtype, device=self.device)
        for confined in (None, self._draws.in_passing(size)):
            self.sample(logits, asked, confined)

    @torch.inference_mode()
    def _mask_blank(self, vocab: int, dtype: torch.dtype) -> None:
        logits = torch.zeros((1, vocab), dtype=dtype, device=self.device)
        apply_masks(logits, torch.zeros((1, 1 + -(-vocab // 32)), dtype=torch.int32, device=self.device))

    @torch.inference_mode()
    def _peak(self, num_tokens: int, num_seqs: int, then: Callable[[Any], None] = lambda done: None) -> int:
        """Bytes that a step, and what is done with it, takes beyond what was there before."""
        blank_step = self._blank(self._split(num_tokens, num_seqs), self._kinds[-1])
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        then(self.compute(*blank_step))
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def _split(self, num_tokens: int, num_seqs: int) -> Ints:
        """So many tokens over so many sequences, or more if they were too long."""
        num_seqs = min(max(num_seqs, -(-num_tokens // self.max_len)), num_tokens)
        lens = np.full(num_seqs, num_tokens // num_seqs, np.int32)
        lens[: num_tokens % num_seqs] += 1
        return lens

    def _blank(self, lens: Ints, adapters: bool = False) -> tuple[Batch, dict[str, Tensor]]:
        """A step of sequences that read the first block and write nothing."""
        kind = {"drafts": self.speculation is not None, "adapters": adapters}
        batch, sheet = blank_batch(lens, self.block_tables, self.device, **kind, axes=self.axes)
        batch.before = self.model.room(len(batch.token_ids))
        return batch, sheet

    @torch.inference_mode()
    def warm_up(self, config: EngineConfig) -> None:
        if self._captures(config):
            # Devices that step together have the same graphs.
            seconds = _CAPTURE_S if self.model.ep is None else float("inf")
            largest = self._most_decodes(config)
            self._draws.open()
            self.graphs.capture(
                self.compute,
                largest,
                self._kinds,
                seconds=seconds,
                short=self._short(config),
                follow=self._follow,
                redraw=self._draw_by_masks,
            )
            asked = config.speculation
            if self._fronts is not None and not (asked is not None and asked.enforce_eager):
                self._capture_fronts(self._fronts, largest)

    @property
    def _follow(self) -> Callable[[Computed], Tensor] | None:
        """What is captured behind each step, since it is not part of it."""
        return None if self.speculation is None or self.speculation.behind is None else self._verify

    def _capture_fronts(self, fronts: Fronts, most_rows: int) -> None:
        self._without_adapters()
        shapes = [(size, each - 1) for size, each in wide_shapes(most_rows, self.graphs.query_lens)]
        fronts.capture(shapes, self.graphs.pool, seconds=_CAPTURE_S, in_flight=self.graphs.in_flight)

    def draft_by(self, drafter: Drafter, seen: Seen | None, max_tokens: int, *, by_chance: bool) -> None:
        assert self.speculation is not None
        given = self.speculation.known, self.block_tables, self._all_rows, self.sample
        self._fronts = Fronts(drafter, *given, seen, max_tokens, by_chance=by_chance)
        if drafter.follows:
            self.speculation.behind = Followed(drafter)

    def forget(self) -> None:
        self.graphs.forget()
        if self._fronts is not None:
            self._fronts.forget()
        self._in_passing = None

    def _without_adapters(self) -> None:
        """Drafts may come from the ends of the model."""
        if self.model.adapters is not None:
            self.model.adapters.use()

    def prepare(self, plan: StepPlan, all_rows: Rows) -> Step:
        places, ids = all_rows.joined_changes()
        reach = self.model.reach(plan, all_rows, self.device)
        self._draws.hold(len(plan.confined) > 0 or self._verifies_later(plan, all_rows))
        embeds = self.model.embeds(plan, all_rows, self.device)
        if self.speculation is not None:
            self.speculation.begin(plan, all_rows)
        if self._fronts is not None and self._in_front(self._fronts, plan, places, ids):
            places, ids = places[:0], ids[:0]
        adapts = self.model.adapts(plan, all_rows)
        is_wide = adapts and self.model.is_wide(plan, all_rows)
        graph = self.graphs.find(plan, adapters=adapts) if reach is None and not is_wide else None
        if graph is not None and not graph.sees and (embeds is not None or all_rows.num_axes(plan) == 3):
            graph = None
        if graph is not None:
            return self._replay(graph, plan, all_rows, places, ids, embeds)
        given = plan, all_rows, places, ids, embeds, reach, adapts
        return self._eager(*given) if len(plan.rows) else self._idle(plan)

    def _verifies_later(self, plan: StepPlan, all_rows: Rows) -> bool:
        """Whether what is sampled in passing would be held against drafts, and is not what rows ask for."""
        return self.speculation is not None and all_rows.sampling.special(plan.logit_rows) != 0

    def _in_front(self, fronts: Fronts, plan: StepPlan, places: Wide, ids: Ints) -> bool:
        """Have drafts made, if any are wanted. Whether the changes of the block tables are made, too."""
        fronts.begin(plan)
        if not fronts.wants(plan):
            fronts.skip(plan)
            return False
        if len(ids):
            self._set_blocks(sent(places, self.device), sent(ids, self.device))
        self._without_adapters()
        fronts(plan)
        return True

    def _replay(
        self,
        graph: Graph,
        plan: StepPlan,
        all_rows: Rows,
        places: Wide,
        ids: Ints,
        embeds: tuple[Tensor, Tensor] | None,
    ) -> Step:
        if len(ids) > graph.sizes.blocks:
            self._set_blocks(*(torch.from_numpy(part).to(self.device) for part in (places, ids)))
            places, ids = places[:0], ids[:0]
        graph.load(plan, all_rows, places, ids, embeds)
        count = len(plan.logit_rows)

        def run() -> Computed | Passed:
            done = graph.replay(count)
            if isinstance(done, Computed):
                self._in_passing = done.token_ids
            return done

        return self.model.step(run, None if graph.before is None else graph.before[:, :count])

    def _eager(
        self,
        plan: StepPlan,
        all_rows: Rows,
        places: Wide,
        ids: Ints,
        embeds: tuple[Tensor, Tensor] | None,
        reach: Tensor | None,
        adapts: bool,
    ) -> Step:
        kind = {"drafts": self.speculation is not None, "adapters": adapts}
        axes = all_rows.num_axes(plan)
        sizes = sizes_of(plan, len(ids), len(self.block_tables), **kind, axes=axes)
        memory = next(self._pinned).take(bytes_of(sizes))
        Page(memory, sizes).write(plan, all_rows, places, ids)
        sheet = tensors(memory.to(self.device, non_blocking=True), sizes)
        seq_lens = all_rows.num_computed[plan.rows] + plan.num_tokens
        batch = batch_of(sheet, self.block_tables, plan.num_tokens, seq_lens)
        batch.before, batch.embeds, batch.reach = self.model.room(plan.total_tokens), embeds, reach
        batch.is_wide = adapts and self.model.is_wide(plan, all_rows)
        self._make_room(batch, plan)
        return self.model.step(lambda: self.compute(batch, sheet), batch.before)

    def _idle(self, plan: StepPlan) -> Step:
        """One token that nobody asked for."""
        batch, sheet = self._blank(ONE_TOKEN)
        self._make_room(batch, plan)
        return self.model.step(lambda: self.compute(batch, sheet), batch.before)

    def _make_room(self, batch: Batch, plan: StepPlan) -> None:
        """As much as those have who replay a graph."""
        if plan.counts:
            batch.num_real, batch.room = plan.total_tokens, self.graphs.size_for(max(plan.counts))

    def compute(self, batch: Batch, sheet: dict[str, Tensor]) -> Computed | Passed:
        """All that a step does on the device, inside a captured graph and outside."""
        self._set_blocks(sheet["block_places"], sheet["block_ids"])
        given = None
        if self.speculation is not None:
            given = self.speculation.derive(batch, sheet, self.block_tables)
            batch.token_ids = sheet["token_ids"]
        else:
            sources = sheet["sources"]
            batch.token_ids = torch.where(sources >= 0, self.last_tokens[sources], sheet["token_ids"])
        hidden = self.model.hidden(batch)
        if not self.model.draws:
            passed: Passed = hidden
            return passed
        # Places of a captured step that are padding lie between others, and their draws behind all others.
        each = len(batch.logit_tokens) == len(hidden) and not (given and batch.max_query_len > 1)
        wanted = hidden if each else hidden[batch.logit_tokens]
        logits, asked = self.model.head(wanted), asked_of(sheet)
        token_ids = self._in_passing = self.sample(logits, asked, self._draws.in_passing(len(logits)))
        found = None
        if given is None:
            self.last_tokens.index_copy_(0, sheet["logit_rows"], token_ids)
        elif self.speculation is not None and self.speculation.behind is None:
            found = self.speculation.verify(given, hidden, token_ids, asked.seeds, self._draws.later)
        more = given, batch.taps, None, found
        return Computed(hidden, logits, token_ids, asked, sheet["logit_rows"], *more)

    def _draw_by_masks(self, done: Computed) -> Tensor:
        count = len(done.logits)
        token_ids = self.sample(done.logits, done.asked, self._draws.confined(count))
        if done.given is None and done.rows is not None:
            self.last_tokens.index_copy_(0, done.rows, token_ids)
        return token_ids

    def redraw(self, done: Computed, masks: Masks, places: Ints) -> Tensor | None:
        if done.redraw is None or not self._draws.send(masks, places):
            return None
        token_ids = self._in_passing = done.redraw()[: len(done.logits)]
        self._draws.applied()
        return token_ids

    def _set_blocks(self, places: Tensor, ids: Tensor) -> None:
        self.block_tables.view(-1).index_copy_(0, places, ids)

    def land(self, plan: StepPlan, done: Computed, sampled: Sampled, all_rows: Rows) -> Pending:
        new = NewTokens.of(plan)
        if self.speculation is not None and len(new.rows):
            num_seqs = len(done.given.step.rows)
            is_in_passing = sampled.token_ids is done.token_ids
            if done.found is not None and is_in_passing:
                found = done.found
            elif done.follow is not None and is_in_passing:
                found = done.follow()
            else:
                found = self._verify(done._replace(token_ids=sampled.token_ids))
            if sampled.counts is not None and len(plan.num_drafts):
                take_back(sampled.counts, plan, all_rows.sampling, sampled.token_ids, found)
            return self._landing(found, sampled, new, all_rows, lambda found: read(found, num_seqs, plan))
        if len(new.rows) and sampled.token_ids is not self._in_passing:
            # Some row asked for more than a plain sample.
            assert done.rows is not None
            self.last_tokens.index_copy_(0, done.rows, sampled.token_ids)
        return self._landing(sampled.token_ids, sampled, new, all_rows, _one_each)

    def _verify(self, done: Computed) -> Tensor:
        assert self.speculation is not None and done.token_ids is not None and done.asked is not None
        self._without_adapters()
        return self.speculation.verify(done.given, done.hidden, done.token_ids, done.asked.seeds)

    def _landing(
        self, found: Tensor, sampled: Sampled, new: NewTokens, all_rows: Rows, read: Read
    ) -> "Landing":
        room, landed = next(self._landings)
        landing = room[: len(found)]
        landing.copy_(found, non_blocking=True)
        if landed is not None:
            landed.record()
        return Landing(landed, landing, sampled, new, all_rows, read)


class _Pinned:
    """Host memory that the device reads by itself; grows as needed."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        if len(self._memory) < size:
            self._memory = pinned(2 * size)
        return self._memory[:size]


def _one_each(found: Ints) -> tuple[Ints, Ints, Ints]:
    return found, _EACH_ONE, _EACH_ONE


def _decodes(count: int, *prompts: int) -> Ints:
    return np.array([*prompts, *[1] * count], np.int32)

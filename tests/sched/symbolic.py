"""A worker without a model: its cache holds a fingerprint of the prefix for every token and KV cache group.

Computing a token reads the fingerprints of all tokens it attends to through the block tables. A wrong block,
a stale prefix, a missing token or a block freed too early is detected at once. The next token is a function
of the fingerprint, so outputs depend on nothing else.
"""

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from quire.checkpoint.layout import CacheLayout, CacheSpec, has_ssm_state, layout
from quire.core.engine_core import EngineCore
from quire.data.multimodal import Media
from quire.data.params import SamplingParams
from quire.data.request import Request
from quire.data.step_plan import Admission, Masks, RowLogprobs, StepOutput, StepPlan, StepResult
from quire.errors import EngineDead
from quire.executor import Pending
from quire.sched.kv_manager import KVManager
from quire.sched.scheduler import Scheduler
from quire.sched.spec import Drafting
from quire.sched.state_cache import StateCache
from quire.sched.targets import Targets

FULL, LATENT = CacheSpec("full", elements=8), CacheSpec("latent", planes=1, elements=16)
NARROW, WIDE = (CacheSpec("window", elements=8, window=window) for window in (6, 13))
STATE = CacheSpec("state", bytes_per_row=64)
LAYOUTS: dict[str, CacheLayout] = {
    name: layout(specs, 4096)
    for name, specs in {
        "full": [FULL] * 2,
        "window": [NARROW] * 2,
        "full and window": [NARROW, FULL] * 2,
        "more windows": [NARROW, NARROW, FULL],
        "two windows": [FULL, NARROW, WIDE],
        "latent": [LATENT] * 3,
        "state": [STATE, FULL],
        "state and window": [STATE, NARROW],
        "states alone": [STATE] * 2,
    }.items()
}
VOCAB = 97
START = 0x9E3779B97F4A7C15


def extend(fingerprint: int, token_id: int) -> int:
    return ((fingerprint ^ (token_id + 1)) * 0x100000001B3 + 0x51ED270B) % 2**64


def start_of(digest: bytes) -> int:
    """Return the initial fingerprint, which depends on the adapter."""
    return START ^ int.from_bytes(digest[:8], "little")


def fingerprint_of(token_ids: list[int], digest: bytes = b"") -> int:
    fingerprint = start_of(digest)
    for token_id in token_ids:
        fingerprint = extend(fingerprint, token_id)
    return fingerprint


def expand_media(tokens: list[int], media: Media | None) -> list[int]:
    """Return the tokens with placeholder tokens replaced by hashes of their media items."""
    expanded = list(tokens)
    for item in media.items if media else ():
        places = [at for first, count in item.places() for at in range(first, first + count)]
        for number, place in enumerate(places):
            expanded[place] = int.from_bytes(
                hashlib.sha256(item.key + bytes([number])).digest()[:6], "little"
            )
    if media and media.num_bidirectional:  # bidirectional prompt: every token depends on the whole prompt
        expanded[0] = int.from_bytes(media.bidirectional_key[:6], "little")
    return expanded


def continuation(prompt: list[int], count: int, digest: bytes = b"") -> list[int]:
    """Return the symbolic model's output for a prompt, computed without any cache."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(fingerprint_of(tokens, digest) % VOCAB)
    return tokens[len(prompt) :]


def logprobs_of(token_ids: list[int], position: int) -> RowLogprobs:
    """Return the symbolic model's logprobs of the token at a position, computed from its prefix."""
    return RowLogprobs([token_ids[position]], [fingerprint_of(token_ids[:position]) % 1009 / 7], 1)


@dataclass
class Row:
    number: int
    tokens: list[int]
    num_computed: int
    blocks: list[list[int]]
    """Block ids by KV cache group."""
    prompt_len: int
    params: SamplingParams
    slot: int = -1
    digest: bytes = b""
    """Digest of its adapter."""
    prints: list[int] = field(default_factory=list)
    """Fingerprints of the first tokens, computed on demand."""
    media: Media | None = None

    @classmethod
    def of(cls, new: Admission, digest: bytes = b"") -> "Row":
        blocks, adapter = [list(ids) for ids in new.block_ids], (new.adapter, digest)
        tokens = expand_media(new.token_ids, new.media)
        row = cls(new.row, tokens, new.num_computed, blocks, new.prompt_len, new.params, *adapter)
        row.media = new.media
        return row

    def fingerprint_at(self, position: int) -> int:
        while len(self.prints) <= position:
            before = self.prints[-1] if self.prints else start_of(self.digest)
            self.prints.append(extend(before, self.tokens[len(self.prints)]))
        return self.prints[position]


def guess(tokens: list[int], count: int) -> list[int]:
    """Return the correct continuation with every fifth token wrong."""
    tokens_ahead = continuation(tokens, count)
    return [token if (len(tokens) + at) % 5 else (token + 1) % VOCAB for at, token in enumerate(tokens_ahead)]


class Guesses:
    """A draft proposer that uses `guess`."""

    is_sure = False

    def __init__(self) -> None:
        self.texts: dict[int, list[int]] = {}

    def admit(self, row: int, tokens: Any, salt: str | None = None) -> None:
        self.texts[row] = tokens.tolist()

    def extend(self, row: int, tokens: Any) -> None:
        self.texts[row] += tokens.tolist()

    def release(self, row: int, tokens: Any) -> None:
        assert tokens[: len(self.texts[row])].tolist() == self.texts.pop(row)

    def propose(self, row: int, max_drafts: int) -> Any:
        text = self.texts[row]
        return np.array(guess(text, max_drafts)[: max_drafts - len(text) % 2], np.int32)


class FixedDraftLength:
    """Draft policy with a fixed number of drafts; every third row gets none."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.num_drafts = self.num_held = 0

    def admit(self, row: int) -> None:
        pass

    def lengths(self, rows: Any, available: Any, budget: int) -> Any:
        wanted = np.where(rows % 3 == 2, 0, np.minimum(available, self.count)).astype(np.int32)
        return np.clip(budget - (np.cumsum(wanted) - wanted), 0, wanted)

    def learn(self, rows: Any, num_drafts: Any, num_held: Any) -> None:
        assert (num_held <= num_drafts).all() and (num_held >= 0).all()
        self.num_drafts += int(num_drafts.sum())
        self.num_held += int(num_held.sum())

    def record_time(self, num_tokens: int, num_rows: int, num_accepted: int, seconds: float) -> None:
        assert num_tokens >= num_rows + num_accepted and seconds >= 0


MOST_DRAFTS = 5
DRAFTING: dict[str, Callable[[], Drafting]] = {
    "host": lambda: Drafting(FixedDraftLength(3), Guesses(), max_drafts=MOST_DRAFTS),
    "worker": lambda: Drafting(FixedDraftLength(2), None, max_drafts=MOST_DRAFTS),
}


@dataclass
class SymbolicWorker:
    num_blocks: int
    block_size: int
    layout: CacheLayout = LAYOUTS["full"]
    rows: dict[int, Row] = field(default_factory=dict)
    num_computed: int = 0
    slots: dict[int, bytes] = field(default_factory=dict)
    """Digest of the adapter in each slot."""
    host: dict[str, bytes] = field(default_factory=dict)
    """Digests of the loaded adapters by name."""

    def __post_init__(self) -> None:
        self.cache: list[tuple[int, int] | None] = [None] * (self.num_blocks * self.block_size)
        """KV cache group and fingerprint by slot."""
        self.states: dict[tuple[int, int], int] = {}
        """Fingerprint of the SSM states by row and number."""
        self.checkpoints: dict[int, int] = {}
        """Fingerprint of the SSM state by slot."""
        self.vectors: dict[bytes, int] = {}
        """Number of encoder vectors by item key."""
        self.num_encoded = 0
        """Number of encoded items."""

    def run(self, plan: StepPlan) -> StepResult:
        for number in plan.released:
            del self.rows[number]
        for put in plan.adapters:
            self.slots[put.slot] = self.host[put.adapter.lora_name]
        for new in plan.admitted:
            assert new.row not in self.rows, f"row {new.row} given to two requests"
            self.rows[new.row] = Row.of(new, b"" if new.adapter < 0 else self.slots[new.adapter])
        self._restore(plan)
        self._encode(plan)
        for group, ids in enumerate(plan.block_ids.tolist()):
            for number, block in zip(plan.block_rows.tolist(), ids, strict=True):
                self.rows[number].blocks[group].append(block)
        assert len(set(plan.rows.tolist())) == len(plan.rows), "a row twice in one plan"
        result = StepResult(token_ids=np.empty(0, np.int32), logprobs={}, prompt_logprobs={})
        sampled: list[list[int]] = []
        drafts = self._drafts(plan)
        for number, count, samples in zip(plan.rows.tolist(), plan.num_tokens, plan.samples, strict=True):
            row, guessed = self.rows[number], drafts.get(number, [])
            assert row.slot < 0 or self.slots[row.slot] == row.digest, f"another adapter in the slot of {row}"
            chunk = range(row.num_computed + 1, min(row.num_computed + int(count) + 1, row.prompt_len))
            length = len(row.tokens)
            row.tokens += guessed
            self._compute(row, int(count))
            assert samples == (row.num_computed == len(row.tokens))
            if samples:
                sampled.append(self._sample_tokens(row, length, guessed))
                if row.params.logprobs is not None:
                    places = range(length, len(row.tokens))
                    result.logprobs[number] = [logprobs_of(row.tokens, at) for at in places]
            if row.params.prompt_logprobs is not None and chunk:
                result.prompt_logprobs[number] = [logprobs_of(row.tokens, at) for at in chunk]
        for number, slot, num_tokens in plan.saves.T.tolist():
            assert number in plan.rows and slot, "no row computes this checkpoint"
            assert num_tokens == self.rows[number].num_computed, "the checkpoint is of another length"
            self.checkpoints[slot] = self.states[_state_after(number, num_tokens)]
        result.token_ids = np.array([token for new in sampled for token in new], np.int32)
        if len(plan.num_drafts):
            result.counts = np.array([len(new) for new in sampled], np.int32)
        return result

    def _restore(self, plan: StepPlan) -> None:
        for new in plan.admitted:
            if new.state:
                self.states[_state_after(new.row, new.num_computed)] = self.checkpoints[new.state]

    def _encode(self, plan: StepPlan) -> None:
        for key in plan.evicted_media:
            self.vectors.pop(key, None)
        for item in plan.encodes:
            assert item.arrays is not None, "nothing to encode"
            assert item.key not in self.vectors, "encoded twice"
            self.vectors[item.key] = item.num_vectors
            self.num_encoded += 1

    def _drafts(self, plan: StepPlan) -> dict[int, list[int]]:
        """Return the plan's drafts by row, or correct and wrong guesses if the plan has only counts."""
        if not len(plan.num_drafts):
            return {}
        remaining, drafts = plan.drafts.tolist(), {}
        for number, count in zip(plan.rows.tolist(), plan.num_drafts.tolist(), strict=True):
            if count and len(plan.drafts):
                drafts[number], remaining = remaining[:count], remaining[count:]
            elif count:
                drafts[number] = guess(self.rows[number].tokens, count)
        assert not remaining
        return drafts

    def _sample_tokens(self, row: Row, length: int, guessed: list[int]) -> list[int]:
        """Return the tokens sampled after the first `length` tokens, accepting drafts until the first wrong
        one.
        """
        new = [row.fingerprint_at(length - 1) % VOCAB]
        while len(new) <= len(guessed) and guessed[len(new) - 1] == new[-1]:
            new.append(row.fingerprint_at(length - 1 + len(new)) % VOCAB)
        row.tokens[length:] = new
        row.num_computed = len(row.tokens) - 1
        del row.prints[row.num_computed :]
        return new

    def _slot(self, row: Row, group: int, position: int) -> int:
        block = row.blocks[group][position // self.block_size]
        assert block != 0, "block 0 was allocated, or a freed block was read"
        return block * self.block_size + position % self.block_size

    def _compute(self, row: Row, count: int) -> int:
        start, end = row.num_computed, row.num_computed + count
        for item in row.media.items if row.media else ():
            for first, length in item.places():
                if first < end and first + length > start:
                    assert self.vectors[item.key] == item.num_vectors
        for group, window in enumerate(self.layout.windows):
            if not self.layout.groups[group].layers:
                continue
            for position in range(0 if window is None else max(start - window + 1, 0), start):
                cached = self.cache[self._slot(row, group, position)]
                assert cached == (group, row.fingerprint_at(position)), (
                    f"the cache does not hold {position} of {row}"
                )
            for position in range(start, end):
                self.cache[self._slot(row, group, position)] = group, row.fingerprint_at(position)
        if has_ssm_state(self.layout.specs):
            state = self.states.get(_state_after(row.number, start))
            assert not start or state == row.fingerprint_at(start - 1), f"not the state of {row}"
            for position in range(start if count <= 1 + MOST_DRAFTS else end - 1, end):
                self.states[_state_after(row.number, position + 1)] = row.fingerprint_at(position)
        row.num_computed = end
        self.num_computed += count
        return row.fingerprint_at(end - 1)


def _state_after(row: int, num_tokens: int) -> tuple[int, int]:
    """Return the state of a row after its first `num_tokens`."""
    return row, num_tokens % (1 + MOST_DRAFTS)


class BreakableWorker(SymbolicWorker):
    """A worker that fails in the plans that `breaks` selects, before or after it writes."""

    writes_first = False

    def breaks(self, plan: StepPlan) -> bool:
        raise NotImplementedError

    def run(self, plan: StepPlan) -> StepResult:
        for row in plan.released:
            self.rows.pop(row, None)
        for new in plan.admitted:
            self.rows[new.row] = Row.of(new)
        self._restore(plan)
        quiet = StepPlan(**{name: getattr(plan, name) for name in plan.__struct_fields__})
        quiet.released, quiet.admitted = [], []
        breaks = self.breaks(plan)
        if breaks and not self.writes_first:
            raise RuntimeError("broken")
        result = super().run(quiet)
        if breaks:
            raise RuntimeError("broken")
        return result


W = TypeVar("W", bound=SymbolicWorker)


def max_chunk(limits: dict[str, Any]) -> int:
    bounds = limits["max_num_batched_tokens"], limits.get("long_prefill_token_threshold", 0)
    return min(bound for bound in bounds if bound)


def widened(limits: dict[str, Any], longest: int) -> dict[str, Any]:
    """Return the limits with enough blocks for one request of `longest` tokens plus the original number."""
    groups, sizes = LAYOUTS[limits["layout"]], {"block_size": 4, "max_chunk": max_chunk(limits)}
    least = groups.blocks_of(longest, **sizes) - LAYOUTS["full"].blocks_of(longest, **sizes)
    return limits | {"num_blocks": limits["num_blocks"] + least}


class Done:
    """A step that finished when it was submitted."""

    def __init__(self, result: StepResult) -> None:
        self.result = result

    def ready(self, timeout_s: float) -> bool:
        return True

    def wait(self) -> StepResult:
        return self.result


class Late:
    """A step that runs only when its result, or that of a later step, is waited for."""

    def __init__(self, device: "Device", plan: StepPlan) -> None:
        self.device, self.plan = device, plan
        self.outcome: StepResult | Exception | None = None
        self.is_behind_a_failure = False

    def ready(self, timeout_s: float) -> bool:
        return True

    def wait(self) -> StepResult:
        while self.outcome is None:
            self.device.run_next()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class Device:
    """An executor over a symbolic worker.

    A lazy one computes as late as it can, to show that the scheduler does not modify a submitted plan.
    """

    def __init__(self, engine: "Engine", *, lazy: bool) -> None:
        self.engine, self.lazy = engine, lazy
        self.line: deque[Late] = deque()
        self.refused = False

    @property
    def is_quiet(self) -> bool:
        """Whether no step is left to run and the core was notified of every failure."""
        return not self.line and not self.refused

    def start(self) -> Any:
        raise AssertionError("never called")

    def sample_tokens(self, masks: Masks) -> None:
        masks.wait_for_bits()
        self.engine.masks.append(masks)

    def watch(self) -> None:
        pass

    def close(self) -> None:
        pass

    def submit(self, plan: StepPlan) -> Pending:
        try:
            self.engine.check(plan)
        except AssertionError as error:
            raise EngineDead(str(error)) from error
        self.engine.plans.append(plan)
        if not self.lazy:
            return self._run_now(plan)
        self.line.append(Late(self, plan))
        return self.line[-1]

    def _run_now(self, plan: StepPlan) -> Pending:
        if self.refused:
            self.refused = False
            raise EngineDead("a step behind one that was refused")
        try:
            return Done(self._run(plan))
        except RuntimeError:
            self.refused = True
            raise

    def run_next(self) -> None:
        step = self.line.popleft()
        try:
            step.outcome = self._run(step.plan)
        except EngineDead as error:
            step.outcome = error
            if step.is_behind_a_failure:  # the result of a step after a failed one is discarded
                step.outcome = RuntimeError(str(error))
        except Exception as error:
            step.outcome = error
            for later in self.line:
                later.is_behind_a_failure = True

    def _run(self, plan: StepPlan) -> StepResult:
        """Run a plan; a wrong plan ends the test instead of a request."""
        try:
            return self.engine.worker.run(plan)
        except (AssertionError, KeyError) as error:
            raise EngineDead(f"{error!r} in {plan}") from error


class Engine:
    """Core, scheduler and symbolic worker, stepped by hand; the invariants are checked in every step."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        share: bool = True,
        depth: int = 1,
        lazy: bool = False,
        layout: str = "full",
        drafts: str | None = None,
        num_slots: int = 4,
        unit: int | None = None,
        interval: int | None = 0,
        **limits: Any,
    ) -> None:
        has_states = has_ssm_state(LAYOUTS[layout].specs)
        self.drafts = None if limits.get("num_stages", 1) > 1 else drafts
        if "targets" in limits:
            limits["targets"] = Targets() if limits["targets"] is True else limits["targets"] or None
        limits["drafting"] = DRAFTING[self.drafts]() if self.drafts else None
        limits = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 4096} | limits
        states = None
        share = share and not (has_states and limits.get("chunked_prefill") is False)
        if has_states and share:
            states = StateCache(
                num_slots=num_slots,
                max_rows=limits["max_num_seqs"],
                block_size=block_size,
                unit=unit or block_size,
                interval=interval,
                whole_items="media" in limits and limits["media"].undivided_items,
            )
        self.kv = KVManager(
            num_blocks=num_blocks,
            block_size=block_size,
            max_rows=limits["max_num_seqs"],
            share_prefixes=share,
            windows=LAYOUTS[layout].windows,
            max_chunk=max_chunk(limits),
            states=states,
            has_pages=states is None or any(group.layers for group in LAYOUTS[layout].groups),
        )
        self.open_tiers()
        self.scheduler = Scheduler(kv=self.kv, **limits)
        self.device = Device(self, lazy=lazy)
        self.core = EngineCore(self.device, self.scheduler, depth=depth)
        self.worker = SymbolicWorker(num_blocks, block_size, LAYOUTS[layout])
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.plans: list[StepPlan] = []
        self.masks: list[Masks] = []
        self.steps: list[StepOutput] = []
        self.seen: list[Request] = []

    def open_tiers(self) -> None:
        """Add lower tiers to the cache."""

    def use(self, kind: type[W]) -> W:
        """Replace the worker."""
        worker = self.worker = kind(self.worker.num_blocks, self.worker.block_size, self.worker.layout)
        return worker

    def add(self, id: str, prompt: list[int], count: int = 4, **fields: Any) -> Request:
        """Add a request; `output` holds the tokens that a previous core has generated for it."""
        params = fields.pop("params", None) or SamplingParams(max_tokens=count)
        output: list[int] = fields.pop("output", [])
        request = Request(
            id=id,
            tokens=[*prompt, *output],
            params=params,
            prompt_len=len(prompt),
            limit=len(prompt) + count,
            seed=0,
            **fields,
        )
        self.core.add(request)
        self.seen.append(request)
        self.outputs[id] = list(output)
        return request

    def step(self, timeout_s: float | None = None) -> StepOutput:
        output = self.core.step(timeout_s) or StepOutput([], [])
        if not len(self.core.step_queue):
            self.device.refused = False  # the core was notified of the failure
        for id, new in output.by_request():
            assert id not in self.reasons, f"a token for {id}, which has ended"
            self.outputs[id] += new
        self.reasons |= {id: finish.reason for id, finish in output.finished.items()}
        self.steps.append(output)
        if self.device.is_quiet:
            self.check_index()
        return output

    def abort(self, id: str) -> bool:
        finished = self.core.abort([id])
        self.reasons |= {id: finish.reason for id, finish in finished.items()}
        return id in finished

    def run(self, max_steps: int = 5000) -> None:
        for _ in range(max_steps):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError(f"requests still unfinished after {max_steps} steps")

    def check(self, plan: StepPlan) -> None:
        """Check the invariants of every step."""
        scheduler, kv = self.scheduler, self.kv
        assert len(plan.rows) and plan.num_tokens.all(), "a step without work"
        assert plan.total_tokens <= scheduler.limits.max_tokens
        assert len(scheduler.running) <= scheduler.limits.max_rows
        assert len(scheduler.in_flight) <= self.core.step_queue.depth
        users = self.waiting_users()
        counted = plan.num_tokens - plan.num_drafts if len(plan.num_drafts) else plan.num_tokens
        chunks = dict(zip(plan.rows.tolist(), counted.tolist(), strict=True))
        for row in scheduler.running.order.tolist():
            for tables, window in zip(kv.tables, kv.windows, strict=True):
                self.check_table(row, tables[row], window, chunks.get(row, 0))
                for block in tables[row]:
                    if block is not None:
                        users[block.id] = users.get(block.id, 0) + 1
            self.check_row(row, row in plan.rows)
        for block in kv.pool.blocks[1:]:
            assert block.num_users == users.get(block.id, 0), f"{block} has {users.get(block.id, 0)} users"
        assert kv.pool.num_free == kv.pool.num_usable - len(users)
        self.check_slots()

    def waiting_users(self) -> dict[int, int]:
        """Return the number of users without a row of each block id."""
        return {}

    def check_slots(self) -> None:
        """Check that no slot of a checkpoint is held between two plans."""
        if self.kv.states is not None:
            pool = self.kv.states.pool
            assert pool.num_free == pool.num_usable
            assert all(block.num_users == 0 for block in pool.blocks[1:])

    def check_table(self, row: int, table: list[Any], window: int | None, chunk: int) -> None:
        """Check that each group holds the blocks of its chunk, and with a sliding window no others."""
        running = self.scheduler.running
        size, reach = self.kv.block_size, int(running.num_computed[row])
        assert len(table) * size >= reach + running.num_drafts[row], "tokens without a block"
        if self.drafts is None:
            assert len(table) * size - reach < size, "more than one partly filled block"
        held = [place for place, block in enumerate(table) if block is not None]
        first_seen = 0 if window is None else max(reach - chunk - window + 1, 0)
        if not self.kv.has_pages:  # the blocks of a restored prefix may be gone
            return
        assert held == list(range(first_seen // size, len(table))), "more or fewer blocks than the window"
        if window is not None:
            assert len(held) * size < window - 1 + chunk + 2 * size + (16 if self.drafts else 0)

    def check_row(self, row: int, planned: bool) -> None:
        running = self.scheduler.running
        num_tokens, num_known = int(running.num_tokens[row]), int(running.num_known[row])
        assert num_tokens + running.num_drafts[row] <= running.limit[row], "a token behind the limit"
        assert num_tokens - num_known <= self.core.step_queue.depth
        if planned and running.needs_value[row]:
            assert num_tokens - num_known <= 1, "sampled before the previous token was known"

    def check_index(self) -> None:
        """Check that each indexed block holds the content of its key. Call it only when no step is left to
        run.
        """
        running, kv, worker = self.scheduler.running, self.kv, self.worker
        for request in self.seen:
            tokens = request.tokens
            if request.row >= 0:
                tokens = running.tokens[request.row, : running.num_known[request.row]].tolist()
            prints = [start_of(request.adapter_digest)]
            for token_id in expand_media(tokens, request.media):
                prints.append(extend(prints[-1], token_id))
            for n, key in enumerate(request.block_keys):
                first = n * kv.block_size
                slot = kv.pool.index.get(key + b"state")
                if slot is not None:
                    assert worker.checkpoints[slot.id] == prints[first + kv.block_size], f"{slot} holds a lie"
                for group, mark in enumerate(kv.marks):
                    block = kv.pool.find(key + mark)
                    if block is not None and worker.layout.groups[group].layers:
                        written = worker.cache[block.id * kv.block_size : (block.id + 1) * kv.block_size]
                        true = [(group, one) for one in prints[first + 1 : first + 1 + kv.block_size]]
                        assert written == true, f"{block} holds a lie"

    def check_empty(self) -> None:
        """Check that no request, block or row is left."""
        assert not self.core.has_work and not self.scheduler.in_flight
        assert self.kv.pool.num_free == self.kv.pool.num_usable, "blocks leaked"
        assert all(block.num_users == 0 for block in self.kv.pool.blocks[1:])
        assert all(not request for request in self.scheduler.running.requests)
        self.check_slots()
        assert self.kv.states is None or (self.kv.states.next == self.kv.states.next.max()).all()
        media = self.scheduler.media
        assert not media.rows and not media.num_held and not len(media.arrays), "vectors leaked"
        self.check_index()

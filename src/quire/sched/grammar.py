"""Structured outputs: the requests constrained by a grammar, their state, and the masks of allowed tokens."""

from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from itertools import cycle
from mmap import mmap
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.data.async_value import AsyncValue
from quire.data.params import StructuredOutputsParams
from quire.data.request import Request
from quire.data.step_plan import Ints, Masks, StepPlan, Verdict
from quire.logs import get_logger, printable
from quire.sched.grammar_state import GrammarMatcher, GrammarState, grammar_state_of
from quire.sched.in_flight import StepInFlight
from quire.sched.mask_thread import MaskThread
from quire.sched.running import RowIds, Running
from quire.sched.step_tokens import StepTokens

log = get_logger(__name__)

Bits = NDArray[np.uint32]
_MAX_INLINE_MASKS = 4
"""Maximum number of masks that are filled without the mask thread: filling so few takes less time than
starting the thread."""
_NUM_BUFFERS = 3
"""Number of mask buffers: two steps are in flight, and each may read its buffer until it is over."""


class GrammarCompiler(Protocol):
    """Compiles grammars and computes the tokens that they allow."""

    def begin(self, params: StructuredOutputsParams) -> Future[Any]:
        """Start to compile a grammar in the background; the future returns its matcher."""

    @property
    def num_words(self) -> int:
        """Return the width of a mask in 32-bit words, once there is a matcher."""

    def fill(self, matchers: Sequence[tuple[Any, int]], bits: Bits) -> None:
        """Fill masks: for each pair of a matcher and an index, set the bits of the allowed next tokens in the
        row of `bits` with this index."""

    def fill_remembered(self, matchers: Sequence[tuple[Any, int]], bits: Bits) -> list[tuple[Any, int]]:
        """Fill the masks that are remembered from earlier steps, which takes little time. Return the pairs
        of the others, which `fill` has to compute."""

    def advance(self, moves: Sequence[tuple[Any, int]]) -> list[Verdict]:
        """Advance each matcher by the token id paired with it; return a verdict for each."""

    def forced_tokens(self, matcher: Any) -> Sequence[int]:
        """Return the tokens that the grammar forces after a sequence: each is the only one that is allowed
        after those before it. Empty: the next token is not forced."""

    @property
    def fills_in_thread(self) -> bool:
        """Whether masks are filled in a thread, because CPU cores are free while the layers run."""


class _MaskJob(NamedTuple):
    """The grammar masks of a step that are still to be filled, and the matchers that fill them."""

    masks: Masks
    matched: list[tuple[GrammarMatcher, int]]
    """Matchers and the mask rows that they fill."""
    extra_tokens: list[tuple[int, int]]
    """Token ids allowed in addition to a matcher's (or without one), each with its mask row."""

    def fill(self, grammars: GrammarCompiler) -> None:
        grammars.fill(self.matched, self.masks.bits)
        self.add()

    def add(self) -> None:
        """Set the bits of the tokens in `extra_tokens`, which are allowed in addition to those of the
        matchers."""
        for token_id, at in self.extra_tokens:
            self.masks.bits[at, token_id // 32] |= np.uint32(1 << token_id % 32)


def _fill(grammars: GrammarCompiler, job: _MaskJob, done: AsyncValue) -> None:
    """Fill the masks of a job and signal `done` at the end, even after an error."""
    try:
        job.fill(grammars)
    finally:
        done.arrive()


class Constraints:
    """The requests constrained by a grammar or a reasoning budget, with their states and masks. A request
    waits until its grammar is compiled; other requests overtake it."""

    def __init__(self, grammars: GrammarCompiler | None) -> None:
        self._grammars = grammars
        self.constrains_reasoning = False
        """Whether grammars begin with the first token of an output, not after its reasoning."""
        self.needs_recheck = False
        self._compiling: dict[str, Future[GrammarMatcher]] = {}
        self._waiting: dict[str, Request] = {}
        """Requests with a grammar that is being compiled."""
        self._states_by_id: dict[str, GrammarState] = {}
        """Grammar states by request id. They advance by the tokens with known values, whether their request
        has a row or not."""
        self._matchers_key, self._matchers = b"", list[GrammarMatcher]()
        """Cached result of `_grammar_matchers`: the matchers, and as its key the rows with their admission
        numbers."""
        self._buffers = cycle([_MaskBuffer() for _ in range(_NUM_BUFFERS)])
        self._awaiting: deque[StepInFlight] = deque()
        """Steps that still need masks, oldest first."""
        self._job: _MaskJob | None = None
        """The masks of the oldest step once their filling has begun; None before."""
        self._is_thread_running = False
        """Whether a thread was started to fill masks, and `_join` has not checked its result yet."""

    def add(self, request: Request) -> None:
        params = request.params
        if params.structured_outputs is not None:
            assert self._grammars is not None, "request was not validated"
            self._compiling[request.id] = self._grammars.begin(params.structured_outputs)
            self._waiting[request.id] = request
        elif params.thinking_token_budget is not None:
            self._states_by_id[request.id] = grammar_state_of(request, None)

    def hold_back(self, request: Request, *, alone: bool = False) -> bool:
        return request.id in self._compiling

    def enter(self, request: Request) -> None:
        """Do nothing when a request gets a row: its grammar state exists already."""

    def leave(self, request: Request) -> None:
        """Do nothing when a request loses its row: its grammar state is kept."""

    def drop(self, request: Request) -> None:
        if self._states_by_id.pop(request.id, None) is not None:
            self._matchers_key, self._matchers = b"", []
        future = self._compiling.pop(request.id, None)
        if future is not None:
            future.cancel()
            del self._waiting[request.id]

    @property
    def futures(self) -> Collection[Future[Any]]:
        return self._compiling.values()

    def settle(self) -> dict[str, str | None]:
        """Collect compiled grammars. Return the ids of the requests with a grammar that failed to compile;
        the values are None."""
        failed: dict[str, str | None] = {}
        for id, future in list(self._compiling.items()):
            if not future.done():
                continue
            if (error := future.exception()) is not None:
                log.error("The grammar of request %s cannot be compiled: %r", printable(id), str(error))
                failed[id] = None
            else:
                self.needs_recheck = True
                self._states_by_id[id] = grammar_state_of(
                    self._waiting.pop(id), future.result(), constrains_reasoning=self.constrains_reasoning
                )
                del self._compiling[id]
        return failed

    # ---- masks

    def launch(self, running: Running, flight: StepInFlight) -> None:
        """Set the constrained rows of a new plan, and queue its step to get masks."""
        if not self._states_by_id:
            return
        plan = flight.plan
        plan.constrained = plan.sampling_rows[running.constrained[plan.sampling_rows]]
        if len(plan.constrained):
            self._awaiting.append(flight)

    @property
    def has_begun(self) -> bool:
        """Whether the masks of the oldest step without masks are being filled."""
        return self._job is not None

    def begin(self, running: Running) -> None:
        """Start to fill the masks of the oldest step if all earlier tokens are known; in a thread if cores
        are free for it."""
        if self.has_begun or not self._awaiting or (job := self._next_job(running)) is None:
            return
        self._job = job
        if self._grammars is not None and job.matched:
            job = job._replace(matched=self._grammars.fill_remembered(job.matched, job.masks.bits))
        if self._grammars is None or not job.matched:
            job.add()
        elif self._grammars.fills_in_thread and len(job.matched) > _MAX_INLINE_MASKS:
            done = job.masks.pending = AsyncValue()
            self._is_thread_running = True
            self._thread.begin(partial(_fill, self._grammars, job, done))
        else:
            job.fill(self._grammars)

    def masks(self) -> Masks:
        """Return the masks that `begin` started to fill; they may not be complete yet. Their buffer is reused
        after two more plans."""
        assert self._job is not None
        masks, self._job = self._job.masks, None
        self._awaiting.popleft()
        return masks

    def forget(self) -> None:
        """Discard the masks of all planned steps."""
        self._join()
        self._job = None
        self._awaiting.clear()

    def _join(self) -> None:
        """Wait for the mask thread and raise its error, if any."""
        if self._is_thread_running:
            self._is_thread_running = False
            self._thread.wait()

    def _next_job(self, running: Running) -> _MaskJob | None:
        """Return the masks of the oldest step, without rows that have ended. None: they depend on sampled
        tokens that are not known yet."""
        flight = self._awaiting[0]
        rows, alive = flight.plan.constrained, flight.alive(running)
        if not alive.all():
            rows = rows[np.isin(rows, flight.rows[alive])]
        if (running.num_tokens[rows] - running.num_known[rows] > 1).any():  # the plan samples one token
            return None
        self._join()
        matchers = self._grammar_matchers(running, rows.astype(np.intp))
        if matchers is None or len(flight.plan.num_drafts):
            return self._mixed_job(running, rows, flight.plan)
        matched = list(zip(matchers, range(len(rows)), strict=True))
        return _MaskJob(Masks(rows, self._bits(len(rows), matched)), matched, [])

    def _grammar_matchers(self, running: Running, rows: RowIds) -> list[GrammarMatcher] | None:
        """Return the matchers of rows constrained by a grammar alone; None if a row has another constraint
        now. The result is cached, as rows rarely change."""
        key = rows.tobytes() + running.admission[rows].tobytes()
        if key != self._matchers_key:
            of_rows = [self._states_by_id[id].grammar_matcher for id in running.ids[rows].tolist()]
            matchers = [matcher for matcher in of_rows if matcher is not None]
            if len(matchers) < len(of_rows):
                return None
            self._matchers_key, self._matchers = key, matchers
        return self._matchers

    def _mixed_job(self, running: Running, rows: Ints, plan: StepPlan) -> _MaskJob:
        """Return the masks of a step in which rows have drafts, or reasoning that the grammar does not
        constrain."""
        states = [self._states_by_id[id] for id in running.ids[rows].tolist()]
        drafts = plan.drafts_by_row() if len(plan.num_drafts) else {}
        wanted = [
            (row, number, allowed)
            for row, state in zip(rows.tolist(), states, strict=True)
            for number, allowed in state.allowed_after(
                drafts.get(row, ()), self._forced_tokens(state) if row in drafts else ()
            )
        ]
        if not wanted:
            return _MaskJob(Masks(), [], [])
        matched = [
            (allowed.matcher, at) for at, (_, _, allowed) in enumerate(wanted) if allowed.matcher is not None
        ]
        extra_tokens = [
            (allowed.extra_token, at)
            for at, (_, _, allowed) in enumerate(wanted)
            if allowed.extra_token is not None
        ]
        places, sample_index = np.array([(row, number) for row, number, _ in wanted], np.int32).T
        width = max((token_id // 32 + 1 for token_id, _ in extra_tokens), default=0)
        bits = self._bits(len(wanted), matched, width)
        for at, (_, _, allowed) in enumerate(wanted):
            if allowed.matcher is None:
                bits[at] = 0
        return _MaskJob(
            Masks(places, bits, sample_index if sample_index.any() else sample_index[:0]),
            matched,
            extra_tokens,
        )

    def _forced_tokens(self, state: GrammarState) -> Sequence[int]:
        """Return the tokens that the grammar forces next."""
        if self._grammars is None or state.grammar_matcher is None:
            return ()
        self._join()
        return self._grammars.forced_tokens(state.grammar_matcher)

    def forced_tokens(self, running: Running, row: int) -> Sequence[int]:
        """Return the tokens that the grammar of a row forces after the row's known tokens."""
        return self._forced_tokens(self._states_by_id[running.ids[row]])

    def _bits(self, count: int, matched: Sequence[object], width: int = 0) -> Bits:
        """Return a buffer for `count` masks of at least `width` 32-bit words each; with any matcher, masks
        are as wide as the grammars need."""
        if self._grammars is not None and matched:
            width = max(width, self._grammars.num_words)
        return next(self._buffers).take(count, width)

    @cached_property
    def _thread(self) -> MaskThread:
        return MaskThread("quire-masks")

    def advance(self, step_tokens: StepTokens) -> dict[int, Verdict]:
        """Advance the grammar states by the new tokens of their rows. Return the verdicts of the tokens at
        which a grammar ended, by index of the token."""
        ended: dict[int, Verdict] = {}
        if not self._states_by_id:
            return ended
        self._join()
        running = step_tokens.running
        ended_rows: set[int] = set()
        for wave in step_tokens.waves(running.constrained[step_tokens.rows]):
            rows = step_tokens.rows[wave]
            if ended_rows:
                wave = wave[~np.isin(rows, list(ended_rows))]
                rows = step_tokens.rows[wave]
            token_ids = step_tokens.result.token_ids[wave].tolist()
            matchers = self._grammar_matchers(running, rows)
            states = [self._states_by_id[id] for id in running.ids[rows].tolist()]
            if self._grammars is None or matchers is None:
                verdicts = self._advance_mixed(states, token_ids)
            else:
                verdicts = self._grammars.advance(list(zip(matchers, token_ids, strict=True)))
                if not any(verdicts):
                    continue
            for at, (state, verdict) in enumerate(zip(states, verdicts, strict=True)):
                if verdict:
                    ended[int(wave[at])] = verdict
                if verdict or state.is_unconstrained:
                    ended_rows.add(int(rows[at]))
                if state.is_unconstrained:
                    running.constrained[rows[at]] = False
        if not ended:
            self.begin(running)  # as early as possible; a request that ends for another reason wastes a mask
        return ended

    def _advance_mixed(self, states: list[GrammarState], token_ids: list[int]) -> list[Verdict]:
        """Advance each grammar state by a token."""
        matchers = [state.grammar_matcher for state in states]
        moves = [move for move in zip(matchers, token_ids, strict=True) if move[0] is not None]
        verdicts = iter(self._grammars.advance(moves) if self._grammars is not None else [])
        return [
            state.advance(token_id) if matcher is None else next(verdicts)
            for state, matcher, token_id in zip(states, matchers, token_ids, strict=True)
        ]


class _MaskBuffer:
    """A reused buffer, since mapping new pages takes longer than filling them. A worker in this process
    recognizes the buffer and may let its device read it directly."""

    def __init__(self) -> None:
        self._words: Bits = np.empty(0, np.uint32)
        self._last: Bits = self._words.reshape(0, 0)

    def take(self, count: int, width: int) -> Bits:
        if self._last.shape == (count, width):
            return self._last
        if len(self._words) < count * width:
            size = max(2 * count * width, 1)
            self._words = np.frombuffer(mmap(-1, size * 4), np.uint32)
        self._last = self._words[: count * width].reshape(count, width)
        return self._last

"""Constraints: the requests whose text must fit a grammar, where each stands, and what it may say next."""

from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.data.params import SamplingParams, StructuredOutputsParams
from quire.data.plan import Ints, Masks, StepPlan, Verdict
from quire.data.request import Request
from quire.logs import get_logger
from quire.sched.follower import Follower, Matcher
from quire.sched.in_flight import Flight
from quire.sched.landed import Landed
from quire.sched.running import Running

log = get_logger(__name__)

Bits = NDArray[np.uint32]


class Grammars(Protocol):
    """What compiles grammars and says what they allow."""

    def begin(self, asked: StructuredOutputsParams) -> Future[Any]:
        """A matcher, once it is there."""

    @property
    def num_words(self) -> int:
        """Of a mask, once there is a matcher."""

    def fill(self, matchers: Sequence[tuple[Any, int]], bits: Bits) -> None:
        """A bit for each token that may come next, in the row of `bits` that is said beside each matcher."""

    def advance(self, moves: Sequence[tuple[Any, int]]) -> list[Verdict]:
        """What the matchers say, each of its next token."""

    @property
    def is_beside(self) -> bool:
        """Whether it has cores to itself while layers are computed."""


class _Draw(NamedTuple):
    """One of the draws of a row in a step, and who says what it may be."""

    row: int
    draw: int
    follower: Follower


class Constraints:
    """The constrained requests. One whose grammar is not ready waits, and others pass it by."""

    def __init__(self, grammars: Grammars | None) -> None:
        self._grammars = grammars
        self.opened = False
        self._coming: dict[str, Future[Matcher]] = {}
        self._params: dict[str, SamplingParams] = {}
        """Of those."""
        self._followers: dict[str, Follower] = {}
        """By request id. They advance by tokens that are known, whether their request has a row or not."""
        self._bits: Bits = np.empty((0, 0), np.uint32)
        self._ahead: Future[Masks] | None = None
        """The masks of the newest plan, if they could be begun with it."""

    def add(self, request: Request) -> None:
        params = request.params
        if params.structured_outputs is not None:
            assert self._grammars is not None, "nobody checked this request"
            self._coming[request.id] = self._grammars.begin(params.structured_outputs)
            self._params[request.id] = params
        elif params.thinking_token_budget is not None:
            self._followers[request.id] = Follower(None, params)

    def holds(self, request: Request, *, alone: bool = False) -> bool:
        return request.id in self._coming

    def enter(self, request: Request) -> None:
        """Its follower is there."""

    def leave(self, request: Request) -> None:
        """Its follower stays where it is."""

    def drop(self, request: Request) -> None:
        self._followers.pop(request.id, None)
        coming = self._coming.pop(request.id, None)
        if coming is not None:
            coming.cancel()
            del self._params[request.id]

    @property
    def coming(self) -> Collection[Future[Any]]:
        return self._coming.values()

    def settle(self) -> dict[str, str | None]:
        """Take in the grammars that are ready. Returns the requests whose grammar has come to nothing."""
        broken: dict[str, str | None] = {}
        for id, coming in list(self._coming.items()):
            if not coming.done():
                continue
            if (error := coming.exception()) is not None:
                log.error("The grammar of request %s cannot be compiled: %s", id, error)
                broken[id] = None
            else:
                self.opened = True
                self._followers[id] = Follower(coming.result(), self._params.pop(id))
                del self._coming[id]
        return broken

    # ---- what may come next

    def launch(self, running: Running, flight: Flight) -> None:
        """A plan was made: note whose masks follow, and begin with them if all tokens before are known and
        there are cores for it."""
        self._ahead = None
        if not self._followers:
            return
        plan = flight.plan
        plan.confined = plan.sampling_rows[running.constrained[plan.sampling_rows]]
        is_beside = self._grammars is not None and self._grammars.is_beside
        if is_beside and len(plan.confined) and self._are_known(running, plan.confined):
            self._ahead = self._thread.submit(self._fill, self._wanted(running, plan, plan.confined))

    def masks(self, running: Running, flight: Flight) -> Masks | None:
        """Those of the newest plan; None while they depend on tokens that are under way. They are good until
        the next plan is made. Who has gone needs none."""
        if self._ahead is not None:
            return self._ahead.result()
        rows = flight.plan.confined
        rows = rows[np.isin(rows, flight.rows[flight.alive(running)])]
        if not self._are_known(running, rows):
            return None
        return self._fill(self._wanted(running, flight.plan, rows))

    def _are_known(self, running: Running, rows: Ints) -> bool:
        """All tokens but those that the plan itself samples."""
        return bool((running.num_tokens[rows] - running.num_known[rows] <= 1).all())

    def _wanted(self, running: Running, plan: StepPlan, rows: Ints) -> list[_Draw]:
        """The draws that may not be what they like."""
        drafts = plan.drafts_by_row() if len(plan.num_drafts) else {}
        return [
            _Draw(row, draw, follower)
            for row in rows.tolist()
            for draw, follower in enumerate(self._followers[running.ids[row]].along(drafts.get(row, ())))
            if follower.matcher is not None or follower.also is not None
        ]

    def _fill(self, wanted: list[_Draw]) -> Masks:
        if not wanted:
            return Masks()
        rows, draws = np.array([(row, draw) for row, draw, _ in wanted], np.int32).T
        followers = [follower for _, _, follower in wanted]
        matched = [(one.matcher, at) for at, one in enumerate(followers) if one.matcher is not None]
        more = [(one.also, at) for at, one in enumerate(followers) if one.also is not None]
        width = max((token_id // 32 + 1 for token_id, _ in more), default=0)
        if self._grammars is not None and matched:
            bits = self._room(len(rows), max(width, self._grammars.num_words))
            self._grammars.fill(matched, bits)
        else:
            bits = self._room(len(rows), width)
        for token_id, at in more:
            if followers[at].matcher is None:
                bits[at] = 0
            bits[at, token_id // 32] |= np.uint32(1 << token_id % 32)
        return Masks(rows, bits, draws if draws.any() else draws[:0])

    def _room(self, count: int, width: int) -> Bits:
        """The same memory again and again: new pages would take longer than what is written to them."""
        if self._bits.shape[1] != width or len(self._bits) < count:
            self._bits = np.zeros((max(count, len(self._bits)), width), np.uint32)
        return self._bits[:count]

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="quire-masks")

    def advance(self, landed: Landed) -> dict[int, Verdict]:
        """Rows got tokens. Returns, by place among them, those that a grammar ends with."""
        ended: dict[int, Verdict] = {}
        if not self._followers:
            return ended
        running, over = landed.running, set()
        for wave in landed.waves(running.constrained[landed.rows]):
            moved = [
                (place, row, self._followers[running.ids[row]], int(landed.result.token_ids[place]))
                for place, row in zip(wave.tolist(), landed.rows[wave].tolist(), strict=True)
                if row not in over
            ]
            bound = [(one.bound, token_id) for _, _, one, token_id in moved if one.bound]
            verdicts = iter(self._grammars.advance(bound) if self._grammars is not None else ())
            for place, row, follower, token_id in moved:
                verdict = next(verdicts) if follower.bound else follower.advance(token_id)
                if verdict:
                    ended[place] = verdict
                if verdict or follower.is_free:
                    over.add(row)
                if follower.is_free:
                    running.constrained[row] = False
        return ended

"""Constraints: the requests whose text must fit a grammar, where each stands, and what it may say next."""

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.data.params import StructuredOutputsParams
from quire.data.plan import Ints, Masks, Verdict
from quire.data.request import Request
from quire.logs import get_logger
from quire.sched.running import RowIds, Running

log = get_logger(__name__)


class Matcher(Protocol):
    """Where a sequence stands in its grammar."""

    def advance(self, token_id: int) -> Verdict: ...


class Grammars(Protocol):
    """What compiles grammars and says what they allow."""

    def begin(self, asked: StructuredOutputsParams) -> Future[Any]:
        """A matcher, once it is there."""

    def fill(self, matchers: Sequence[Any]) -> NDArray[np.uint32]:
        """[matchers, words] a bit for each token that may come next."""


class Constraints:
    """The constrained requests. One whose grammar is not ready waits, and others pass it by."""

    def __init__(self, grammars: Grammars | None) -> None:
        self._grammars = grammars
        self._coming: dict[str, Future[Matcher]] = {}
        self._matchers: dict[str, Matcher] = {}
        """By request id. They advance by tokens that are known, whether their request has a row or not."""

    def add(self, request: Request) -> None:
        asked = request.params.structured_outputs
        if asked is not None:
            assert self._grammars is not None, "nobody checked this request"
            self._coming[request.id] = self._grammars.begin(asked)

    def drop(self, request_id: str) -> None:
        self._matchers.pop(request_id, None)
        coming = self._coming.pop(request_id, None)
        if coming is not None:
            coming.cancel()

    def settle(self) -> list[str]:
        """Take in the grammars that are ready. Returns the requests whose grammar has come to nothing."""
        broken = []
        for id, coming in list(self._coming.items()):
            if not coming.done():
                continue
            if (error := coming.exception()) is not None:
                log.error("The grammar of request %s cannot be compiled: %s", id, error)
                broken.append(id)
            else:
                self._matchers[id] = coming.result()
                del self._coming[id]
        return broken

    def wait(self, timeout_s: float | None) -> bool:
        """Until one more grammar is ready; False if none is in time."""
        return bool(self._coming) and bool(wait(self._coming.values(), timeout_s, FIRST_COMPLETED).done)

    def holds(self, request: Request) -> bool:
        """Whether it cannot run yet."""
        return request.id in self._coming

    def masks(self, running: Running, rows: RowIds) -> Masks | None:
        """What those of `rows` that are constrained may sample; None if none is."""
        if not self._matchers:
            return None
        mine = rows[running.constrained[rows]]
        if not len(mine):
            return None
        assert self._grammars is not None
        bits = self._grammars.fill([self._matchers[id] for id in running.ids[mine].tolist()])
        return Masks(mine.astype(np.int32), bits)

    def advance(self, running: Running, rows: RowIds, token_ids: Ints) -> dict[int, Verdict]:
        """`rows` got these tokens. Returns those whose grammar ends with them."""
        ended: dict[int, Verdict] = {}
        if not self._matchers:
            return ended
        for place in np.flatnonzero(running.constrained[rows]).tolist():
            row = int(rows[place])
            verdict = self._matchers[running.ids[row]].advance(int(token_ids[place]))
            if verdict:
                ended[row] = verdict
        return ended

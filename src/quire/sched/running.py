"""Running: the requests that hold a row, as columns, so that a step over a thousand of them is a few array
operations."""

import numpy as np
from numpy.typing import NDArray

from quire.data.params import SamplingParams
from quire.data.plan import Ints, spread
from quire.data.request import Request

RowIds = NDArray[np.intp]
"""What numpy indexes by without converting it first."""


def looks_back(params: SamplingParams) -> bool:
    """Whether the sampler reads, on the host, the tokens before its own. Penalties are counted on the
    device."""
    return params.moments is not None or any(len(word) > 1 for word in params.bad_words_token_ids or ())


def is_constrained(params: SamplingParams) -> bool:
    """Whether what it may say next depends on what it said."""
    return params.structured_outputs is not None or params.thinking_token_budget is not None


class Running:
    """The requests that hold a row, as columns.

    `order` lists the taken rows, oldest admission first; every other column is indexed by row.
    """

    def __init__(self, max_rows: int, max_len: int, num_stages: int = 1) -> None:
        self.num_stages = num_stages
        """Of the pipeline that computes. With more than one every row needs its values."""
        self.order: RowIds = np.empty(0, np.intp)
        self.requests: list[Request | None] = [None] * max_rows
        self.ids: NDArray[np.object_] = np.full(max_rows, "", np.object_)
        self.tokens: Ints = np.zeros((max_rows, max_len), np.int32)
        """While a request runs its tokens grow here; `Request.tokens` catches up when it leaves its row."""
        self.prompt_len: Ints = np.zeros(max_rows, np.int32)
        self.num_cached: Ints = np.zeros(max_rows, np.int32)
        self.num_tokens: Ints = np.zeros(max_rows, np.int32)
        """Those in flight counted in: it is known that they come, but not yet what they are. With drafts in
        flight there may be more."""
        self.num_known: Ints = np.zeros(max_rows, np.int32)
        """Tokens with a value."""
        self.num_told: Ints = np.zeros(max_rows, np.int32)
        """Tokens whose value all stages have."""
        self.num_computed: Ints = np.zeros(max_rows, np.int32)
        """Those in flight counted in."""
        self.num_drafts: Ints = np.zeros(max_rows, np.int32)
        """In flight: how many tokens more than these there may be."""
        self.limit: Ints = np.zeros(max_rows, np.int32)
        self.eos_id: Ints = np.full(max_rows, -1, np.int32)
        self.min_len: Ints = np.zeros(max_rows, np.int32)
        """No stop before the sequence has this many tokens."""
        self.watched = np.zeros(max_rows, np.bool_)
        """Whether a token needs a closer look than eos and length: stop ids, repetition."""
        self.constrained = np.zeros(max_rows, np.bool_)
        """Whether the row follows a grammar, or has a limit to its reasoning."""
        self.tenant: Ints = np.zeros(max_rows, np.int32)
        self.needs_value = np.zeros(max_rows, np.bool_)
        """Whether the host must know a token before the next can be sampled."""
        self.waits = np.zeros(max_rows, np.bool_)
        """The same, since drafts are made of it."""
        self.drafts = np.zeros(max_rows, np.bool_)
        """Whether the row may have drafts at all."""
        self.first_len: Ints = np.zeros(max_rows, np.int32)
        """How many tokens its request had when it got the row."""
        self.admission: NDArray[np.int64] = np.zeros(max_rows, np.int64)
        """A number that is the row's until it is released; then 0."""
        self.timed: set[int] = set()
        """Rows whose share of every step is told."""
        self.stepped_at = 0.0
        """When the last step ended, monotonic."""
        self._num_admissions = 0
        self._free_rows = list(range(max_rows - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.order)

    def request(self, row: int) -> Request:
        request = self.requests[row]
        assert request is not None, f"row {row} is empty"
        return request

    def admit(self, request: Request, num_computed: int) -> int:
        row = request.row = self._free_rows.pop()
        params = request.params
        self.requests[row] = request
        self.ids[row] = request.id
        self.tokens[row, : len(request.tokens)] = request.tokens
        self.prompt_len[row] = request.prompt_len
        self.num_cached[row] = request.num_cached
        self.num_tokens[row] = self.num_known[row] = self.num_told[row] = len(request.tokens)
        self.num_computed[row] = num_computed
        self.num_drafts[row] = self.waits[row] = 0
        self.first_len[row] = len(request.tokens)
        self.drafts[row] = request.embeds is None
        self.limit[row] = request.limit
        self.tenant[row] = request.tenant
        self.eos_id[row] = request.eos_id
        self.min_len[row] = min(request.prompt_len + params.min_tokens, request.limit)
        request.prepare_stops()
        self.watched[row] = bool(request.stop_ids) or request.repetition is not None
        self.constrained[row] = is_constrained(params)
        self.needs_value[row] = self.num_stages > 1 or looks_back(params)
        if request.timed:
            self.timed.add(row)
        self._num_admissions += 1
        self.admission[row] = self._num_admissions
        self.order = np.append(self.order, np.intp(row))
        return row

    def pending(self) -> Ints:
        """How many tokens each row of `order` can compute now. A token in flight can be computed without
        its value, unless it is the last one anyway or the host wants to see it first."""
        rows = self.order
        num_tokens = self.num_tokens[rows]
        pending: Ints = num_tokens - self.num_computed[rows]
        unknown = num_tokens > self.num_known[rows]
        if unknown.any():
            most, min_len = num_tokens + self.num_drafts[rows], self.min_len[rows]
            waits = self.needs_value[rows] | self.waits[rows] | (most >= self.limit[rows])
            # Whether `min_tokens` still holds is not known before its drafts have landed.
            waits |= (num_tokens < min_len) & (most >= min_len)
            pending[unknown & waits] = 0
        return pending if self.num_stages == 1 else self._spread(pending)

    def _spread(self, pending: Ints) -> Ints:
        """Leave some decodes to the plans behind this one, so that each stage has one to compute: a plan
        gets an equal share of all, those in flight counted in."""
        rows = self.order
        decodes = self.num_tokens[rows] - self.num_computed[rows] == 1
        share = -(-int(np.count_nonzero(decodes)) // self.num_stages)
        pending[np.flatnonzero(decodes & (pending > 0))[share:]] = 0
        return pending

    def tell(self, rows: RowIds) -> Ints:
        """[2, rows]: those of `rows` that got a token since it was last told, and that token."""
        untold = rows[self.num_known[rows] > self.num_told[rows]]
        self.num_told[untold] = self.num_known[untold]
        return np.stack([untold.astype(np.int32), self.tokens[untold, self.num_known[untold] - 1]])

    def reach(self, chunks: Ints) -> Ints:
        """How many tokens each row of `order` has computed, at most, once it computes so many more."""
        rows = self.order
        reach: Ints = self.num_computed[rows] + self.num_drafts[rows] + chunks
        return reach

    def launch(self, rows: RowIds, num_tokens: Ints, num_drafts: Ints) -> NDArray[np.bool_]:
        """`rows` compute so many tokens, of which so many are drafts. Returns which of them get new ones;
        their values follow."""
        if len(num_drafts):
            self.num_drafts[rows] += num_drafts
            num_tokens = num_tokens - num_drafts
        samples: NDArray[np.bool_] = num_tokens == self.num_tokens[rows] - self.num_computed[rows]
        self.num_computed[rows] += num_tokens
        self.num_tokens[rows] += samples
        return samples

    def fill(self, rows: RowIds, token_ids: Ints, counts: Ints, num_drafts: Ints) -> None:
        """The oldest unknown token of each row has come, or so many."""
        num_known = self.num_known[rows]
        if not len(counts):
            self.tokens[rows, num_known] = token_ids
            self.num_known[rows] = num_known + 1
            return
        self.tokens[np.repeat(rows, counts), spread(num_known, counts)] = token_ids
        self.num_known[rows] += counts
        self.num_tokens[rows] += counts - 1
        self.num_computed[rows] += counts - 1
        self.num_drafts[rows] -= num_drafts

    def release(self, row: int) -> Request:
        """The row's request, with all tokens that are known."""
        request = self.request(row)
        request.tokens = request.tokens + self.tokens[row, len(request.tokens) : self.num_known[row]].tolist()
        self.requests[row], request.row = None, -1
        self.admission[row] = 0
        self.timed.discard(row)
        self.order = self.order[self.order != row]
        self._free_rows.append(row)
        return request

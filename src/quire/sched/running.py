"""Running: the requests that hold a row, as columns of arrays.

The row of a request is its index in these arrays and in the batch state of the worker. A step over a thousand
requests is a few array operations."""

import numpy as np
from numpy.typing import NDArray

from quire.data.params import SamplingParams
from quire.data.request import Request
from quire.data.step_plan import Ints, spread

RowIds = NDArray[np.intp]
"""Row indices in the type that numpy needs for indexing without a conversion."""


def looks_back(params: SamplingParams) -> bool:
    """Whether the sampler needs the values of the preceding tokens on the host. Penalties do not, since their
    counts are on the device."""
    return params.timestamp_tokens is not None or any(
        len(word) > 1 for word in params.bad_words_token_ids or ()
    )


def is_constrained(params: SamplingParams) -> bool:
    """Whether the allowed next tokens depend on the generated ones (a grammar or a reasoning budget)."""
    return params.structured_outputs is not None or params.thinking_token_budget is not None


class Running:
    """The requests that hold a row, as columns.

    `order` has the rows in use, oldest admission first; every other column is indexed by row."""

    def __init__(self, max_rows: int, max_len: int, num_stages: int = 1) -> None:
        self.num_stages = num_stages
        """Number of pipeline stages. With more than one, every row needs its token values on the host."""
        self.order: RowIds = np.empty(0, np.intp)
        self.requests: list[Request | None] = [None] * max_rows
        self.ids: NDArray[np.object_] = np.full(max_rows, "", np.object_)
        self.tokens: Ints = np.zeros((max_rows, max_len), np.int32)
        """Tokens of the running requests; `Request.tokens` is updated when a request leaves its row."""
        self.prompt_len: Ints = np.zeros(max_rows, np.int32)
        self.num_cached: Ints = np.zeros(max_rows, np.int32)
        self.num_tokens: Ints = np.zeros(max_rows, np.int32)
        """Number of tokens, including a sampled token that is in flight without a known value. Accepted draft
        tokens are added with the result of their step."""
        self.num_known: Ints = np.zeros(max_rows, np.int32)
        """Number of tokens with a known value."""
        self.num_sent: Ints = np.zeros(max_rows, np.int32)
        """Number of tokens whose values all pipeline stages have."""
        self.num_computed: Ints = np.zeros(max_rows, np.int32)
        """Number of tokens computed, including by steps in flight."""
        self.num_drafts: Ints = np.zeros(max_rows, np.int32)
        """Number of draft tokens in flight: `num_tokens` may grow by up to this number."""
        self.limit: Ints = np.zeros(max_rows, np.int32)
        """Number of tokens at which the sequence ends with the finish reason `length`."""
        self.eos_id: Ints = np.full(max_rows, -1, np.int32)
        self.min_len: Ints = np.zeros(max_rows, np.int32)
        """Number of tokens before which the sequence does not stop."""
        self.watched = np.zeros(max_rows, np.bool_)
        """Whether tokens must be checked for more than eos and length: stop ids, repetition."""
        self.constrained = np.zeros(max_rows, np.bool_)
        """Whether a grammar or a reasoning budget constrains the row."""
        self.tenant: Ints = np.zeros(max_rows, np.int32)
        self.itl_s = np.full(max_rows, np.inf)
        """Target of the time between two tokens in seconds; infinite: none."""
        self.needs_value = np.zeros(max_rows, np.bool_)
        """Whether the host must have a token's value before the next token can be sampled."""
        self.waits = np.zeros(max_rows, np.bool_)
        """Whether the row waits for the value of its last token, because drafts are made from it."""
        self.drafts = np.zeros(max_rows, np.bool_)
        """Whether the row may have drafts at all."""
        self.has_forced = np.zeros(max_rows, np.bool_)
        """Whether the last drafts of the row were tokens that its grammar forced."""
        self.first_len: Ints = np.zeros(max_rows, np.int32)
        """Number of tokens the request had when it got the row."""
        self.admission: NDArray[np.int64] = np.zeros(max_rows, np.int64)
        """Number that identifies one admission of a request to the row; 0 while the row is free."""
        self.timed: set[int] = set()
        """Rows of requests for which the share of each step's time is reported."""
        self.stepped_at = 0.0
        """Monotonic time at which the last step ended, in seconds."""
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
        self.num_tokens[row] = self.num_known[row] = self.num_sent[row] = len(request.tokens)
        self.num_computed[row] = num_computed
        self.num_drafts[row] = self.waits[row] = 0
        self.first_len[row] = len(request.tokens)
        self.drafts[row] = request.embeds is None
        self.limit[row] = request.limit
        self.tenant[row] = request.tenant
        self.itl_s[row] = request.target.itl_s or np.inf
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
        """Return how many tokens each row of `order` can compute now. A sampled token in flight can be
        computed without its value, unless the sequence may end with it or the host needs its value first."""
        rows = self.order
        num_tokens = self.num_tokens[rows]
        pending: Ints = num_tokens - self.num_computed[rows]
        unknown = num_tokens > self.num_known[rows]
        if unknown.any():
            max_len, min_len = num_tokens + self.num_drafts[rows], self.min_len[rows]
            waits = self.needs_value[rows] | self.waits[rows] | (max_len >= self.limit[rows])
            # Whether `min_tokens` still applies is not known before the drafts are verified.
            waits |= (num_tokens < min_len) & (max_len >= min_len)
            pending[unknown & waits] = 0
        return pending if self.num_stages == 1 else self._spread(pending)

    def _spread(self, pending: Ints) -> Ints:
        """Leave some decodes out of `pending` for the next plans, so that each pipeline stage has work: a
        plan gets an equal part of all decodes, including those in flight."""
        rows = self.order
        decodes = self.num_tokens[rows] - self.num_computed[rows] == 1
        share = -(-int(np.count_nonzero(decodes)) // self.num_stages)
        pending[np.flatnonzero(decodes & (pending > 0))[share:]] = 0
        return pending

    def take_unsent(self, rows: RowIds) -> Ints:
        """Return [2, n]: those of `rows` with a new token that has not been sent yet, and these tokens."""
        unsent = rows[self.num_known[rows] > self.num_sent[rows]]
        self.num_sent[unsent] = self.num_known[unsent]
        return np.stack([unsent.astype(np.int32), self.tokens[unsent, self.num_known[unsent] - 1]])

    def lengths_after(self, chunks: Ints) -> Ints:
        """Return how many tokens each row of `order` has computed after `chunks` more. Draft tokens in flight
        all count as accepted."""
        rows = self.order
        lengths: Ints = self.num_computed[rows] + self.num_drafts[rows] + chunks
        return lengths

    def launch(self, rows: RowIds, num_tokens: Ints, num_drafts: Ints) -> NDArray[np.bool_]:
        """Record that `rows` compute `num_tokens`, including `num_drafts` drafts. Return which of them sample
        new tokens; `fill` adds the values of these tokens later."""
        if len(num_drafts):
            self.num_drafts[rows] += num_drafts
            num_tokens = num_tokens - num_drafts
        samples: NDArray[np.bool_] = num_tokens == self.num_tokens[rows] - self.num_computed[rows]
        self.num_computed[rows] += num_tokens
        self.num_tokens[rows] += samples
        return samples

    def fill(self, rows: RowIds, token_ids: Ints, counts: Ints, num_drafts: Ints) -> None:
        """Fill in the oldest unknown token of each row, or `counts` tokens of each."""
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
        """Release a row and return its request with all known tokens."""
        request = self.request(row)
        request.tokens = request.tokens + self.tokens[row, len(request.tokens) : self.num_known[row]].tolist()
        self.requests[row], request.row = None, -1
        self.admission[row] = 0
        self.timed.discard(row)
        self.order = self.order[self.order != row]
        self._free_rows.append(row)
        return request

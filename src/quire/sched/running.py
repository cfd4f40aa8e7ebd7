"""Running: the requests that hold a row, as columns, so that a step over a thousand of them is a few array
operations."""

import numpy as np

from quire.data.plan import Ints
from quire.data.request import Request


class Running:
    """`order` lists the taken rows, oldest admission first; every other column is indexed by row."""

    def __init__(self, max_rows: int, max_len: int) -> None:
        self.order: Ints = np.empty(0, np.int32)
        self.requests: list[Request | None] = [None] * max_rows
        self.ids: list[str] = [""] * max_rows
        self.tokens: Ints = np.zeros((max_rows, max_len), np.int32)
        """While a request runs its tokens grow here; `Request.tokens` catches up when it leaves its row."""
        self.prompt_len: Ints = np.zeros(max_rows, np.int32)
        self.num_cached: Ints = np.zeros(max_rows, np.int32)
        self.num_tokens: Ints = np.zeros(max_rows, np.int32)
        self.num_computed: Ints = np.zeros(max_rows, np.int32)
        self.limit: Ints = np.zeros(max_rows, np.int32)
        self.eos_id: Ints = np.full(max_rows, -1, np.int32)
        self.min_len: Ints = np.zeros(max_rows, np.int32)
        """No stop before the sequence has this many tokens."""
        self.watched = np.zeros(max_rows, np.bool_)
        """Whether a token needs a closer look than eos and length: stop ids, repetition."""
        self._free_rows = list(range(max_rows - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.order)

    @property
    def full(self) -> bool:
        return not self._free_rows

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
        self.num_tokens[row] = len(request.tokens)
        self.num_computed[row] = num_computed
        self.limit[row] = request.limit
        self.eos_id[row] = request.eos_id
        self.min_len[row] = min(request.prompt_len + params.min_tokens, request.limit)
        self.watched[row] = bool(params.stop_token_ids or params.repetition_detection)
        self.order = np.append(self.order, np.int32(row))
        return row

    def release(self, row: int) -> Request:
        request = self.request(row)
        request.tokens.extend(self.tokens[row, len(request.tokens) : self.num_tokens[row]].tolist())
        self.requests[row], request.row = None, -1
        self.order = self.order[self.order != row]
        self._free_rows.append(row)
        return request

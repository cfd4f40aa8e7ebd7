"""The sampling parameters of all rows (running sequences), as arrays that a step indexes by row."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from quire.data.params import SamplingParams

Ints = NDArray[np.int32]


class History(NamedTuple):
    """Tokens of all running sequences, each of which has a row: prompt, then output."""

    tokens: Ints
    """[max_rows, max_len], token ids"""
    num_tokens: Ints
    """[max_rows], number of tokens so far, which is the position of the next token"""
    prompt_lens: Ints
    """[max_rows], number of prompt tokens"""


# Features of a row, as bits of `flags`: one OR over the batch gives the work that a step can skip.
RANDOM = 1 << 0
LIMITED = 1 << 1
"""Flag of rows whose request has top_k, top_p or min_p."""
PENALTIES = 1 << 2
ALLOWED = 1 << 3
BANNED = 1 << 4
"""Flag of rows whose request has bad_words."""
HELD = 1 << 5
"""Flag of rows with min_tokens, or with tokens that the model must not generate."""
BIASED = 1 << 6
LOGPROBS = 1 << 7
LISTED = 1 << 8
"""Flag of rows whose request has logprob_token_ids."""
TIMED = 1 << 9
"""Flag of rows that follow Whisper's timestamp rules."""

_ENTRY = np.dtype([("row", np.int32), ("token_id", np.int32), ("value", np.float64)])
_PAD = -1
_MAX_REPETITION = 1e30
"""Maximum repetition penalty; its inverse is the minimum. Logits times or divided by it are finite."""


class TokenTable:
    """Table of the entries (row, token id, value) of a feature such as logit_bias; the entries of a row stay
    in the order of insertion."""

    def __init__(self) -> None:
        self._entries = np.empty(64, _ENTRY)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, row: int, token_ids: Sequence[int], values: Sequence[float] | float = 0.0) -> None:
        end = self._size + len(token_ids)
        if end > len(self._entries):
            grown = np.empty(max(end, 2 * len(self._entries)), _ENTRY)
            grown[: self._size] = self._entries[: self._size]
            self._entries = grown
        new = self._entries[self._size : end]
        new["row"], new["token_id"], new["value"] = row, token_ids, values
        self._size = end

    def drop(self, row: int) -> None:
        entries = self._entries[: self._size]
        kept = entries[entries["row"] != row]
        self._size = len(kept)
        self._entries[: self._size] = kept

    def select(self, places: Ints) -> tuple[Ints, Ints, NDArray[np.float64]]:
        """Return the entries of the rows in the batch as three arrays: indices in the batch, token ids and
        values. `places` is the result of `SamplingRows.places`."""
        entries = self._entries[: self._size]
        at = places[entries["row"]]
        here = at >= 0
        chosen = entries[here]
        return at[here], chosen["token_id"], chosen["value"]


class WordTable:
    """Bad words of one or more tokens, by row: the last token of a word is banned if the output ends with the
    tokens before it."""

    def __init__(self) -> None:
        self._rows = np.empty(0, np.int32)
        self._last = np.empty(0, np.int32)
        self._prefix_lens = np.empty(0, np.int32)
        self._prefixes = np.empty((0, 0), np.int32)
        """[words, longest prefix], aligned right, padded with _PAD"""

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: int, words: Sequence[Sequence[int]]) -> None:
        lens = [len(word) - 1 for word in words]
        width = max(self._prefixes.shape[1], *lens)
        prefixes = np.full((len(self) + len(words), width), _PAD, np.int32)
        prefixes[: len(self), width - self._prefixes.shape[1] :] = self._prefixes
        for i, word in enumerate(words, start=len(self)):
            prefixes[i, width - len(word) + 1 :] = word[:-1]
        self._prefixes = prefixes
        self._rows = np.append(self._rows, np.full(len(words), row, np.int32))
        self._last = np.append(self._last, np.array([word[-1] for word in words], np.int32))
        self._prefix_lens = np.append(self._prefix_lens, np.array(lens, np.int32))

    def drop(self, row: int) -> None:
        kept = self._rows != row
        self._rows, self._last = self._rows[kept], self._last[kept]
        self._prefix_lens = self._prefix_lens[kept]
        width = int(self._prefix_lens.max(initial=0))
        self._prefixes = self._prefixes[kept, self._prefixes.shape[1] - width :]

    def select(self, places: Ints, history: History) -> tuple[Ints, Ints]:
        """Return the tokens to ban in this step as two arrays: indices in the batch, and token ids. `places`
        is the result of `SamplingRows.places`."""
        tokens, num_tokens, prompt_lens = history
        live = np.flatnonzero(places[self._rows] >= 0)
        rows, prefixes = self._rows[live], self._prefixes[live]
        width = prefixes.shape[1]
        ends = num_tokens[rows]
        columns = ends[:, None] + np.arange(-width, 0)
        seen = tokens[rows[:, None], np.maximum(columns, 0)]
        hit = ((seen == prefixes) | (prefixes == _PAD)).all(axis=1)
        hit &= self._prefix_lens[live] <= ends - prompt_lens[rows]
        return places[rows[hit]], self._last[live[hit]]


class SamplingRows:
    """The sampling parameters of all rows. A row has parameters from `admit` until `release`."""

    def __init__(
        self,
        max_rows: int,
        vocab: int,
        device: torch.device,
        banned_ids: tuple[Sequence[int], ...] = ((), ()),
    ) -> None:
        """Allocate the parameters of `max_rows` rows for a model with `vocab` tokens. `banned_ids` are two
        lists of token ids that no row may sample; those of the second are banned as first output token."""
        self.vocab = vocab
        self.banned_ids = banned_ids
        self.device = device
        """Device of the logits; the parameters stay on the host."""
        self.flags = np.zeros(max_rows, np.int32)
        self.admission = np.zeros(max_rows, np.int64)
        """Number of requests to which each row has been assigned so far."""
        self.temperature = np.ones(max_rows, np.float32)
        self.sample_temperature = np.zeros(max_rows, np.float32)
        """Temperature, with 0 for greedy rows."""
        self.top_k = np.zeros(max_rows, np.int64)
        """top_k of each row; 0 is off."""
        self.top_p = np.ones(max_rows, np.float64)
        self.min_p = np.zeros(max_rows, np.float64)
        self.repetition = np.ones(max_rows, np.float32)
        self.frequency = np.zeros(max_rows, np.float32)
        self.presence = np.zeros(max_rows, np.float32)
        self.seed = np.zeros(max_rows, np.uint64)
        self.ends = np.full(max_rows, vocab, np.int32)
        """Vocabulary size of each row: the model's, and the tokens that the request's adapter adds."""
        self.num_logprobs = np.zeros(max_rows, np.int32)
        """Number of top logprobs besides the sampled token."""
        self.allowed = TokenTable()
        self.held = TokenTable()
        """Tokens that are banned while the sequence is shorter than the entry's value."""
        self.biased = TokenTable()
        self.listed = TokenTable()
        self.banned = WordTable()
        self.timestamp_tokens: Ints = np.zeros((3, max_rows), np.int32)
        """[3, max_rows], for rows with timestamps: token ids of the first timestamp and of eos, and the
        largest timestamp with which the output may begin, counted from the first timestamp (-1: any)."""
        self._places = np.full(max_rows, -1, np.int32)

    def admit(
        self,
        row: int,
        params: SamplingParams,
        *,
        prompt_len: int,
        seed: int,
        stop_ids: Sequence[int],
        num_new: int = 0,
    ) -> None:
        """Assign the row to a request. `stop_ids` are banned until the request has `min_tokens` output
        tokens. The request's LoRA adapter adds `num_new` tokens to the vocabulary."""
        self.release(row)
        self.admission[row] += 1
        flags = 0 if params.greedy else RANDOM
        self.seed[row] = seed % 2**64
        self.temperature[row] = params.temperature or 1.0
        self.sample_temperature[row] = 0.0 if params.greedy else params.temperature
        self.top_k[row] = params.top_k if 0 < params.top_k < self.vocab else 0
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        if self.top_k[row] or params.top_p < 1.0 or params.min_p > 0.0:
            flags |= LIMITED
        self.repetition[row] = min(max(params.repetition_penalty, 1 / _MAX_REPETITION), _MAX_REPETITION)
        self.frequency[row] = params.frequency_penalty
        self.presence[row] = params.presence_penalty
        if params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty:
            flags |= PENALTIES
        end = self.ends[row] = self.vocab + num_new
        self.flags[row] = flags | self._admit_logprobs(row, params) | self._admit_tokens(row, params)
        held = [token_id for token_id in dict.fromkeys(stop_ids) if token_id < end]
        if params.min_tokens and held:
            self.held.add(row, held, prompt_len + params.min_tokens)
            self.flags[row] |= HELD
        for token_ids, until in zip(self.banned_ids, (np.inf, prompt_len + 1), strict=True):
            if token_ids:
                self.held.add(row, token_ids, until)
                self.flags[row] |= HELD

    def _admit_logprobs(self, row: int, params: SamplingParams) -> int:
        if params.logprob_token_ids is not None:
            self.num_logprobs[row] = 0
            self.listed.add(row, params.logprob_token_ids)
            return LOGPROBS | LISTED
        if params.logprobs is None:
            return 0
        end = int(self.ends[row])
        self.num_logprobs[row] = end if params.logprobs == -1 else min(params.logprobs, end)
        return LOGPROBS

    def _admit_tokens(self, row: int, params: SamplingParams) -> int:
        flags = 0
        if params.allowed_token_ids is not None:
            self.allowed.add(row, params.allowed_token_ids)
            flags |= ALLOWED
        words = [word for word in params.bad_words_token_ids or () if word]
        if words:
            self.banned.add(row, words)
            flags |= BANNED
        if params.logit_bias:
            self.biased.add(row, list(params.logit_bias), list(params.logit_bias.values()))
            flags |= BIASED
        if (times := params.timestamp_tokens) is not None:
            max_first = -1 if times.max_first is None else times.max_first
            self.timestamp_tokens[:, row] = times.zero, times.end, max_first
            flags |= TIMED
        return flags

    def release(self, row: int) -> None:
        """Clear the row's parameters; a row without a request may be released."""
        flags = int(self.flags[row])
        tables: tuple[tuple[int, TokenTable | WordTable], ...] = (
            (ALLOWED, self.allowed),
            (HELD, self.held),
            (BIASED, self.biased),
            (LISTED, self.listed),
            (BANNED, self.banned),
        )
        for flag, table in tables:
            if flags & flag:
                table.drop(row)
        self.flags[row] = 0

    def special(self, rows: Ints) -> int:
        """Return the flags (bits such as PENALTIES) of features that some of the rows use and that sampling
        inside the CUDA graph of the forward pass does not support; 0 if there are none."""
        return int(np.bitwise_or.reduce(self.flags[rows])) & ~(RANDOM | LIMITED)

    def places(self, rows: Ints) -> Ints:
        """Return [max_rows]: for each row the index of its first occurrence in `rows` (the rows of the
        batch), and -1 for rows that are not in the batch. The next call overwrites the array."""
        self._places.fill(-1)
        self._places[rows[::-1]] = np.arange(len(rows) - 1, -1, -1, dtype=np.int32)
        return self._places

"""StepCost: a model of the duration of a step, fitted to finished steps while the engine runs.

The duration is a sum of terms with a cost each: a constant, the decodes, the tokens in their contexts, a
constant of steps with prompt tokens, the prompt tokens, and the pairs of a prompt token and a token before
it. Most delays only lengthen a step, so steps that took much longer than expected count less."""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.data.step_plan import Ints
from quire.sched.running import Running

Floats = NDArray[np.float64]

FIRST_TOKENS = 64
"""Prompt tokens beside decodes while nothing is known about their cost."""
_MAX_GROWTH = 2
"""A step may have this multiple of the prompt tokens of the largest remembered step: beyond that, the model
would extrapolate too far."""
_NUM_PLAIN, _NUM_MIXED = 64, 128
"""Numbers of remembered steps without and with prompt tokens."""
_LEAST_MIXED = 4
"""Steps with prompt tokens that are needed for an estimate."""
_NUM_STARTUP = 64
"""Number of first steps, which may have compiled kernels: warnings do not follow from them."""
_FIT_INTERVAL = 8
"""Number of steps after which the costs are fitted again; in the beginning they are fitted after every
step."""
_RIDGE = 1e-6
"""Relative weight of a preference for small costs, which decides between terms that always occur together."""
_SURE_RATIO = 1.3
"""Steps that took longer than this multiple of the estimate count less."""


class Decodes(NamedTuple):
    """The decodes of a step, and the number of computed tokens of the prompt beside them."""

    num: int
    context: int
    """Tokens before the decodes, in total."""
    prompt_start: int = 0

    @classmethod
    def of(cls, running: Running, pending: Ints) -> "Decodes":
        """Return the decodes of the next step, in which the rows in order may compute `pending` tokens."""
        computed, is_decode = running.num_computed[running.order], pending <= 1
        start = int(computed[~is_decode].max(initial=0))
        return cls(int(is_decode.sum()), int(computed[is_decode].sum()), start)


class StepCost:
    """Costs of the terms of a step, in seconds."""

    def __init__(self) -> None:
        self._costs: Floats = np.zeros(6)
        """Seconds per unit of each term."""
        self._plain, self._mixed = _Samples(_NUM_PLAIN), _Samples(_NUM_MIXED)

    def learn(self, chunks: Ints, starts: Ints, seconds: float) -> None:
        """Record the duration of a step that computed `chunks` tokens of each row, after `starts` tokens."""
        if seconds <= 0:
            return
        is_decode = chunks == 1
        prompts, before = chunks[~is_decode].astype(np.float64), starts[~is_decode]
        decodes = Decodes(int(is_decode.sum()), int(starts[is_decode].sum()))
        terms = _terms(decodes, float(prompts.sum()), float((prompts * (before + prompts / 2)).sum()))
        samples = self._mixed if len(prompts) else self._plain
        samples.add(terms, seconds)
        if samples.num_seen <= _FIT_INTERVAL or not samples.num_seen % _FIT_INTERVAL:
            self._fit()

    @property
    def is_known(self) -> bool:
        """Whether enough steps were measured for an estimate of prompts beside decodes. Steps with decodes
        alone may be missing, since there are none while prompts wait."""
        return self._mixed.num_seen >= _LEAST_MIXED

    @property
    def is_reliable(self) -> bool:
        """Whether enough steps were measured to warn of targets that cannot be met."""
        return self.is_known and self._plain.num_seen + self._mixed.num_seen > _NUM_STARTUP

    def step_s(self, decodes: Decodes, num_prompt_tokens: int = 0) -> float:
        """Return the seconds of a step with these decodes and prompt tokens."""
        return float(_terms(decodes, num_prompt_tokens) @ self._costs)

    def prompt_s(self, num_tokens: float, start: float = 0.0) -> float:
        """Return the seconds that the rest of a prompt takes alone, from token `start` to token `num_tokens`.
        The constant costs of its steps are not included."""
        tokens = num_tokens - start
        return float(tokens * self._costs[4] + tokens * (start + tokens / 2) * self._costs[5])

    def num_prompt_tokens(self, seconds: float, decodes: Decodes) -> int:
        """Return the number of prompt tokens that a step has room for if it takes at most `seconds`."""
        if not self.is_known:
            return FIRST_TOKENS
        _, _, _, step_s, token_s, pair_s = self._costs.tolist()
        left_s = seconds - self.step_s(decodes) - step_s
        most = _MAX_GROWTH * max(FIRST_TOKENS, self._mixed.max_prompt_tokens)
        if left_s <= 0:
            return 0
        linear, square = token_s + pair_s * decodes.prompt_start, pair_s / 2
        if linear * most + square * most * most <= left_s:
            return most
        return int(2 * left_s / (linear + math.sqrt(linear * linear + 4 * square * left_s)))

    def _fit(self) -> None:
        """Fit the costs by least squares of the relative errors; no cost is negative."""
        terms = np.concatenate([self._plain.terms, self._mixed.terms])
        seconds = np.concatenate([self._plain.seconds, self._mixed.seconds])
        ratio = seconds / np.maximum(terms @ self._costs, 1e-9) if self.is_known else np.ones(len(seconds))
        weights = np.minimum(1.0, _SURE_RATIO / ratio) ** 2
        scale = np.abs(terms).max(0) + 1e-12
        scaled = terms / scale / seconds[:, None]
        gram, target = (scaled * weights[:, None]).T @ scaled, weights @ scaled
        gram += np.diag(_RIDGE * gram.diagonal())
        used, costs = gram.diagonal() > 0, np.zeros(len(gram))
        while used.any():
            costs[:] = 0.0
            costs[used] = np.linalg.solve(gram[np.ix_(used, used)], target[used])
            if (costs >= 0).all():
                break
            used &= costs > 0
        self._costs = np.maximum(costs, 0.0) / scale


class _Samples:
    """The terms and seconds of the last steps of one kind."""

    def __init__(self, most: int) -> None:
        self._terms, self._seconds = np.zeros((most, 6)), np.zeros(most)
        self.num_seen = 0

    def add(self, terms: Floats, seconds: float) -> None:
        at = self.num_seen % len(self._seconds)
        self._terms[at], self._seconds[at] = terms, seconds
        self.num_seen += 1

    @property
    def terms(self) -> Floats:
        return self._terms[: self.num_seen]

    @property
    def seconds(self) -> Floats:
        return self._seconds[: self.num_seen]

    @property
    def max_prompt_tokens(self) -> int:
        return int(self.terms[:, 4].max(initial=0))


def _terms(decodes: Decodes, prompt_tokens: float, pairs: float | None = None) -> Floats:
    """Return the terms of a step. `pairs` defaults to those of a single prompt."""
    if pairs is None:
        pairs = prompt_tokens * (decodes.prompt_start + prompt_tokens / 2)
    return np.array([1.0, decodes.num, decodes.context, prompt_tokens > 0, prompt_tokens, pairs])

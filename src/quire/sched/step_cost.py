"""StepCost: a model of the duration of a step, fitted to finished steps while the engine runs.

The duration is a sum of terms with a cost each: a constant, the decodes, the tokens in their contexts, a
constant of steps with prompt tokens, the prompt tokens, the pairs of a prompt token and a token before it,
and the tokens before the prompt tokens, however few these are. Real devices deviate from such a sum, for
instance where steps become too large for a CUDA graph. So the sum is multiplied by a factor for each class of
steps, which are those with about the same number of prompt tokens, and each class has its own remembered
steps. Most delays only lengthen a step, so steps that took much longer than others of their class count less.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.data.step_plan import Ints
from quire.sched.running import Running

Floats = NDArray[np.float64]

FIRST_TOKENS = 64
"""Number of prompt tokens that a step computes beside decodes while their cost has not been measured."""
_MAX_GROWTH = 2
"""A step may have this multiple of the prompt tokens of the largest remembered step: beyond that, the model
would extrapolate too far."""
_NUM_PLAIN, _NUM_MIXED = 64, 24
"""Numbers of remembered steps: of those without prompt tokens, and of each class with prompt tokens."""
_MEMORY = 256
"""Number of later steps with prompt tokens after which a remembered step is forgotten, so that a class of
steps that was slow once is tried again."""
_NUM_TERMS, _NUM_CLASSES = 7, 24
_LEAST_MIXED = 4
"""Number of steps with prompt tokens that are needed for an estimate."""
_NUM_STARTUP = 64
"""Number of first steps for which no warnings are logged: their durations may include the compilation of
kernels."""
_FIT_INTERVAL, _SURPRISE = 16, 1.5
"""Number of steps after which the costs are fitted again. In the beginning they are fitted after every step,
and always after a step that took more than this multiple of what was expected."""
_CONTRADICTION = 3.0
"""A step that is faster than expected by this factor shows that the remembered steps of its class were slow
for another reason, for instance the compilation of kernels. They are forgotten."""
_RIDGE = 1e-6
"""Relative weight of a preference for small costs, which decides between terms that always occur together."""
_SURE_RATIO = 1.3
"""A step counts less in the fit if its ratio of measured to estimated duration exceeds the median ratio of
its class by this factor."""


class Decodes(NamedTuple):
    """Number and context of the decodes of a step, on which its duration depends. `prompt_start` is the
    largest number of tokens already computed of any prompt that the same step continues."""

    num: int
    context: int
    """Total context length of all decodes, in tokens."""
    prompt_start: int = 0

    @classmethod
    def of(cls, running: Running, pending: Ints) -> "Decodes":
        """Return the decodes of the next step. `pending` is the number of tokens that each row of
        `running.order` may compute; a row with more than one token is a prompt."""
        computed, is_decode = running.num_computed[running.order], pending <= 1
        start = int(computed[~is_decode].max(initial=0))
        return cls(int(is_decode.sum()), int(computed[is_decode].sum()), start)


class StepCost:
    """Estimates the seconds that a step takes: a sum of terms with fitted costs, times a factor for the class
    of the step, which depends on its number of prompt tokens."""

    def __init__(self) -> None:
        self._costs: Floats = np.zeros(_NUM_TERMS)
        """Seconds per unit of each term."""
        self._classes = [_Samples(_NUM_MIXED if number else _NUM_PLAIN) for number in range(_NUM_CLASSES)]
        self._factors = [1.0] * _NUM_CLASSES
        """By class of steps: median ratio of the measured duration to the sum of the terms."""
        self._num_mixed = self._max_prompt_tokens = 0
        self._small_at = -_MEMORY
        """`_num_mixed` at the last step with few prompt tokens."""

    def learn(self, chunks: Ints, starts: Ints, seconds: float) -> None:
        """Record that a step took `seconds`. By row, `chunks` is the number of tokens that it computed, and
        `starts` the number of tokens that had been computed before it."""
        if seconds <= 0:
            return
        is_decode = chunks == 1
        prompts, before = chunks[~is_decode].astype(np.float64), starts[~is_decode]
        num_tokens = int(prompts.sum())
        decodes = Decodes(int(is_decode.sum()), int(starts[is_decode].sum()), int(before.max(initial=0)))
        terms = _terms(decodes, num_tokens, float((prompts * (before + prompts / 2)).sum()))
        samples = self._classes[_class_of(num_tokens)]
        self._num_mixed += num_tokens > 0
        if 0 < num_tokens <= 2 * FIRST_TOKENS:
            self._small_at = self._num_mixed
        expected_s = self._factors[_class_of(num_tokens)] * float(terms @ self._costs)
        is_faster = self._num_mixed > _FIT_INTERVAL and _CONTRADICTION * seconds < expected_s
        if is_faster:
            samples.clear()
        samples.add(terms, seconds, self._num_mixed)
        self._max_prompt_tokens = max(self._max_prompt_tokens, num_tokens)
        num_seen = self._num_mixed if num_tokens else samples.num_seen
        is_slower = seconds > _SURPRISE * expected_s
        if num_seen <= _FIT_INTERVAL or not num_seen % _FIT_INTERVAL or is_slower or is_faster:
            self._fit()

    @property
    def is_known(self) -> bool:
        """Whether enough steps were measured for an estimate of prompts beside decodes. Steps with decodes
        alone may be missing, since there are none while prompts wait."""
        return self._num_mixed >= _LEAST_MIXED

    @property
    def is_reliable(self) -> bool:
        """Whether enough steps were measured to warn of targets that cannot be met. Without steps of decodes
        alone, their constant cost could be that of steps with prompt tokens."""
        num_plain = self._classes[0].num_seen
        return self.is_known and num_plain >= _NUM_PLAIN // 4 and num_plain + self._num_mixed > _NUM_STARTUP

    @property
    def num_since_small(self) -> int:
        """Return the number of steps with prompt tokens since one with few of them, which measured
        `least_s`."""
        return self._num_mixed - self._small_at

    def step_s(self, decodes: Decodes, num_prompt_tokens: int = 0) -> float:
        """Return the seconds of a step with these decodes and prompt tokens."""
        factor = self._factors[_class_of(num_prompt_tokens)]
        return factor * float(_terms(decodes, num_prompt_tokens) @ self._costs)

    def least_s(self, decodes: Decodes) -> float:
        """Return the seconds of a step with these decodes and some prompt tokens, without the seconds that
        grow with the number of prompt tokens."""
        fixed_s, _, _ = self._parts(decodes)
        return self._factors[_class_of(FIRST_TOKENS)] * fixed_s

    def _parts(self, decodes: Decodes) -> tuple[float, float, float]:
        """Return the estimated seconds of a step with these decodes as a polynomial in its number of prompt
        tokens: the constant, linear and quadratic coefficients."""
        _, _, _, step_s, token_s, pair_s, start_s = self._costs.tolist()
        fixed_s = float(_terms(decodes, 0) @ self._costs) + step_s + start_s * decodes.prompt_start
        return fixed_s, token_s + pair_s * decodes.prompt_start, pair_s / 2

    def prompt_s(self, num_tokens: float, start: float = 0.0) -> float:
        """Return the seconds that the rest of a prompt takes alone, from token `start` to token `num_tokens`,
        in steps that are as large as possible. The constant costs of its steps are not included."""
        tokens = num_tokens - start
        factor = self._factors[_class_of(int(min(tokens, self._max_prompt_tokens)))]
        return factor * float(tokens * self._costs[4] + tokens * (start + tokens / 2) * self._costs[5])

    def num_prompt_tokens(self, seconds: float, decodes: Decodes) -> int:
        """Return the number of prompt tokens that a step has room for if it takes at most `seconds`."""
        if not self.is_known:
            return FIRST_TOKENS
        fixed_s, linear, square = self._parts(decodes)
        most = _MAX_GROWTH * max(FIRST_TOKENS, self._max_prompt_tokens)
        for number in range(_class_of(most), 0, -1):
            left_s = seconds / self._factors[number] - fixed_s
            tokens = min(most, (1 << number) - 1)  # the largest step of this class
            if left_s <= 0:
                continue
            if linear * tokens + square * tokens * tokens > left_s:
                tokens = int(2 * left_s / (linear + math.sqrt(linear * linear + 4 * square * left_s)))
            if _class_of(tokens) == number:
                return tokens
        return 0

    def _fit(self) -> None:
        """Fit the costs by least squares of the relative errors; no cost is negative."""
        for samples in self._classes[1:]:
            samples.forget(self._num_mixed - _MEMORY)
        known = [samples for samples in self._classes if len(samples.seconds)]
        terms = np.concatenate([samples.terms for samples in known])
        seconds = np.concatenate([samples.seconds for samples in known])
        weights = np.concatenate([samples.weights(self._costs) for samples in known])
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
        self._factors[0] = self._classes[0].factor(self._costs) or 1.0
        factors = [samples.factor(self._costs) for samples in self._classes[1:]]
        factor = next(filter(None, factors), 1.0)  # of the next smaller class that has steps, or the first
        for number, measured in enumerate(factors, 1):
            self._factors[number] = factor = measured or factor


class _Samples:
    """The last steps of one class, each with its measured seconds and its terms (the values that are
    multiplied by the fitted costs)."""

    def __init__(self, most: int) -> None:
        self._terms, self._seconds = np.zeros((most, _NUM_TERMS)), np.zeros(most)
        self._added_at, self._first = np.full(most, -1), 0
        self.num_seen = 0

    def add(self, terms: Floats, seconds: float, now: int) -> None:
        """Add a step at the time `now`, counted in steps with prompt tokens. It replaces the oldest step if
        there are too many."""
        at = self.num_seen % len(self._seconds)
        self._terms[at], self._seconds[at], self._added_at[at] = terms, seconds, now
        self.num_seen += 1

    def clear(self) -> None:
        """Forget all steps."""
        self._added_at[:] = -1

    def forget(self, until: int) -> None:
        """Forget the steps that were added before the time `until`."""
        self._first = max(0, until)

    @property
    def terms(self) -> Floats:
        return self._terms[self._added_at >= self._first]

    @property
    def seconds(self) -> Floats:
        return self._seconds[self._added_at >= self._first]

    def ratios(self, costs: Floats) -> Floats:
        """Return the ratio of the measured seconds to the estimated seconds of each step."""
        return self.seconds / np.maximum(self.terms @ costs, 1e-9)

    def factor(self, costs: Floats) -> float | None:
        """Return the factor of the class: the median of `ratios` and of two additional ratios of 1, since a
        few steps may be delayed. None without steps."""
        return _median([1.0, 1.0, *self.ratios(costs).tolist()]) if len(self.seconds) else None

    def weights(self, costs: Floats) -> Floats:
        """Return the weight of each step in the fit; it is lower for steps that were much slower than others
        of the class."""
        ratios = self.ratios(costs)
        return np.minimum(1.0, _SURE_RATIO * _median(ratios.tolist()) / ratios) ** 2


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _class_of(num_prompt_tokens: int) -> int:
    """Return the class of a step: 0 without prompt tokens, otherwise the number of bits of their number."""
    return min(num_prompt_tokens.bit_length(), _NUM_CLASSES - 1)


def _terms(decodes: Decodes, prompt_tokens: int, pairs: float | None = None) -> Floats:
    """Return the values that the fitted costs of a step are multiplied by, such as its number of decodes.
    `pairs` is the number of pairs of a prompt token and a token before it, by default for a single prompt."""
    if pairs is None:
        pairs = prompt_tokens * (decodes.prompt_start + prompt_tokens / 2)
    start = decodes.prompt_start if prompt_tokens else 0
    has_prompt = prompt_tokens > 0
    return np.array([1.0, decodes.num, decodes.context, has_prompt, prompt_tokens, pairs, start])

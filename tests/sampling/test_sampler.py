"""Tests of the sampler against a slow reference, one request at a time, and of batch invariance."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.data.params import SamplingParams
from quire.data.step_plan import Ints, Masks, RowLogprobs
from quire.errors import ConfigError
from quire.sampling.rows import SamplingRows
from quire.sampling.sampler import Sampler

VOCAB, MAX_ROWS, MAX_LEN = 700, 40, 24
STOP_IDS = [3, 9]
INF = math.inf
ROUNDING = 1e-6

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=(pytest.mark.gpu, CUDA))]


class Drawn(NamedTuple):
    """Tokens and logprobs by batch position."""

    token_ids: Ints
    logprobs: dict[int, RowLogprobs]


@dataclass
class Case:
    """One request in the middle of its generation."""

    params: SamplingParams
    prompt: list[int]
    output: list[int]
    logits: Tensor
    seed: int = 1

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.output)


def case(number: int, **fields: Any) -> Case:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, 12, (2, 8), generator=generator)
    prompt_len, output_len = (int(n) for n in torch.randint(1, 9, (2,), generator=generator))
    logits = torch.randn(VOCAB, generator=generator) * 2
    logits[:12] += 3
    if number % 2:  # as a bfloat16 model returns them: with many ties
        logits = logits.bfloat16().float()
    params = SamplingParams(**fields)
    return Case(params, ids[0, :prompt_len].tolist(), ids[1, :output_len].tolist(), logits, seed=number)


def sample(cases: list[Case], *, mode: str = "raw_logprobs", device: str = "cpu", first: int = 0) -> Drawn:
    """Sample the cases in this order; case i is in row (first + 7 * i) % MAX_ROWS."""
    state = SamplingRows(MAX_ROWS, VOCAB, torch.device(device))
    tokens = np.zeros((MAX_ROWS, MAX_LEN), np.int32)
    num_tokens, prompt_lens = np.zeros(MAX_ROWS, np.int32), np.zeros(MAX_ROWS, np.int32)
    rows = np.array([(first + 7 * i) % MAX_ROWS for i in range(len(cases))], np.int32)
    for row, one in zip(rows.tolist(), cases, strict=True):
        state.admit(row, one.params, prompt_len=len(one.prompt), seed=one.seed, stop_ids=STOP_IDS)
        tokens[row, : one.position] = one.prompt + one.output
        num_tokens[row], prompt_lens[row] = one.position, len(one.prompt)
    logits = torch.stack([one.logits for one in cases]).to(device)
    sampler = Sampler(VOCAB, torch.device(device), mode)
    sampled = sampler(logits, rows, state, tokens, num_tokens, prompt_lens)
    by_place = {
        place: sampled.logprobs[row][0] for place, row in enumerate(rows.tolist()) if row in sampled.logprobs
    }
    return Drawn(sampled.token_ids.int().cpu().numpy(), by_place)


def reference_logits(one: Case) -> list[float]:
    """Return the processed logits, in the documented order, in plain Python."""
    params, logits = one.params, one.logits.double().tolist()
    if params.allowed_token_ids is not None:
        logits = [x if i in params.allowed_token_ids else -INF for i, x in enumerate(logits)]
    for word in params.bad_words_token_ids or []:
        start = len(one.output) - len(word) + 1
        if start >= 0 and one.output[start:] == word[:-1]:
            logits[word[-1]] = -INF
    if len(one.output) < params.min_tokens:
        for token in STOP_IDS:
            logits[token] = -INF
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    for token in set(one.prompt + one.output):
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in set(one.output):
        logits[token] -= params.frequency_penalty * one.output.count(token) + params.presence_penalty
    return logits if params.greedy else limited([x / params.temperature for x in logits], params)


def limited(logits: list[float], params: SamplingParams) -> list[float]:
    peak = max(logits)
    floor = peak + math.log(params.min_p) if params.min_p else -INF
    ranked = sorted((x for x in logits if x >= floor), reverse=True)
    if params.top_k > 0:
        floor = ranked[: params.top_k][-1]
        ranked = [x for x in ranked if x >= floor]
    if params.top_p < 1:
        wanted, mass = params.top_p * sum(math.exp(x - peak) for x in ranked), 0.0
        for x in ranked:
            if mass >= wanted:
                break
            floor, mass = x, mass + math.exp(x - peak)
    return [x if x >= floor else -INF for x in logits]


def reference_number(seed: int, position: int) -> float:
    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    return (mix((mix(seed) + 0x9E3779B97F4A7C15 * (position + 1)) % 2**64) >> 11) * 2.0**-53


def check_token(one: Case, token: int) -> None:
    """Check that the token has the largest logit, or that the row's random number lies in its interval.

    The borders have a tolerance for float32.
    """
    logits = reference_logits(one)
    peak = max(logits)
    if one.params.greedy:
        assert token == logits.index(peak)
        return
    weights = [math.exp(x - peak) for x in logits]
    total = math.fsum(weights)
    start = math.fsum(weights[:token]) / total
    number = reference_number(one.seed, one.position)
    assert weights[token] > 0 and start - ROUNDING <= number <= start + weights[token] / total + ROUNDING


FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "plain": {},
    "hot": {"temperature": 2.0},
    "cold": {"temperature": 0.3},
    "top_k": {"top_k": 5},
    "top_k of one": {"top_k": 1},
    "top_k beyond the vocabulary": {"top_k": VOCAB + 5},
    "top_p": {"top_p": 0.8},
    "tiny top_p": {"top_p": 1e-5},
    "min_p": {"min_p": 0.05},
    "all limits": {"top_k": 30, "top_p": 0.9, "min_p": 0.01, "temperature": 0.7},
    "repetition": {"repetition_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.2},
    "presence": {"presence_penalty": -1.5},
    "all penalties": {"repetition_penalty": 0.8, "frequency_penalty": 0.5, "presence_penalty": 1.0},
    "greedy penalties": {"temperature": 0, "repetition_penalty": 3.0, "presence_penalty": 2.0},
    "bias": {"logit_bias": {5: 6.0, 600: 9.0, 0: -100.0}},
    "allowed": {"allowed_token_ids": [4, 100, 650]},
    "greedy allowed": {"temperature": 0, "allowed_token_ids": [4, 100, 650]},
    "min_tokens": {"min_tokens": 16},
    "bad words": {"bad_words_token_ids": [[0], [1], *([a, b] for a in range(12) for b in (2, 3, 4))]},
    "everything": {
        "temperature": 1.3, "top_k": 40, "top_p": 0.95, "min_p": 0.001, "repetition_penalty": 1.2,
        "frequency_penalty": 0.3, "presence_penalty": 0.3, "logit_bias": {4: 3.0}, "min_tokens": 16,
        "allowed_token_ids": list(range(0, 700, 2)), "bad_words_token_ids": [[2], [4, 6]],
    },
}  # fmt: skip


def asking_all(fields: dict[str, Any]) -> dict[str, Any]:
    return {**fields, "logprobs": -1}


def check_against_reference(one: Case, sampled: Drawn, place: int) -> None:
    expected = reference_logits(one)
    actual = sampled.logprobs[place]
    values = dict(zip(actual.token_ids, actual.logprobs, strict=True))
    assert {i for i, x in values.items() if x == -INF} == {i for i, x in enumerate(expected) if x == -INF}
    assert [values[i] for i in range(VOCAB)] == pytest.approx(expected, abs=1e-4)
    assert sampled.token_ids[place] == actual.token_ids[0]
    check_token(one, actual.token_ids[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FEATURES)
def test_each_feature_alone_matches_the_reference(name: str, device: str) -> None:
    cases = [case(number, **asking_all(FEATURES[name])) for number in range(3)]
    sampled = sample(cases, mode="processed_logits", device=device)
    for place, one in enumerate(cases):
        check_against_reference(one, sampled, place)


@pytest.mark.parametrize("device", DEVICES)
def test_all_features_in_one_batch_match_the_reference(device: str) -> None:
    cases = [case(50 + number, **asking_all(fields)) for number, fields in enumerate(FEATURES.values())]
    sampled = sample(cases, mode="processed_logits", device=device)
    for place, one in enumerate(cases):
        check_against_reference(one, sampled, place)


KINDS = st.lists(st.tuples(st.sampled_from(sorted(FEATURES)), st.integers(0, 500)), min_size=1, max_size=33)


@settings(max_examples=30)
@given(kinds=KINDS, order=st.randoms(use_true_random=False), first=st.integers(0, MAX_ROWS - 1))
def test_sample_does_not_depend_on_batch_row_or_order(kinds: Any, order: Any, first: int) -> None:
    cases = [case(number, **FEATURES[name]) for name, number in kinds]
    alone = [sample([one]).token_ids[0] for one in cases[:4]]
    together = sample(cases).token_ids.tolist()
    assert together[:4] == alone
    shuffled = list(range(len(cases)))
    order.shuffle(shuffled)
    second = sample([cases[i] for i in shuffled], first=first).token_ids.tolist()
    assert [second[shuffled.index(i)] for i in range(len(cases))] == together


def chi_square(params: SamplingParams, logits: Tensor, samples: int = 3960) -> tuple[float, int]:
    """Return the chi-square of one request's samples at many positions, and its degrees of freedom."""
    vocab, batch = len(logits), MAX_ROWS
    state = SamplingRows(batch, vocab, torch.device("cpu"))
    sampler = Sampler(vocab, torch.device("cpu"))
    rows, tokens = np.arange(batch, dtype=np.int32), np.zeros((batch, 1), np.int32)
    for row in range(batch):
        state.admit(row, params, prompt_len=0, seed=11, stop_ids=[])
    counts = np.zeros(vocab)
    for start in range(0, samples, batch):
        positions = rows + np.int32(start)
        sampled = sampler(
            logits.repeat(batch, 1), rows, state, tokens, positions, np.zeros_like(rows)
        ).token_ids
        counts += np.bincount(sampled, minlength=vocab)
    expected = (
        torch.tensor(limited((logits.double() / params.temperature).tolist(), params)).softmax(-1).numpy()
    )
    assert not counts[expected == 0].any()
    live = expected > 0
    wanted = expected[live] * counts.sum()
    return float(((counts[live] - wanted) ** 2 / wanted).sum()), int(live.sum()) - 1


@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 0.5}, {"top_k": 6}, {"top_p": 0.8}, {"min_p": 0.2}], ids=str
)
def test_samples_follow_the_distribution(fields: dict[str, Any]) -> None:
    """Check the temperature, the normalization and both ends of the interval."""
    statistic, degrees = chi_square(SamplingParams(**fields), torch.linspace(-1, 1, 16) ** 2 * 2.5)
    assert statistic < degrees + 5 * math.sqrt(2 * degrees)


def test_seed_samples_differ_by_position_and_by_seed() -> None:
    one = case(1)
    positions, seeds = [], []
    for i in range(30):
        positions.append(
            Case(one.params, one.prompt[:1], [1] * (i % 20), torch.zeros(VOCAB), seed=1 + i // 20)
        )
        seeds.append(Case(one.params, one.prompt[:1], [], torch.zeros(VOCAB), seed=i))
    for cases in (positions, seeds):
        assert len(set(sample(cases).token_ids.tolist())) > 25


def test_negative_seeds_are_valid() -> None:
    one = case(1)
    one.seed = -7
    assert 0 <= sample([one]).token_ids[0] < VOCAB


@pytest.mark.parametrize("device", DEVICES)
def test_invalid_logits_do_not_affect_other_rows(device: str) -> None:
    kinds = ("greedy", "plain", "top_p", "top_k", "everything", "all limits")
    good = [case(i, **FEATURES[name], logprobs=2) for i, name in enumerate(kinds)]
    alone = sample(good, device=device)
    for value in (math.nan, -INF, INF):
        broken = [case(10 + i, **FEATURES[name], logprobs=2) for i, name in enumerate(kinds)]
        for one in broken:
            one.logits.fill_(value)
        broken[0].logits[5:] = 1.0
        mixed = sample([one for pair in zip(good, broken, strict=True) for one in pair], device=device)
        assert mixed.token_ids[::2].tolist() == alone.token_ids.tolist()
        assert ((mixed.token_ids >= 0) & (mixed.token_ids < VOCAB)).all()
        assert not any(math.isnan(x) for actual in mixed.logprobs.values() for x in actual.logprobs)


def test_impossible_constraints_still_give_a_token() -> None:
    one = case(1, allowed_token_ids=[4], bad_words_token_ids=[[4]])
    assert 0 <= sample([one]).token_ids[0] < VOCAB


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"])
def test_logprobs_mode_decides_what_is_reported(mode: str) -> None:
    """Check that raw values are before, and processed ones after, adjustments and limits."""
    kinds = (("plain", 4), ("everything", 4), ("greedy penalties", 0), ("top_k", 3))
    cases = [case(2 * i, **FEATURES[name], logprobs=count) for i, (name, count) in enumerate(kinds)]
    sampled = sample([case(99, temperature=0), *cases], mode=mode)
    assert sorted(sampled.logprobs) == [1, 2, 3, 4]
    for place, one in enumerate(cases, start=1):
        logits = one.logits.double() if mode.startswith("raw") else torch.tensor(reference_logits(one))
        values = logits.log_softmax(-1) if mode.endswith("logprobs") else logits
        actual, token = sampled.logprobs[place], int(sampled.token_ids[place])
        best = values.topk(one.params.logprobs or 0)
        assert actual.token_ids == [token, *best.indices.tolist()]
        assert actual.logprobs == pytest.approx([values[token].item(), *best.values.tolist()], abs=1e-4)
        assert actual.rank == int((values >= values[token]).sum())


def test_listed_logprobs_beside_top_logprobs() -> None:
    cases = [
        case(1, logprobs=2),
        case(2, logprob_token_ids=[500, 3]),
        case(3),
        case(4, logprob_token_ids=[7]),
    ]
    sampled = sample(cases)
    assert sorted(sampled.logprobs) == [0, 1, 3]
    for place, ids in ((1, [500, 3]), (3, [7])):
        actual = sampled.logprobs[place]
        assert actual.token_ids == [sampled.token_ids[place], *ids]
        expected = cases[place].logits.double().log_softmax(-1)[actual.token_ids]
        assert actual.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


def test_reused_row_samples_like_a_new_one() -> None:
    """Check that release leaves nothing."""
    state, fresh = (SamplingRows(4, VOCAB, torch.device("cpu")) for _ in range(2))
    one = case(5)
    state.admit(
        2, case(1, **FEATURES["everything"], logprobs=3).params, prompt_len=1, seed=3, stop_ids=STOP_IDS
    )
    state.release(2)
    tokens, counts = np.ones((4, MAX_LEN), np.int32), np.full(4, one.position, np.int32)
    results = []
    for rows in (state, fresh):
        rows.admit(2, one.params, prompt_len=1, seed=5, stop_ids=STOP_IDS)
        sampler, row = Sampler(VOCAB, torch.device("cpu")), np.array([2], np.int32)
        results.append(sampler(one.logits[None].clone(), row, rows, tokens, counts, np.ones(4, np.int32)))
    assert results[0].token_ids == results[1].token_ids
    assert results[0].logprobs == results[1].logprobs == {}


def test_empty_batch() -> None:
    state = SamplingRows(2, VOCAB, torch.device("cpu"))
    none, zeros = np.empty(0, np.int32), np.zeros(2, np.int32)
    sampled = Sampler(VOCAB, torch.device("cpu"))(
        torch.empty(0, VOCAB), none, state, np.zeros((2, 4), np.int32), zeros, zeros
    )
    assert len(sampled.token_ids) == 0 and sampled.logprobs == {}


def test_unknown_mode_error_lists_the_known_modes() -> None:
    with pytest.raises(ConfigError, match="raw_logprobs"):
        Sampler(VOCAB, torch.device("cpu"), "rawest")


@pytest.mark.parametrize("device", DEVICES)
def test_masked_rows_sample_allowed_tokens_and_others_are_unchanged(device: str) -> None:
    """Check masks with one word less or more; a row whose only allowed token is banned gets it."""
    random = np.random.default_rng(0)
    cases = [case(number, logprobs=2) for number in range(6)]
    cases[4] = case(4, bad_words_token_ids=[[5]])
    state = SamplingRows(MAX_ROWS, VOCAB, torch.device(device))
    tokens, lens = np.ones((MAX_ROWS, MAX_LEN), np.int32), np.full(MAX_ROWS, 9, np.int32)
    rows = np.array([9, 3, 7, 1, 30, 2], np.int32)
    for row, item in zip(rows.tolist(), cases, strict=True):
        state.admit(row, item.params, prompt_len=1, seed=row, stop_ids=STOP_IDS)
    allowed = random.random((3, VOCAB)) < 0.01
    allowed[:, 5], allowed[2] = True, False
    allowed[2, 5] = True
    for width in (VOCAB - 44, VOCAB + 100):  # words: one more, and fewer than the vocabulary needs
        padded = np.zeros((3, -(-width // 32) * 32), np.bool_)
        kept = min(VOCAB, padded.shape[1])
        padded[:, :kept] = allowed[:, :kept]
        bits = np.packbits(padded, axis=1, bitorder="little").view("<u4")
        masks = Masks(np.array([3, 1, 30], np.int32), bits)
        results = []
        for row_masks in (None, masks):
            logits = torch.stack([item.logits for item in cases]).to(device)
            sampler = Sampler(VOCAB, torch.device(device))
            plain = (logits, rows, state, tokens, lens, np.ones(MAX_ROWS, np.int32))
            results.append(sampler(*plain, masks=row_masks or Masks()))
        free, bound = (result.token_ids.tolist() for result in results)
        assert [bound[at] for at in (0, 2, 5)] == [free[at] for at in (0, 2, 5)]
        assert padded[0, bound[1]] and padded[1, bound[3]] and bound[4] == 5
        assert results[1].logprobs[9] == results[0].logprobs[9]
        assert results[1].logprobs[3][0].logprobs[0] > results[0].logprobs[3][0].logprobs[0]

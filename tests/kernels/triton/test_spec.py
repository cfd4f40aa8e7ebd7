"""Tests of the kernels for successive steps on the device against their references."""

import random

import pytest
import torch
from interpreter import more
from spec_reference import derive_reference, look_up_reference, verify_reference

from quire.kernels.triton import spec
from quire.kernels.triton.sampling import FREE, LATER
from quire.kernels.triton.spec import SpecStep, SpecTokens
from quire.worker.spec import drafter
from quire.worker.spec.drafter import SequenceEnds

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS, WIDTH, BLOCK_SIZE, GROUPS = 9, 48, 4, 3


def known_of(rng: random.Random, most: int, vocab: int = 3) -> SpecTokens:
    history = torch.randint(0, vocab, (ROWS, WIDTH), dtype=torch.int32)
    lengths = torch.tensor([rng.randint(1, WIDTH - most - 1) for _ in range(ROWS)], dtype=torch.int32)
    guessed = torch.randint(0, vocab, (ROWS, most))
    counts = torch.tensor([rng.randint(0, most) for _ in range(ROWS)], dtype=torch.int32)
    return SpecTokens(history, lengths, guessed, counts, WIDTH, most)


def step_of(rng: random.Random, most: int, padded: bool) -> tuple[SpecStep, list[int]]:
    """Return a step of rows in any order: decodes with drafts, and prompt chunks with and without sampling.

    `padded`: decodes alone, each with the same number of positions.
    """
    rows = rng.sample(range(ROWS), rng.randint(1, ROWS))
    kinds = [rng.choice(["decode", "decode", "prompt", "chunk"]) for _ in rows]
    if padded:
        kinds = [rng.choice(["decode", "decode", "padding"]) for _ in rows]
    planned = [rng.randint(0, most) if kind == "decode" else -1 for kind in kinds]
    lens = [most + 1 if padded else 1 + count if count >= 0 else rng.randint(1, 7) for count in planned]
    draws, total = [], 0
    for kind, count in zip(kinds, planned, strict=True):
        draws.append(total if kind in ("decode", "prompt") else -1)
        total += {"decode": 1 + count, "prompt": 1}.get(kind, 0)
    starts = torch.tensor([0, *lens]).cumsum(0)
    made = SpecStep(
        *(torch.tensor(part, dtype=torch.int32) for part in (starts.tolist(), rows, planned, draws))
    )
    return made, [int(starts[-1]), total]


def on_device(values: SpecTokens | SpecStep) -> SpecTokens | SpecStep:
    return type(values)(*(v.to(DEVICE, copy=True) if isinstance(v, torch.Tensor) else v for v in values))


def copies(values: SpecTokens | SpecStep) -> SpecTokens | SpecStep:
    return type(values)(*(v.clone() if isinstance(v, torch.Tensor) else v for v in values))


@pytest.mark.parametrize("most", [3, *more(1, 4)])
@pytest.mark.parametrize("padded", [False, True])
def test_inputs_are_derived_from_rows(most: int, padded: bool) -> None:
    """Check for missing drafts, positions beyond max_model_len, slots of another group, and stale prompt
    inputs.
    """
    rng = random.Random(most)
    torch.manual_seed(most)
    tables = torch.randint(1, 99, (GROUPS, ROWS, WIDTH // BLOCK_SIZE), dtype=torch.int32)
    for _ in range(4):
        known = known_of(rng, most)
        step, (num_tokens, _) = step_of(rng, most, padded)
        memory = torch.full((2 + GROUPS, -(-num_tokens // 8) * 8), -7)
        lens = torch.full((len(step.rows),), -7, dtype=torch.int32)
        actual = memory.to(DEVICE, copy=True), lens.to(DEVICE, copy=True)
        rest = BLOCK_SIZE, WIDTH - 8
        derive_reference(known, step, memory[0], memory[1], lens, list(memory[2:]), tables, *rest)
        args = on_device(known), on_device(step), actual[0][0], actual[0][1], actual[1]
        spec.derive(*args, list(actual[0][2:]), tables.to(DEVICE), *rest)
        assert torch.equal(actual[0].cpu()[:, :num_tokens], memory[:, :num_tokens])
        assert torch.equal(actual[1].cpu(), lens)


@pytest.mark.parametrize("most", [1, 3, 4])
def test_samples_count_up_to_the_first_rejected_draft(most: int) -> None:
    """Check for unplanned drafts, samples after a rejection, and rows without samples."""
    rng = random.Random(most)
    torch.manual_seed(most)
    for padded in (False, True, False):
        known = known_of(rng, most, vocab=2)
        step, (_, num_samples) = step_of(rng, most, padded)
        drawn = torch.randint(0, 2, (num_samples,))
        there, arguments = on_device(known), (on_device(step), drawn.to(DEVICE))
        later, now = (torch.full((4,), item, dtype=torch.int32).to(DEVICE) for item in (LATER, FREE))
        spec.verify(there, *arguments, later=later)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(there[:4], known[:4], strict=True))
        actual = spec.verify(there, *arguments, later=None if padded else now).cpu()
        assert torch.equal(actual, verify_reference(known, step, drawn))
        assert all(torch.equal(a.cpu(), b) for a, b in zip(there[:4], known[:4], strict=True))


def test_synthetic_acceptance_rate() -> None:
    """Check that accepted drafts and the sample after them are kept, whatever was sampled."""
    count, most = 60, 2
    history, lengths = torch.zeros(count, 16, dtype=torch.int32), torch.full((count,), 5, dtype=torch.int32)
    guessed, counts = torch.full((count, most), 8), torch.full((count,), most, dtype=torch.int32)
    known = on_device(SpecTokens(history, lengths, guessed, counts, 16, most))
    rows = torch.arange(count, dtype=torch.int32)
    starts = torch.arange(count + 1, dtype=torch.int32) * 3
    step = on_device(SpecStep(starts, rows, torch.full_like(rows, most), starts[:-1]))
    rates, seeds = torch.tensor([0.75, 0.5]).to(DEVICE), torch.arange(3 * count).to(DEVICE)
    out = spec.verify(known, step, torch.full((3 * count,), 9).to(DEVICE), seeds, rates).cpu()
    assert (out[:count] >> spec.DRAFTED == most).all()
    numbers = out[:count] & 0xFFFF
    shares = [(numbers > at).float().mean().item() for at in range(3)]
    assert shares == pytest.approx([1.0, 0.75, 0.5], abs=0.15)
    for row, number in enumerate(numbers.tolist()):
        assert known.history[row, 5 : 5 + number].tolist() == [8] * (number - 1) + [9]


@pytest.mark.parametrize("least", [2, *more(1, 5)])
def test_longest_matching_context_is_found(least: int) -> None:
    """Check matches in other programs' parts, later and shorter matches, overlapping texts and invalid
    tokens.
    """
    rng, most, width = random.Random(least), 4, 2500
    torch.manual_seed(least)
    history = torch.randint(0, 3, (6, width), dtype=torch.int32)
    history[1, : width // 2] = -1
    history[2] = 1
    history[3] = torch.arange(width)
    history[4, 40:100] = history[4, 1900:1960]
    lengths = torch.tensor([2000, 1400, 77, 900, 1960, 1], dtype=torch.int32)
    known = SpecTokens(
        history, lengths, torch.zeros(6, most, dtype=torch.int64), lengths.clone(), width, most
    )
    rows = torch.tensor([4, 0, 3, 2, 1, 5], dtype=torch.int32)
    none = torch.full_like(rows, -1)
    draws = torch.tensor([0, 1, 2, 3, rng.choice([-1, 4]), 5], dtype=torch.int32)
    step, there = SpecStep(none, rows, none, draws), on_device(known)
    scratch = torch.zeros(2, 8, dtype=torch.int64, device=DEVICE)
    spec.look_up(there, on_device(step), scratch, least)
    look_up_reference(known, step, least)
    assert torch.equal(there.num_drafts.cpu(), known.num_drafts) and not scratch.any()
    for row, count in enumerate(known.num_drafts.tolist()):
        assert there.drafts[row, :count].tolist() == known.drafts[row, :count].tolist(), row
    assert known.num_drafts[4] == most and known.drafts[4].tolist() == history[4, 100:104].tolist()


@pytest.mark.parametrize("width", [1, 2])
def test_drafts_have_their_own_slots(width: int) -> None:
    """Check sequences at the limit, short texts, and slots of other groups."""
    torch.manual_seed(width)
    count, tables = 7, torch.randint(1, 99, (GROUPS, ROWS, WIDTH // BLOCK_SIZE), dtype=torch.int32)
    last = torch.tensor([0, 1, 5, 17, 30, 41, 46])
    room = torch.tensor([48, 2, 8, 18, 0, 44, 48])
    rows = torch.randperm(ROWS)[:count].int()
    for ahead in (0, 1, 3):
        ends = SequenceEnds(rows, torch.zeros(count, 2), last, room, tables)
        expected = drafter.place(ends, ahead, width, BLOCK_SIZE)
        arguments = (part.to(DEVICE) for part in (rows, last, room, tables))
        actual = spec.place(*arguments, ahead, width, BLOCK_SIZE)
        assert torch.equal(actual[0].cpu(), expected[0]) and torch.equal(actual[1].cpu(), expected[1])
        for device_value, reference in zip(actual[2], expected[2], strict=True):
            assert torch.equal(device_value.cpu(), reference)

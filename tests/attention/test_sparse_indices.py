"""Tests of the sparse attention indexer: the kernel against torch, and torch against an explicit sum."""

import pytest
import torch
from by_hand import Case, Chunks, make_case
from torch import Tensor

from quire.attention import sparse_indices
from quire.attention.backend import AttentionSpec
from quire.attention.cpu_mla import CPUMLA
from quire.attention.mla import MLABackend, MLASpec, TorchMLA
from quire.attention.sparse_indices import SparseIndices
from quire.attention.triton_mla import TritonMLA
from quire.kernels import batch_invariant
from quire.kernels.cpu import native
from quire.kernels.triton.sparse_indexer import scores

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MANY: Chunks = [(1, 40), (19, 0), (2, 70), (40, 33), (1, 0)]
MOST = 16
IMPLEMENTATIONS: dict[str, type[MLABackend]] = {"torch": TorchMLA, "cpu": CPUMLA, "triton": TritonMLA}
needs_native = pytest.mark.skipif(native.library() is None, reason="there are no native kernels here")


def case_of(chunks: Chunks, heads: int = 5, dim: int = 24) -> tuple[Case, Tensor, Tensor]:
    """Return keys in a single-head cache, queries and weights."""
    case = make_case(chunks, AttentionSpec(heads, 1, dim, torch.float32), device=DEVICE)
    case.batch.seq_lens.clamp_(min=0)
    return case, torch.randn(len(case.q), heads, device=DEVICE), case.k_cache[:, :, 0]


def test_each_token_selects_its_best_keys() -> None:
    """Check for keys of other sequences, later keys, and negative head scores.

    Scores are compared instead of keys, since the choice among keys with score 0 is undefined.
    """
    case, weights, keys = case_of(MANY)
    topk_indices = sparse_indices.select(case.q, weights, keys, case.batch, MOST)
    assert topk_indices is not None
    flat, at = keys.flatten(0, 1), 0
    for sequence_keys, new in zip(case.keys, case.batch.query_lens_host.tolist(), strict=True):
        for token in range(at, at + new):
            seen = sequence_keys[: len(sequence_keys) - new + token - at + 1, 0]
            count = min(MOST, len(seen))
            assert topk_indices.lens[token] == count
            slots = topk_indices.slots[token, :count].long()
            assert len(slots.unique()) == count
            actual = flat[slots]
            assert (actual[:, None] == seen).all(-1).any(-1).all()
            best, selected = (
                (weights[token] @ (case.q[token] @ of.t()).relu()).sort(descending=True).values[:count]
                for of in (seen, actual)
            )
            torch.testing.assert_close(selected, best, atol=1e-4, rtol=1e-4)
        at += new


@pytest.mark.parametrize("beside", [[], [(1, 300)], [(5, 900), (1, -1)]], ids=["alone", "300", "905"])
def test_batch_invariant_selection(monkeypatch: pytest.MonkeyPatch, beside: Chunks) -> None:
    """Check that slots are in the order of positions and that the first of equal scores are selected, for any
    length of other sequences; most scores here are zero."""
    monkeypatch.setattr(batch_invariant, "_switch", {"on": True})
    case, weights, keys = case_of([(3, 60), *beside])
    case.q[:3] = case.q[:3].where(torch.arange(5, device=DEVICE)[:, None] == 1, 0.0)
    keys *= keys > 1.2
    topk_indices = sparse_indices.select(case.q, weights, keys, case.batch, MOST)
    assert topk_indices is not None and topk_indices.lens[:3].tolist() == [MOST] * 3
    for token in range(3):
        positions = torch.arange(61 + token, device=DEVICE)
        slots = case.batch.block_tables[case.batch.rows[0]].long()[positions // keys.shape[1]] * keys.shape[1]
        slots += positions % keys.shape[1]
        by_head = (case.q[token] @ keys.flatten(0, 1)[slots].t()).relu()
        best = (weights[token] @ by_head).sort(descending=True, stable=True).indices[:MOST]
        assert topk_indices.slots[token].tolist() == slots[best.sort().values].tolist()


def test_batch_invariant_selection_of_few_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a sequence whose keys all fit keeps their order beside a longer one."""
    monkeypatch.setattr(batch_invariant, "_switch", {"on": True})
    case, weights, keys = case_of([(1, 9), (1, 200)])
    topk_indices = sparse_indices.select(case.q, weights, keys, case.batch, MOST)
    assert topk_indices is not None and topk_indices.lens.tolist() == [10, MOST]
    flat = keys.flatten(0, 1)[topk_indices.slots[0, :10].long()]
    assert torch.equal(flat, case.keys[0][:, 0])


def test_no_selection_if_all_keys_fit() -> None:
    case, weights, keys = case_of([(3, 5), (1, MOST - 1)])
    assert sparse_indices.select(case.q, weights, keys, case.batch, MOST) is None


@pytest.mark.parametrize(("heads", "dim"), [(5, 24), (32, 64)])
def test_kernel_scores_match_torch(heads: int, dim: int) -> None:
    case, weights, keys = case_of([*MANY, (1, -1)], heads, dim)
    batch = case.batch
    rows = torch.repeat_interleave(batch.rows, torch.from_numpy(batch.query_lens_host).to(DEVICE)).long()
    seen = (batch.positions + 1).clamp(min=0)
    arguments = case.q, weights, keys, batch.block_tables, rows, seen, 80
    torch.testing.assert_close(scores(*arguments), sparse_indices.reference(*arguments), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["torch", pytest.param("cpu", marks=needs_native), "triton"])
def test_attention_reads_only_selected_latents(kind: str) -> None:
    """Check for slots read as blocks, and for entries beyond a token's selection."""
    spec = MLASpec(heads=3, rank=32, nope_dim=16, rope_dim=8, v_dim=24, scale=0.2)
    device = DEVICE if kind == "triton" else "cpu"
    case = make_case([(2, 30), (5, 9)], AttentionSpec(3, 1, spec.width, torch.float32), device=device)
    with torch.device(device):
        cache = torch.randn(20, 4, spec.width)
        lens = torch.tensor([9, 3, 9, 1, 0, 2, 8], dtype=torch.int32)
        topk_indices = SparseIndices(torch.randint(0, 80, (7, 9), dtype=torch.int32), lens)
        q, weight = torch.randn(7, 3, spec.query_dim), torch.randn(3, spec.nope_dim + spec.v_dim, spec.rank)
    seen, one = topk_indices.as_batch(case.batch), cache.view(-1, 1, spec.width)
    actual = IMPLEMENTATIONS[kind]().attend(q, weight, one, seen, spec)
    for token, count in enumerate(lens.tolist()):
        latents, turned = one[topk_indices.slots[token, :count].long(), 0].split(
            [spec.rank, spec.rope_dim], -1
        )
        keys, values = torch.einsum("hor,kr->hko", weight, latents).split([spec.nope_dim, spec.v_dim], -1)
        scores = torch.einsum("hd,hkd->hk", q[token, :, : spec.nope_dim], keys)
        scores = (scores + q[token, :, spec.nope_dim :] @ turned.t()) * spec.scale
        expected = torch.einsum("hk,hkv->hv", scores.softmax(-1), values)
        torch.testing.assert_close(actual[token], expected, atol=1e-4, rtol=1e-4)


def test_keys_of_padding_are_not_written() -> None:
    keys = torch.zeros(3, 4, 2)
    sparse_indices.write_keys(torch.ones(3, 2), keys, torch.tensor([5, -1, 11]))
    assert keys.flatten(0, 1).sum(1).nonzero().flatten().tolist() == [0, 5, 11]


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_8_bit_keys(kind: torch.dtype) -> None:
    keys = torch.zeros(2, 4, 2).to(kind)
    sparse_indices.write_keys(torch.tensor([[0.5, -1e6]]), keys, torch.tensor([6]))
    assert keys.flatten(0, 1)[6].float().tolist() == [0.5, -torch.finfo(kind).max]

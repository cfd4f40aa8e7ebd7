"""Tests of LoRA on a GPU against torch in float32."""

import pytest
import torch
from interpreter import more
from torch import Tensor

from quire.kernels.ops import HeadEntry, LoRAHeads
from quire.kernels.reference import moe as reference
from quire.kernels.reference.moe import ExpertAdapters, ExpertWeights
from quire.kernels.reference.ops import Reference
from quire.kernels.triton import moe as kernels
from quire.kernels.triton.lora import add, assign
from quire.kernels.triton.lora_few import FewRows, lora_outputs
from quire.kernels.triton.matmul import RowsPlan, TilesPlan, gated, linear, multiply
from quire.kernels.triton.ops import TritonOps
from quire.kernels.triton.qkv import enter

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPE = torch.bfloat16 if CUDA else torch.float16
SLOTS = 5
PLANS = [RowsPlan(2, 4), TilesPlan(16, 16, 32, 1, 4, 3), TilesPlan(32, 16, 32, 3, 4, 3)]
OPS, REFERENCE = TritonOps(), Reference()


def random(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def slots_of(num: int) -> Tensor:
    """Return slots with some rows without adapter and some slots without rows."""
    return torch.randint(-1, SLOTS - 1, (num,), dtype=torch.int32, device=DEVICE)


class LayerAdapters:
    """The adapters of one layer, strided as those of all layers are."""

    def __init__(self, size_in: int, sizes: tuple[int, ...], rank: int, dtype: torch.dtype = DTYPE) -> None:
        memory = random(SLOTS, len(sizes) * rank * size_in + sum(sizes) * rank + 16, dtype=dtype)
        memory *= rank**-0.5
        self.a = memory[:, : len(sizes) * rank * size_in].unflatten(1, (len(sizes) * rank, size_in))
        self.b = memory[:, -sum(sizes) * rank :].unflatten(1, (sum(sizes), rank))
        self.sizes = sizes
        if CUDA:
            torch.cuda.synchronize()

    def adapted(self, slots: Tensor) -> LoRAHeads:
        return LoRAHeads(self.a, self.b, self.sizes, assign(slots, SLOTS))

    def expected(self, out: Tensor, x: Tensor, slots: Tensor) -> Tensor:
        return REFERENCE.lora(out.float().clone(), x, self.a, self.b, self.sizes, slots)


def close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    error = (actual.float() - expected).norm() / expected.norm()
    assert error < (1e-5 if actual.dtype == torch.float32 else 6e-3), error


BEHIND = [(1, 72, (40, 24, 24), 16), (3, 300, (37,), 8), (20, 530, (130, 21), 64), (150, 72, (40, 24), 8)]


@pytest.mark.parametrize(
    ("num", "size_in", "sizes", "rank", "dtype"),
    [
        *((*shape, DTYPE) for shape in BEHIND),
        (*BEHIND[1], torch.float32),
        *more(*((*shape, torch.float32) for shape in BEHIND if shape != BEHIND[1])),
    ],
    ids=str,
)
def test_lora_after_any_matmul(
    num: int, size_in: int, sizes: tuple[int, ...], rank: int, dtype: torch.dtype
) -> None:
    adapters, slots = LayerAdapters(size_in, sizes, rank, dtype), slots_of(num)
    x, out = random(num, size_in, dtype=dtype), random(num, sum(sizes), dtype=dtype)
    expected = adapters.expected(out, x, slots)
    tokens = OPS.assigned(slots, SLOTS)
    halves = OPS.lora_expand(out.clone(), OPS.lora_shrink(x, adapters.a, tokens), adapters.b, sizes, tokens)
    actual = OPS.lora(out, x, adapters.a, adapters.b, sizes, tokens)
    assert actual is out
    close(out, expected)
    close(halves, expected)


@pytest.mark.parametrize("num", [1, 2, 20])
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_lora_fused_into_a_matmul(plan: RowsPlan | TilesPlan, num: int) -> None:
    if isinstance(plan, RowsPlan) and num > 1:
        return
    adapters, slots = LayerAdapters(72, (48, 16, 16), 8), slots_of(num)
    x, weight, bias = random(num, 72), random(80, 72), random(80)
    plain = x.float() @ weight.float().T + bias.float()
    actual = multiply(x, weight, bias, plan, adapted=adapters.adapted(slots))
    close(actual, adapters.expected(plain, x, slots))


@pytest.mark.parametrize("num", [1, 3])
def test_split_sums(num: int) -> None:
    """Check more inputs than one program takes."""
    adapters, slots = LayerAdapters(9001, (24, 40), 8), slots_of(num)
    slots[-1] = 0
    x, has = random(num, 9001), slots >= 0
    values, _ = lora_outputs(x, adapters.adapted(slots)._replace(tokens=FewRows(slots, num)))
    assert values is not None
    expected = adapters.expected(torch.zeros(num, 64, device=DEVICE), x, slots)
    close(values[has], expected[has])


@pytest.mark.parametrize(("plan", "num"), [(PLANS[0], 1), (PLANS[1], 3), (PLANS[1], 20)], ids=str)
@pytest.mark.parametrize("sizes", [(32, 32), (64,)], ids=str)
def test_lora_fused_into_gate_and_up(plan: RowsPlan | TilesPlan, num: int, sizes: tuple[int, ...]) -> None:
    adapters, slots = LayerAdapters(72, sizes, 16), slots_of(num)
    x, weight = random(num, 72), random(64, 72)
    expected = REFERENCE.gated(adapters.expected(x.float() @ weight.float().T, x, slots), "silu")
    close(multiply(x, weight, None, plan, gated=True, adapted=adapters.adapted(slots)), expected)


@pytest.mark.parametrize("num", [1, 130, *more(5)])
def test_selected_kernel_applies_lora(num: int) -> None:
    adapters, slots = LayerAdapters(256, (48, 16), 16), slots_of(num)
    x, weight = random(num, 256), random(64, 256)
    plain = x.float() @ weight.float().T
    close(linear(x, weight, None, adapters.adapted(slots)), adapters.expected(plain, x, slots))
    adapters = LayerAdapters(256, (32, 32), 16)
    expected = REFERENCE.gated(adapters.expected(plain, x, slots), "silu")
    close(gated(x, weight, adapters.adapted(slots)), expected)


def test_lora_fused_into_the_cache_write() -> None:
    heads, kv_heads, dim = 4, 2, 32
    sizes = heads * dim, kv_heads * dim, kv_heads * dim
    adapters, slots = LayerAdapters(1000, sizes, 8), torch.tensor([2], dtype=torch.int32, device=DEVICE)
    x, weight = random(1, 1000) / 32, random(sum(sizes), 1000)
    angles = torch.randn(64, dim // 2, device=DEVICE)
    table = torch.cat((angles.cos(), angles.sin()), 1).to(DTYPE)
    at = torch.tensor([5], device=DEVICE)
    actual, reference = (random(2, 3, 16, kv_heads, dim).fill_(1) for _ in "ab")
    q = enter(x, HeadEntry(heads, table, at, at, *actual), weight, None, adapted=adapters.adapted(slots))
    product = adapters.expected(x.float() @ weight.float().T, x, slots).to(DTYPE)
    expected = REFERENCE.rotate_and_write(product, HeadEntry(heads, table, at, at, *reference))
    assert q is not None
    close(q, expected.float())
    close(actual, reference.float())


def test_lora_of_embedding_rows() -> None:
    slots, ids = slots_of(9), torch.randint(0, 30, (9,), device=DEVICE)
    a, b, out = random(SLOTS, 30, 8), random(SLOTS, 50, 8), random(9, 50)
    expected = REFERENCE.lora_rows(out.float(), ids, a, b, slots)
    close(OPS.lora_rows(out, ids, a, b, OPS.assigned(slots, SLOTS)), expected)


def test_row_is_equal_in_any_batch() -> None:
    """Check other rows with any adapters, even one that produces infinities."""
    adapters, slots = LayerAdapters(200, (32,), 16), slots_of(20)
    adapters.b[4] = torch.inf
    slots[7] = 2
    x, weight = random(20, 200), random(32, 200)
    others = slots.roll(3)
    others[7], others[2] = 2, 4
    for run in (
        lambda slots: multiply(
            x, weight, None, TilesPlan(32, 16, 32, 1, 4, 3), adapted=adapters.adapted(slots)
        ),
        lambda slots: add(x @ weight.T, x, adapters.adapted(slots)),
    ):
        assert torch.equal(run(slots)[7], run(others)[7])


def test_rows_without_adapters_are_unchanged() -> None:
    adapters, out, x = LayerAdapters(72, (40,), 8), random(20, 40), random(20, 72)
    before, none = out.clone(), adapters.adapted(torch.full((20,), -1, dtype=torch.int32, device=DEVICE))
    assert torch.equal(add(out, x, none), before)


SMALL = kernels.MoETile(32, 32, 4, 2)


ROWS, TILES = kernels.MoERowsPlan(16, 32, 4, 4), kernels.MoETilesPlan(16, SMALL, SMALL)


@pytest.mark.parametrize(
    ("plan", "num", "biased"),
    [(ROWS, 3, True), (TILES, 12, False), *more((ROWS, 3, False), (TILES, 40, False), (TILES, 40, True))],
    ids=str,
)
def test_lora_of_experts(plan: kernels.Plan, num: int, biased: bool) -> None:
    """Check that each pair of token and expert uses the expert's part of the token's adapter."""
    experts, hidden, inner, rank = 5, 72, 40, 8
    sizes = (2 * inner, hidden), (hidden, inner)
    weights = [random(experts, *size) / size[1] ** 0.5 for size in sizes]
    biases = [random(experts, size[0]) for size in sizes] if biased else []
    matrices = [
        random(SLOTS, experts, *size) / size[1] ** 0.5
        for size in ((2 * rank, hidden), (2 * inner, rank), (rank, inner), (hidden, rank))
    ]
    ids = torch.rand(num, experts, device=DEVICE).topk(3).indices.int()
    x, shares, slots = random(num, hidden), torch.rand(num, 3, device=DEVICE), slots_of(num)
    actual = kernels.mixed(
        x,
        ids,
        shares,
        ExpertWeights(*weights, *biases),
        "silu",
        plan,
        ExpertAdapters(*matrices, slots),
    )
    wide = ExpertWeights(*(item.float() for item in (*weights, *biases)))
    adapters = ExpertAdapters(*(item.float() for item in matrices), slots)
    close(actual, reference.mix(x.float(), ids, shares, wide, "silu", adapters))

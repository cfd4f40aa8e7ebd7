"""Tests of routing and experts in C against torch, on tapes with new ids, and of batch invariance."""

import pytest
import torch
from packed import stored
from torch import Tensor
from torch_threads import torch_threads

from quire.checkpoint.facts import Routing
from quire.kernels.cpu import moe as cpu_moe
from quire.kernels.cpu import native
from quire.kernels.cpu.gguf import TYPES, interleaves, pack, unpack_reference
from quire.kernels.cpu.linear import Matrix
from quire.kernels.cpu.moe import CpuExperts, route
from quire.kernels.cpu.tape import record
from quire.kernels.reference import moe
from quire.kernels.reference.activations import NUMBERS
from quire.kernels.reference.moe import ExpertWeights

pytestmark = pytest.mark.skipif(native.library() is None, reason="there are no native kernels here")
PLAIN = [torch.float32, torch.bfloat16]
LAYOUTS = [False, True] if interleaves() else [False]
ROUTINGS = {
    "softmax": Routing(3),
    "softmax, normal": Routing(3, renormalized=True),
    "sigmoid": Routing(1, "sigmoid"),
    "sigmoid, groups": Routing(3, "sigmoid", True, 2.5, num_groups=4, top_groups=2, group_best=2),
    "softmax, groups": Routing(4, "softmax", False, 16.0, num_groups=4, top_groups=3),
}


def distinct(num_tokens: int, num_experts: int) -> Tensor:
    """Return logits that differ within each token, also as bfloat16."""
    return torch.stack([(torch.randperm(num_experts) - num_experts / 2) / 8 for _ in range(num_tokens)])


@pytest.mark.parametrize("dtype", PLAIN)
@pytest.mark.parametrize("num_experts", [4, 20, 128])
@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
def test_expert_ids_and_weights_match(routing: Routing, num_experts: int, dtype: torch.dtype) -> None:
    """Check for weights that include the bias, wrong groups, and vector padding that counts."""
    for num_tokens in (1, 2, 33):
        # Rows may be strided.
        logits = distinct(num_tokens, num_experts + 3).to(dtype)[:, :num_experts]
        bias = torch.randn(num_experts) if routing.scoring == "sigmoid" else None
        if num_experts == 4:
            routing = routing._replace(num_groups=1)
        ids, weights = route(logits, routing, bias)
        expected_ids, expected = moe.route(logits, routing, bias)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
def test_invalid_logits_choose_existing_distinct_experts(routing: Routing) -> None:
    """Check that NaN does not read weights beyond the last expert or choose one twice."""
    rows = [torch.full((20,), bad) for bad in (torch.nan, torch.inf, -torch.inf, 0.0, 1e38)]
    rows.append(torch.where(torch.arange(20) == 7, torch.nan, 1.0))
    ids, _ = route(torch.stack(rows), routing)
    assert ((ids >= 0) & (ids < 20)).all()
    assert all(len(set(row)) == routing.per_token for row in ids.tolist())


class Layer:
    """Random experts for the kernel and for the reference."""

    def __init__(
        self,
        kind: str | torch.dtype,
        *,
        interleaved: bool = False,
        activation: str = "silu",
        biased: bool = False,
        sizes: tuple[int, int, int] = (12, 70, 45),
    ) -> None:
        torch.manual_seed(0)
        self.num_experts, hidden, size = sizes
        self.activation, self.dtype = activation, kind if isinstance(kind, torch.dtype) else torch.float32
        self.hidden = hidden
        made = [
            [make(kind, rows, columns, 3 * i + j, interleaved) for i in range(self.num_experts)]
            for j, (rows, columns) in enumerate(((size, hidden), (size, hidden), (hidden, size)))
        ]
        gate, up, down = ([matrix for matrix, _ in of] for of in made)
        values = [torch.stack([value for _, value in of]) for of in made]
        biases = (
            [torch.randn(self.num_experts, n).to(self.dtype) for n in (2 * size, hidden)]
            if biased
            else [None, None]
        )
        self.experts = CpuExperts(list(zip(gate, up, strict=True)), down, activation, *biases)
        self.weights = ExpertWeights(torch.cat(values[:2], 1), values[2], *biases)

    def inputs(self, num_tokens: int, per_token: int = 3) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.randn(num_tokens, self.hidden + 5).to(self.dtype)[:, :-5]
        return x, *route(torch.randn(num_tokens, self.num_experts), Routing(per_token))

    def check(self, num_tokens: int, tolerance: float, per_token: int = 3) -> None:
        x, ids, weights = self.inputs(num_tokens, per_token)
        for absent in (False, True):
            if absent:  # experts on other ranks; for some tokens all of them
                ids[::2, 0], ids[1::3] = -1, -1
            actual = self.experts(x, ids, weights)
            expected = moe.mix(x, ids, weights, self.weights, self.activation)
            assert actual.dtype == x.dtype and actual.shape == expected.shape
            assert (actual.double() - expected.double()).norm() <= tolerance * expected.double().norm()


def make(
    kind: str | torch.dtype, rows: int, columns: int, seed: int, interleaved: bool
) -> tuple[Matrix, Tensor]:
    if isinstance(kind, torch.dtype):
        weight = (torch.randn(rows, columns) / columns**0.5).to(kind)
        return Matrix.plain(weight), weight
    file = stored(kind, rows, columns, seed)
    return pack(file, kind, interleaved=interleaved), unpack_reference(file, kind)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", [*NUMBERS, "silu<0.3"])
@pytest.mark.parametrize("dtype", PLAIN)
def test_plain_weights(dtype: torch.dtype, activation: str, biased: bool) -> None:
    """Check for rows of another expert, swapped gate and up, wrong or missing biases, and wrong routing
    weights.
    """
    layer = Layer(dtype, activation=activation, biased=biased)
    for num_tokens in (1, 2, 7, 33):
        layer.check(num_tokens, 2e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("interleaved", LAYOUTS)
@pytest.mark.parametrize("kind", sorted(TYPES))
def test_packed_weights(kind: str, interleaved: bool) -> None:
    layer = Layer(kind, interleaved=interleaved, sizes=(3, 512, 256), biased=True)
    for num_tokens in (1, 2, 7, 33):
        layer.check(num_tokens, 1e-3 if interleaved else 1e-5, per_token=2)


@pytest.mark.parametrize("kind", [*PLAIN, *(["Q4_K"] if interleaves() else [])], ids=str)
def test_bits_do_not_depend_on_batch_or_threads(
    kind: str | torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check other kernels for many rows, reused scratch, and tokens that are processed in pieces."""
    layer = Layer(kind, interleaved=True, biased=True, sizes=(7, 256, 256))
    x, ids, weights = layer.inputs(150, 4)
    together = layer.experts(x, ids, weights)
    for some in (slice(0, 1), slice(149, 150), slice(3, 5), slice(10, 40), slice(7, 130)):
        for number in (1, 2, 3):
            with torch_threads(number):
                assert torch.equal(layer.experts(x[some], ids[some], weights[some]), together[some])
    monkeypatch.setattr(cpu_moe, "_MAX_ROWS", 101)
    assert torch.equal(layer.experts(x, ids, weights), together)


def test_all_tokens_may_choose_the_same_expert() -> None:
    """Check groups and panels that are sized for evenly distributed rows."""
    layer = Layer(torch.float32, sizes=(9, 40, 30))
    x, ids, weights = layer.inputs(65, 2)
    for first, second in ((8, 0), (0, 8), (4, 5)):
        ids[:, 0], ids[:, 1] = first, second
        expected = moe.mix(x, ids, weights, layer.weights, "silu")
        torch.testing.assert_close(layer.experts(x, ids, weights), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("num_tokens", [1, 5, 40])
@pytest.mark.parametrize("kind", [torch.bfloat16, "Q8_0"], ids=str)
def test_tape_follows_the_expert_ids(kind: str | torch.dtype, num_tokens: int, num_threads: int) -> None:
    """Check that groups are not those of the recorded step, and that no torch operation is recorded."""
    layer = Layer(kind, interleaved=bool(interleaves()), sizes=(8, 64, 32))
    x, logits = layer.inputs(num_tokens)[0], torch.randn(num_tokens, 8)

    def step() -> Tensor:
        return layer.experts(x, *route(logits, Routing(3, renormalized=True)))

    with torch.inference_mode(), torch_threads(num_threads):
        with record() as tape:
            out = step()
        assert tape.complete and len(tape) == 2
        for sharpness in (1, 100, 0):
            logits.copy_(torch.randn(num_tokens, 8) * sharpness)
            x.copy_(torch.randn(x.shape))
            tape.replay()
            assert torch.equal(out, step())


def test_no_local_expert() -> None:
    layer = Layer(torch.float32)
    for num_tokens in (1, 3):
        x, ids, weights = layer.inputs(num_tokens)
        assert not layer.experts(x, ids.fill_(-1), weights).any()


def test_no_tokens_give_no_tokens() -> None:
    layer = Layer(torch.float32)
    assert layer.experts(*layer.inputs(0)).shape == (0, 70)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, "Q8_0"])
def test_lora_is_added_to_both_matmuls(kind: str | torch.dtype) -> None:
    """Check for the adapter of another expert or token, and for one added after the activation."""
    layer, slots, rank = Layer(kind, biased=True, sizes=(6, 64, 32)), 3, 8
    shapes = ((2 * rank, 64), (64, rank), (rank, 32), (64, rank))
    sizes = [6 * rows * columns for rows, columns in shapes]
    memory = (torch.randn(slots, sum(sizes)) / 6).to(layer.dtype)
    matrices = [
        part.unflatten(1, (6, *shape)) for part, shape in zip(memory.split(sizes, 1), shapes, strict=True)
    ]
    for num_tokens in (1, 9):
        x, ids, weights = layer.inputs(num_tokens)
        tokens = torch.randint(-1, slots, (num_tokens,), dtype=torch.int32)
        tokens[0] = 2
        adapters = moe.ExpertAdapters(*matrices, tokens)
        actual = layer.experts(x, ids, weights, adapters=adapters)
        expected = moe.mix(x, ids, weights, layer.weights, layer.activation, adapters)
        tolerance = 1e-5 if kind == torch.float32 else 2e-2
        assert (actual.double() - expected.double()).norm() <= tolerance * expected.double().norm()
        one = adapters._replace(tokens=tokens[:1])
        assert torch.equal(layer.experts(x[:1], ids[:1], weights[:1], adapters=one), actual[:1])
        plain = layer.experts(x, ids, weights)
        assert torch.equal(plain[tokens < 0], actual[tokens < 0]) and not torch.equal(plain[0], actual[0])

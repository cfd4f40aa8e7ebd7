"""Which experts a token goes to, on a GPU: `route` of `kernels/experts.py`, and the router's product with it.

`_choose` spreads the rows of the router over programs, the last of which to finish routes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.experts import Routing
from quire.kernels.triton.launch import follow, launch, overlap
from quire.kernels.triton.matmul import LONGEST, arrivals_of, linear

_FEW, _NUMBERS = 4, 8192
"""Up to so many tokens the product and the choice are one kernel, of which a program has so many numbers of
the router."""


@triton.jit
def _route(
    ids: tl.tensor,
    weights: tl.tensor,
    logits: tl.tensor,
    bias: tl.tensor,
    scale: tl.tensor,
    stride: tl.tensor,
    HOW: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Grid (tokens)."""
    token = tl.program_id(0).to(tl.int64)
    follow(OVERLAP)
    _pick(ids + token * HOW[0], weights + token * HOW[0], logits + token * stride, bias, scale, HOW)


@triton.jit
def _choose(
    ids: tl.tensor,
    weights: tl.tensor,
    logits: tl.tensor,
    x: tl.tensor,
    router: tl.tensor,
    router_bias: tl.tensor,
    bias: tl.tensor,
    arrivals: tl.tensor,
    scale: tl.tensor,
    size: tl.tensor,
    stride: tl.tensor,
    NUM: tl.constexpr,
    BIASED: tl.constexpr,
    HOW: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    LENGTH: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Grid (experts / ROWS) for `NUM` tokens; `arrivals` is zero before and after."""
    n, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, LENGTH)
    exist = (n < EXPERTS)[:, None] & (k < size)[None, :]
    w = tl.load(router + n[:, None] * size + k[None, :], mask=exist, other=0.0).to(tl.float32)
    offset = tl.zeros([ROWS], tl.float32)
    if BIASED:
        offset += tl.load(router_bias + n, mask=n < EXPERTS, other=0.0).to(tl.float32)
    follow(OVERLAP)
    for m in tl.static_range(NUM):
        row = tl.load(x + m * stride + k, mask=k < size, other=0.0).to(tl.float32)
        y = tl.sum(w * row[None, :], 1) + offset
        tl.store(logits + m * EXPERTS + n, y.to(logits.dtype.element_ty), mask=n < EXPERTS)
    tl.debug_barrier()
    if tl.atomic_add(arrivals, 1) < tl.num_programs(0) - 1:
        return
    tl.store(arrivals, 0)
    for m in tl.static_range(NUM):
        _pick(ids + m * HOW[0], weights + m * HOW[0], logits + m * EXPERTS, bias, scale, HOW)


@triton.jit
def _pick(
    ids: tl.tensor,
    weights: tl.tensor,
    logits: tl.tensor,
    bias: tl.tensor,
    scale: tl.tensor,
    HOW: tl.constexpr,
) -> None:
    """The experts of one token. `HOW` is what `_how` says."""
    TOP: tl.constexpr = HOW[0]
    SIGMOID: tl.constexpr = HOW[1]
    RENORMALIZED: tl.constexpr = HOW[2]
    BIASED: tl.constexpr = HOW[3]
    GROUPS: tl.constexpr = HOW[4]
    SIZE: tl.constexpr = HOW[5]
    WIDE: tl.constexpr = triton.next_power_of_2(SIZE)
    ALL: tl.constexpr = triton.next_power_of_2(GROUPS) * WIDE
    group, place = tl.arange(0, ALL // WIDE), tl.arange(0, WIDE)
    expert = group[:, None] * SIZE + place[None, :]
    exist = (group < GROUPS)[:, None] & (place < SIZE)[None, :]
    values = tl.load(logits + expert, mask=exist, other=-float("inf"), cache_modifier=".cg").to(tl.float32)
    values = tl.where(values == values, values, -float("inf"))
    top = tl.max(tl.max(values, 1), 0)
    whole = tl.sum(tl.sum(tl.exp(values - top), 1), 0)
    choice = _score(values, top, whole, SIGMOID)
    if BIASED:
        choice += tl.load(bias + expert, mask=exist, other=0.0).to(tl.float32)
    choice = tl.where(exist, choice, -float("inf"))
    if GROUPS > 1:
        choice = _in_best_groups(choice, group, place, HOW[6], HOW[7])
    choice, at = tl.reshape(choice, [ALL]), tl.arange(0, ALL)
    rank = tl.arange(0, triton.next_power_of_2(TOP))
    chosen = tl.zeros_like(rank)
    for i in tl.static_range(TOP):
        best = tl.argmax(choice, 0)
        # where nothing is a number, padding may be the best
        chosen = tl.where(rank == i, tl.minimum(best // WIDE * SIZE + best % WIDE, GROUPS * SIZE - 1), chosen)
        choice = tl.where(at == best, -float("inf"), choice)
    values = tl.load(logits + chosen, cache_modifier=".cg").to(tl.float32)
    scores = tl.where(rank < TOP, _score(values, top, whole, SIGMOID), 0.0)
    if RENORMALIZED:
        scores /= tl.sum(scores, 0)
    tl.store(ids + rank, chosen, mask=rank < TOP)
    tl.store(weights + rank, scores * scale, mask=rank < TOP)


@triton.jit
def _score(values: tl.tensor, top: tl.tensor, whole: tl.tensor, SIGMOID: tl.constexpr) -> tl.tensor:
    return 1 / (1 + tl.exp(-values)) if SIGMOID else tl.exp(values - top) / whole


@triton.jit
def _in_best_groups(
    choice: tl.tensor, group: tl.tensor, place: tl.tensor, TOP: tl.constexpr, BEST: tl.constexpr
) -> tl.tensor:
    """-inf outside of the `TOP` groups whose `BEST` experts are worth most."""
    left, worth = choice, tl.zeros_like(tl.max(choice, 1))
    for _ in tl.static_range(BEST):
        worth += tl.max(left, 1)
        left = tl.where(place[None, :] == tl.argmax(left, 1)[:, None], -float("inf"), left)
    kept = group < 0
    for _ in tl.static_range(TOP):
        best = tl.argmax(worth, 0)
        kept |= group == best
        worth = tl.where(group == best, -float("inf"), worth)
    return tl.where(kept[:, None], choice, -float("inf"))


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """[T, experts] logits -> ids [T, per_token] int32 and weights [T, per_token] float32."""
    num, size = logits.shape
    ids, weights = _results(num, routing, logits.device)
    if num:
        ahead = overlap(num)
        launch(_route, num)(
            ids, weights, logits, logits if bias is None else bias, routing.scale, logits.stride(0),
            HOW=_how(routing, size, bias), OVERLAP=ahead, launch_pdl=ahead, num_warps=1,
        )  # fmt: skip
    return ids, weights


def choose(
    x: Tensor,
    router: Tensor,
    routing: Routing,
    bias: Tensor | None = None,
    router_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`route` of x R^T + b for x [T, hidden] and R [experts, hidden]."""
    (num, size), experts = x.shape, len(router)
    length = triton.next_power_of_2(size)
    if not 0 < num <= _FEW or length > LONGEST or not router.is_contiguous() or x.stride(1) != 1:
        return route(linear(x, router, router_bias), routing, bias)
    ids, weights = _results(num, routing, x.device)
    logits = torch.empty(num, experts, dtype=x.dtype, device=x.device)
    rows, ahead = max(_NUMBERS // length, 1), overlap(num)
    launch(_choose, triton.cdiv(experts, rows))(
        ids, weights, logits, x, router, x if router_bias is None else router_bias,
        x if bias is None else bias, arrivals_of(x.device), routing.scale, size, x.stride(0), NUM=num,
        BIASED=router_bias is not None, HOW=_how(routing, experts, bias), EXPERTS=experts, ROWS=rows,
        LENGTH=length, OVERLAP=ahead, launch_pdl=ahead, num_warps=4,
    )  # fmt: skip
    return ids, weights


def _results(num: int, routing: Routing, device: torch.device) -> tuple[Tensor, Tensor]:
    ids = torch.empty(num, routing.per_token, dtype=torch.int32, device=device)
    return ids, torch.empty(num, routing.per_token, dtype=torch.float32, device=device)


def _how(routing: Routing, experts: int, bias: Tensor | None) -> tuple[int | bool, ...]:
    """What a kernel is compiled for: experts per token, sigmoid, renormalized, biased, groups, their size, how
    many of them, and how many experts say what a group is worth."""
    top, scoring, renormalized, _, groups, top_groups, group_best = routing
    sizes = groups, experts // groups, top_groups, group_best
    return top, scoring == "sigmoid", renormalized, bias is not None, *sizes

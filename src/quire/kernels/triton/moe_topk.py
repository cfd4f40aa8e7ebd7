"""Top-k expert routing on a GPU, fused with the router GEMM.

The reference is `route` of `kernels/reference/moe.py`. For one token, `_choose` spreads the rows of the
router over programs; the last program to finish chooses the experts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.checkpoint.facts import Routing
from quire.kernels import batch_invariant
from quire.kernels.triton.launch import allocate_indices, follow, launch, overlap
from quire.kernels.triton.matmul import TilesPlan, aligned, has_room, library_linear, multiply
from quire.kernels.triton.tile_dots import LONGEST, arrivals_of

_HELD = 4096
"""Elements of the router's weight per program of `_choose`."""
_TILES, _MOST_TILED = TilesPlan(16, 64, 128, 8, 4, 4), 256
"""Plan of the router GEMM for more than one token, and the maximum tokens for this plan."""
_LEAST: tl.constexpr = tl.constexpr(-1e30)
"""Less than any score."""
_TAKEN: tl.constexpr = tl.constexpr(-(2**31))


@triton.jit(do_not_specialize=["num"])
def _route(
    ids: tl.tensor, weights: tl.tensor, logits: tl.tensor, bias: tl.tensor, scale: tl.tensor, num: tl.tensor,
    stride: tl.tensor,
    HOW: tl.constexpr, NUM: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Choose the experts of NUM tokens from their logits. Grid: (num / NUM,)."""
    token = tl.program_id(0).to(tl.int64) * NUM + tl.arange(0, NUM)
    expert, exists = _experts(HOW)
    follow(OVERLAP)
    valid = (token < num)[:, None] & exists[None, :]
    values = tl.load(logits + token[:, None] * stride + expert[None, :], mask=valid, other=0.0)
    _choose_experts(values, token, num, ids, weights, bias, scale, HOW)


@triton.jit
def _choose(
    ids: tl.tensor, weights: tl.tensor, logits: tl.tensor, x: tl.tensor, router: tl.tensor,
    router_bias: tl.tensor, bias: tl.tensor, arrivals: tl.tensor, scale: tl.tensor, size: tl.tensor,
    EXPERTS: tl.constexpr, HOW: tl.constexpr, ROWS: tl.constexpr, LENGTH: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Compute ROWS logits of a single token; the last program to finish chooses the experts. `arrivals` is
    zero before and after. Grid: (EXPERTS / ROWS,)."""
    n, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, LENGTH)
    valid = (n < EXPERTS)[:, None] & (k < size)[None, :]
    w = tl.load(router + n[:, None] * size + k[None, :], mask=valid, other=0.0)
    if router_bias is not None:
        offset = tl.load(router_bias + n, mask=n < EXPERTS, other=0.0).to(tl.float32)
    follow(OVERLAP)
    row = tl.load(x + k, mask=k < size, other=0.0).to(tl.float32)
    y = tl.sum(w.to(tl.float32) * row[None, :], 1)
    if router_bias is not None:
        y += offset
    tl.store(logits + n, y.to(logits.dtype.element_ty), mask=n < EXPERTS)
    tl.debug_barrier()
    if tl.atomic_add(arrivals, 1) < tl.num_programs(0) - 1:
        return
    tl.store(arrivals, 0)
    token = tl.zeros([1], tl.int64)
    expert, exists = _experts(HOW)
    values = tl.load(logits + expert, mask=exists, other=0.0, cache_modifier=".cg")
    _choose_experts(values[None, :], token, 1, ids, weights, bias, scale, HOW)


@triton.jit
def _experts(HOW: tl.constexpr) -> tl.tensor:
    """Return for each column of a row of logits its expert, and whether it exists. Groups of experts are
    padded to powers of two."""
    at = tl.arange(0, HOW[3] * HOW[4])
    group, place = at // HOW[4], at % HOW[4]
    return group * HOW[6] + place, (group < HOW[5]) & (place < HOW[6])


@triton.jit
def _choose_experts(
    values: tl.tensor, token: tl.tensor, num: tl.tensor, ids: tl.tensor, weights: tl.tensor, bias: tl.tensor,
    scale: tl.tensor,
    HOW: tl.constexpr,
) -> None:  # fmt: skip
    """Choose the experts of some tokens from logits [tokens, columns]; `HOW` is the result of `_how`.

    Rows of padding tokens may be arbitrary; the chosen experts exist and differ even then.
    """
    TOP: tl.constexpr = HOW[0]
    SIGMOID: tl.constexpr = HOW[1]
    RENORMALIZED: tl.constexpr = HOW[2]
    expert, exists = _experts(HOW)
    wide = values.to(tl.float32)
    wide = tl.where((wide == wide) & exists[None, :], tl.clamp(wide, _LEAST, -_LEAST), _LEAST)
    if SIGMOID:
        scores = 1 / (1 + tl.exp(-wide))
    else:
        scores = tl.exp(wide - tl.max(wide, 1)[:, None])
        scores /= tl.sum(tl.where(exists[None, :], scores, 0.0), 1)[:, None]
    choice = scores
    if bias is not None:
        choice += tl.load(bias + expert, mask=exists, other=0.0).to(tl.float32)[None, :]
    choice = tl.where(exists[None, :], choice, -float("inf"))
    if HOW[5] > 1:
        choice = _mask_groups(choice, HOW[3], HOW[4], HOW[7], HOW[8])
    # Convert to integers of the same order: the hardware has an integer maximum.
    bits = choice.to(tl.int32, bitcast=True)
    keys = tl.where(exists[None, :], bits ^ ((bits >> 31) & 0x7FFFFFFF), _TAKEN)
    at, rank = tl.arange(0, HOW[3] * HOW[4])[None, :], tl.full(keys.shape, -1, tl.int32)
    for i in tl.static_range(TOP):
        best = at == tl.min(tl.where(keys == tl.max(keys, 1)[:, None], at, HOW[3] * HOW[4]), 1)[:, None]
        rank = tl.where(best, i, rank)
        keys = tl.where(best, _TAKEN, keys)
    if RENORMALIZED:
        scores /= tl.sum(tl.where(rank >= 0, scores, 0.0), 1)[:, None]
    place, chosen = token[:, None] * TOP + rank, (rank >= 0) & (token < num)[:, None]
    tl.store(ids + place, tl.zeros_like(rank) + expert[None, :], mask=chosen)
    tl.store(weights + place, scores * scale, mask=chosen)


@triton.jit
def _mask_groups(
    choice: tl.tensor, GROUPS: tl.constexpr, SIZE: tl.constexpr, TOP: tl.constexpr, BEST: tl.constexpr
) -> tl.tensor:
    """Replace the scores of experts outside of the TOP best groups by less than any score. The score of a
    group is the sum of the scores of its BEST best experts."""
    NUM: tl.constexpr = choice.shape[0]
    group, place = tl.arange(0, GROUPS)[None, :], tl.arange(0, SIZE)[None, None, :]
    choice = tl.reshape(choice, [NUM, GROUPS, SIZE])
    remaining, group_score = choice, tl.zeros([NUM, GROUPS], tl.float32)
    for _ in tl.static_range(BEST):
        group_score += tl.max(remaining, 2)
        remaining = tl.where(place == tl.argmax(remaining, 2)[:, :, None], -float("inf"), remaining)
    selected = tl.zeros([NUM, GROUPS], tl.int1)
    for _ in tl.static_range(TOP):
        best = group == tl.argmax(group_score, 1)[:, None]
        selected |= best
        group_score = tl.where(best, -float("inf"), group_score)
    choice = tl.where(selected[:, :, None], choice, tl.minimum(choice, _LEAST))
    return tl.reshape(choice, [NUM, GROUPS * SIZE])


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose experts for T tokens from the router's logits [T, experts]. Return their ids [T, per_token]
    int32 and weights [T, per_token] float32."""
    num, size = logits.shape
    ids, weights = _allocate(num, routing, logits.device)
    if num:
        ahead = overlap(num, size)
        launch(_route, num)(
            ids, weights, logits, bias, routing.scale, num, logits.stride(0),
            HOW=_how(routing, size), NUM=1, OVERLAP=ahead, launch_pdl=ahead, num_warps=1,
        )  # fmt: skip
    return ids, weights


def choose(
    x: Tensor, router: Tensor, routing: Routing, bias: Tensor | None = None, router_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose experts as `route` does, from the logits x R^T + b of x [T, hidden] and the router R [experts,
    hidden]."""
    (num, size), experts = x.shape, len(router)
    length = triton.next_power_of_2(size)
    is_fixed = batch_invariant.is_on()
    most = num if is_fixed else _MOST_TILED
    if x.dtype != router.dtype or x.dtype == torch.float32 or not 0 < num <= most:
        return route(library_linear(x.to(router.dtype), router, router_bias), routing, bias)
    if num > 1 or is_fixed or length > LONGEST:
        x = x if aligned(x) or not is_fixed else x.clone(memory_format=torch.contiguous_format)
        tiled = aligned(x) and aligned(router) and has_room()
        logits = multiply(x, router, router_bias, _TILES) if tiled else library_linear(x, router, router_bias)
        return route(logits, routing, bias)
    ids, weights = _allocate(num, routing, x.device)
    ahead, rows = overlap(num, size), max(_HELD // length, 1)
    launch(_choose, triton.cdiv(experts, rows))(
        ids, weights, torch.empty(experts, dtype=x.dtype, device=x.device), x, router,
        router_bias, bias, arrivals_of(x.device), routing.scale, size, EXPERTS=experts,
        HOW=_how(routing, experts), ROWS=rows, LENGTH=length, OVERLAP=ahead, launch_pdl=ahead,
        num_warps=max(length // 4096, 1),
    )  # fmt: skip
    return ids, weights


def _allocate(num: int, routing: Routing, device: torch.device) -> tuple[Tensor, Tensor]:
    ids = allocate_indices(num, routing.per_token, dtype=torch.int32, device=device)
    return ids, torch.empty(num, routing.per_token, dtype=torch.float32, device=device)


def _how(routing: Routing, experts: int) -> tuple[int, ...]:
    """Return the routing of a layer as compile-time constants of the kernels: experts per token, sigmoid,
    renormalized; groups and group size, rounded up to powers of two and then exact; chosen groups; experts
    that determine a group's score."""
    top, scoring, renormalized, _, groups, top_groups, group_best = routing
    size, columns = experts // groups, triton.next_power_of_2(groups)
    wide = max(triton.next_power_of_2(size), 16 // columns)
    kind = top, int(scoring == "sigmoid"), int(renormalized)
    return *kind, columns, wide, groups, size, top_groups, group_best

"""Which experts a token goes to, on a GPU: `route` of `kernels/experts.py`, and the router's product with it.

`_choose` splits the product along its length; the last split to finish adds them all and routes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from quire.kernels.experts import Routing
from quire.kernels.triton.launch import follow, launch, overlap
from quire.kernels.triton.matmul import arrivals_of, times, upright

_MOST_CHOSEN = 256
"""Up to so many tokens the router's product and the choice are one kernel."""
_TOKENS, _NUMBERS = 16, 2**14
"""Of a program: tokens, and numbers of the router."""
_LEAST: tl.constexpr = tl.constexpr(-1e30)
"""Where a score could not be."""


@triton.jit(do_not_specialize=["num"])
def _route(
    ids: tl.tensor,
    weights: tl.tensor,
    logits: tl.tensor,
    bias: tl.tensor,
    scale: tl.tensor,
    num: tl.tensor,
    stride: tl.tensor,
    HOW: tl.constexpr,
    NUM: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Grid (num / NUM)."""
    token = tl.program_id(0).to(tl.int64) * NUM + tl.arange(0, NUM)
    expert, exists = _experts(HOW)
    follow(OVERLAP)
    known = (token < num)[:, None] & exists[None, :]
    values = tl.load(logits + token[:, None] * stride + expert[None, :], mask=known, other=0.0)
    _pick(values, token, num, ids, weights, bias, scale, HOW)


@triton.jit(do_not_specialize=["num"])
def _choose(
    ids: tl.tensor,
    weights: tl.tensor,
    parts: tl.tensor,
    x: tl.tensor,
    router: tl.tensor,
    router_bias: tl.tensor,
    bias: tl.tensor,
    arrivals: tl.tensor,
    scale: tl.tensor,
    num: tl.tensor,
    size: tl.tensor,
    stride: tl.tensor,
    BIASED: tl.constexpr,
    HOW: tl.constexpr,
    NUM: tl.constexpr,
    LENGTH: tl.constexpr,
    SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Grid (num / NUM, SPLITS), where LENGTH * SPLITS >= size; `arrivals` is zero before and after."""
    tile, split = tl.program_id(0), tl.program_id(1)
    token, k = tile.to(tl.int64) * NUM + tl.arange(0, NUM), split * LENGTH + tl.arange(0, LENGTH)
    expert, exists = _experts(HOW)
    held = exists[:, None] & (k < size)[None, :]
    w = tl.load(router + expert[:, None] * size + k[None, :], mask=held, other=0.0)
    follow(OVERLAP)
    known = (token < num)[:, None] & (k < size)[None, :]
    a = tl.load(x + token[:, None] * stride + k[None, :], mask=known, other=0.0)
    acc = upright(times(a, w, tl.zeros([expert.shape[0], NUM], tl.float32)), NUM)
    if SPLITS > 1:
        at = tl.arange(0, NUM)[:, None] * expert.shape[0] + tl.arange(0, expert.shape[0])[None, :]
        own = parts + tile * SPLITS * NUM * expert.shape[0] + at
        tl.store(own + split * NUM * expert.shape[0], acc)
        tl.debug_barrier()
        if tl.atomic_add(arrivals + tile, 1) < SPLITS - 1:
            return
        tl.store(arrivals + tile, 0)
        acc = tl.zeros_like(acc)
        for i in tl.static_range(SPLITS):
            acc += tl.load(own + i * NUM * expert.shape[0], cache_modifier=".cg")
    if BIASED:
        acc += tl.load(router_bias + expert, mask=exists, other=0.0).to(tl.float32)[None, :]
    _pick(acc.to(x.dtype.element_ty), token, num, ids, weights, bias, scale, HOW)


@triton.jit
def _experts(HOW: tl.constexpr) -> tl.tensor:
    """Which expert stands in a column, and whether it exists: groups begin at powers of two."""
    at = tl.arange(0, HOW[4] * HOW[5])
    group, place = at // HOW[5], at % HOW[5]
    return group * HOW[7] + place, (group < HOW[6]) & (place < HOW[7])


@triton.jit
def _pick(
    values: tl.tensor,
    token: tl.tensor,
    num: tl.tensor,
    ids: tl.tensor,
    weights: tl.tensor,
    bias: tl.tensor,
    scale: tl.tensor,
    HOW: tl.constexpr,
) -> None:
    """The experts of some tokens from logits [tokens, columns]. `HOW` is what `_how` says.

    Rows that pad a batch may hold anything: even then the experts that are chosen exist and differ.
    """
    TOP: tl.constexpr = HOW[0]
    SIGMOID: tl.constexpr = HOW[1]
    RENORMALIZED: tl.constexpr = HOW[2]
    BIASED: tl.constexpr = HOW[3]
    expert, exists = _experts(HOW)
    wide = values.to(tl.float32)
    wide = tl.where((wide == wide) & exists[None, :], tl.clamp(wide, _LEAST, -_LEAST), _LEAST)
    if SIGMOID:
        scores = 1 / (1 + tl.exp(-wide))
    else:
        scores = tl.exp(wide - tl.max(wide, 1)[:, None])
        scores /= tl.sum(tl.where(exists[None, :], scores, 0.0), 1)[:, None]
    choice = scores
    if BIASED:
        choice += tl.load(bias + expert, mask=exists, other=0.0).to(tl.float32)[None, :]
    choice = tl.where(exists[None, :], choice, -float("inf"))
    if HOW[6] > 1:
        choice = _in_best_groups(choice, HOW[4], HOW[5], HOW[8], HOW[9])
    at = tl.arange(0, HOW[4] * HOW[5])[None, :]
    rank = tl.full(choice.shape, -1, tl.int32)
    for i in tl.static_range(TOP):
        best = at == tl.argmax(choice, 1)[:, None]
        rank = tl.where(best, i, rank)
        choice = tl.where(best, -float("inf"), choice)
    if RENORMALIZED:
        scores /= tl.sum(tl.where(rank >= 0, scores, 0.0), 1)[:, None]
    place, chosen = token[:, None] * TOP + rank, (rank >= 0) & (token < num)[:, None]
    tl.store(ids + place, tl.zeros_like(rank) + expert[None, :], mask=chosen)
    tl.store(weights + place, scores * scale, mask=chosen)


@triton.jit
def _in_best_groups(
    choice: tl.tensor, GROUPS: tl.constexpr, SIZE: tl.constexpr, TOP: tl.constexpr, BEST: tl.constexpr
) -> tl.tensor:
    """Outside of the `TOP` groups whose `BEST` experts are worth most, less than any score."""
    NUM: tl.constexpr = choice.shape[0]
    group, place = tl.arange(0, GROUPS)[None, :], tl.arange(0, SIZE)[None, None, :]
    choice = tl.reshape(choice, [NUM, GROUPS, SIZE])
    left, worth = choice, tl.zeros([NUM, GROUPS], tl.float32)
    for _ in tl.static_range(BEST):
        worth += tl.max(left, 2)
        left = tl.where(place == tl.argmax(left, 2)[:, :, None], -float("inf"), left)
    kept = tl.zeros([NUM, GROUPS], tl.int1)
    for _ in tl.static_range(TOP):
        best = group == tl.argmax(worth, 1)[:, None]
        kept |= best
        worth = tl.where(best, -float("inf"), worth)
    choice = tl.where(kept[:, :, None], choice, tl.minimum(choice, _LEAST))
    return tl.reshape(choice, [NUM, GROUPS * SIZE])


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """[T, experts] logits -> ids [T, per_token] int32 and weights [T, per_token] float32."""
    num, size = logits.shape
    ids, weights = _results(num, routing, logits.device)
    if num:
        ahead, few = overlap(num, size), 4
        launch(_route, triton.cdiv(num, few))(
            ids, weights, logits, logits if bias is None else bias, routing.scale, num, logits.stride(0),
            HOW=_how(routing, size, bias), NUM=few, OVERLAP=ahead, launch_pdl=ahead, num_warps=1,
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
    num, size = x.shape
    if not 0 < num <= _MOST_CHOSEN or x.dtype != router.dtype or x.dtype == torch.float32:
        return route(F.linear(x.to(router.dtype), router, router_bias), routing, bias)
    ids, weights = _results(num, routing, x.device)
    how = _how(routing, len(router), bias)
    columns = how[4] * how[5]
    length = max(_NUMBERS // columns, 16)
    tiles, splits, ahead = triton.cdiv(num, _TOKENS), triton.cdiv(size, length), overlap(num, size)
    parts = torch.empty(tiles * splits * _TOKENS * columns, dtype=torch.float32, device=x.device)
    launch(_choose, tiles, splits)(
        ids, weights, parts, x, router, x if router_bias is None else router_bias, x if bias is None else bias,
        arrivals_of(x.device), routing.scale, num, size, x.stride(0), BIASED=router_bias is not None, HOW=how,
        NUM=_TOKENS, LENGTH=length, SPLITS=splits, OVERLAP=ahead, launch_pdl=ahead, num_warps=4,
    )  # fmt: skip
    return ids, weights


def _results(num: int, routing: Routing, device: torch.device) -> tuple[Tensor, Tensor]:
    ids = torch.empty(num, routing.per_token, dtype=torch.int32, device=device)
    return ids, torch.empty(num, routing.per_token, dtype=torch.float32, device=device)


def _how(routing: Routing, experts: int, bias: Tensor | None) -> tuple[int, ...]:
    """What a kernel is compiled for: experts per token, sigmoid, renormalized, biased; groups and the size of
    one in powers of two, and as they are; how many groups are taken, and how many experts say what one is worth.
    """
    top, scoring, renormalized, _, groups, top_groups, group_best = routing
    size, columns = experts // groups, triton.next_power_of_2(groups)
    wide = max(triton.next_power_of_2(size), 16 // columns)
    kind = top, int(scoring == "sigmoid"), int(renormalized), int(bias is not None)
    return *kind, columns, wide, groups, size, top_groups, group_best

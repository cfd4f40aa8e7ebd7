"""Token sampling on a GPU without a sort, in two launches for any mix of sampling parameters.

`_scan` reads each row once, a tile per program: the argmax, and the argmax under Gumbel noise, which is a
sample of the softmax. Noise depends on (seed, position, token id) only, not on other rows.

`_finish_sample` writes the tokens. The limits of a row are its top_k, top_p and min_p, as in
`sampling/random.py`. For a row with top_k, programs collect all candidates for its k best tokens, and the
last program to arrive applies the limits and samples among them. Other rows with limits are sampled by
rejection: if the limits reject a sample, they reject all smaller logits too, and the next sample is among
larger ones. Probabilities are added as integers, in any order.

Masks of rows, and whether a step is skipped, are read on the device: CUDA graphs can capture them.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import follow, launch, overlap

TILE = tl.constexpr(4096)
_CHUNKS = tl.constexpr(8)
"""Chunks per tile. The k-th largest maximum of all chunks is a lower bound of the k-th largest logit."""
_FEW = tl.constexpr(2048)
"""Maximum candidates of a row; with more (many equal logits), the whole row is searched."""
_SPLITS = 8
_PROGRAMS = 512
"""Programs of `_finish_sample` for all rows, up to `_SPLITS` per row."""
_ROUNDS = tl.constexpr(7)
"""Rounds of Philox: the fewest that pass the tests of randomness."""
_NEVER = tl.constexpr(float("-inf"))
_BIG = tl.constexpr(2**31 - 1)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
FREE, LATER = -1, -2
_LATER = tl.constexpr(LATER)


class ConstrainedDevice(NamedTuple):
    """Grammar masks of rows on the device."""

    mask_of: Tensor
    """[N] int32, index of each row's mask; FREE: none; LATER (then in all rows): the kernels do not sample"""
    width: Tensor
    """[1] int32, number of words per mask"""
    bits: Tensor
    """int32, all masks: bit t % 32 of word t // 32 is 1 if token t is allowed; ids beyond the mask are not"""


@triton.jit
def load_logits(row: tl.tensor, ids: tl.tensor, vocab: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Return the logits of `ids` over the temperature (if it is not 0), infinity for NaN, and 0 for -0."""
    x = tl.load(row + ids, mask=ids < vocab, other=_NEVER).to(tl.float32)
    x = tl.div_rn(x, tl.where(temperature > 0, temperature, 1.0))
    return tl.where(x == x, x, float("inf")) + 0.0


@triton.jit
def _best(values: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """Return the largest value and its id, the smallest id among equals."""
    top = tl.max(values, 0)
    return top, tl.min(tl.where(values == top, ids, _BIG), 0)


@triton.jit
def _log(x: tl.tensor) -> tl.tensor:
    """Return the logarithm, on a GPU by the approximate instruction."""
    if not _INTERPRETED:
        twos = tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
        return twos * 0.6931471805599453
    return tl.log(x)


@triton.jit
def _gumbel(bits: tl.tensor) -> tl.tensor:
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    small = u * (1.0 + u * (0.5 + u * (1.0 / 3 + u * 0.25)))
    return -_log(tl.where(u < 1.0 / 64, small, -_log(1.0 - u)))


@triton.jit
def _random_bits(seed: tl.tensor, position: tl.tensor, fours: tl.tensor) -> tl.tensor:
    """Return random bits for the token ids 4 * fours + 0, 1, 2, 3."""
    zero = 0 * fours
    return tl.philox(seed, fours, zero + position.to(tl.int32), zero, zero, _ROUNDS)


@triton.jit
def _tile_noise(seed: tl.tensor, position: tl.tensor, start: tl.tensor) -> tl.tensor:
    a, b, c, d = _random_bits(seed, position, start // 4 + tl.arange(0, TILE // 4))
    return _gumbel(tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [TILE]))


@triton.jit
def _noise(seed: tl.tensor, position: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """Return the Gumbel noise of the token ids `ids`; see `_random_bits`."""
    a, b, c, d = _random_bits(seed, position, ids // 4)
    left, right = tl.where(ids % 4 == 0, a, b), tl.where(ids % 4 == 2, c, d)
    return _gumbel(tl.where(ids % 4 < 2, left, right))


@triton.jit
def _order(x: tl.tensor) -> tl.tensor:
    """Convert floats to unsigned integers with the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def _unorder(key: tl.tensor) -> tl.tensor:
    bits = key.to(tl.int32, bitcast=True)
    return (bits ^ (((~bits) >> 31) | -2147483648)).to(tl.float32, bitcast=True)


@triton.jit
def _threshold(values: tl.tensor, weights: tl.tensor, target: tl.tensor) -> tl.tensor:
    """Return the largest threshold such that values from it on have a total weight of at least `target`."""
    keys = _order(values)
    key, bit = tl.zeros([1], tl.uint32), tl.full([1], 2147483648, tl.uint32)
    for _ in range(32):
        trial = key | bit
        bit = bit >> 1
        enough = tl.sum(tl.where(keys >= trial, weights, 0), 0) >= target
        key = tl.where(enough, trial, key)
    return tl.max(_unorder(key), 0)


@triton.jit
def _mass(x: tl.tensor, peak: tl.tensor) -> tl.tensor:
    return (tl.exp(x - peak) * 2.0**40).to(tl.int64)


@triton.jit
def _min_p_floor(peak: tl.tensor, min_p: tl.tensor) -> tl.tensor:
    return tl.where(min_p > 0, peak + tl.log(min_p), _NEVER)


@triton.jit
def _target_mass(total: tl.tensor, top_p: tl.tensor) -> tl.tensor:
    return (total.to(tl.float64) * top_p).to(tl.int64)


@triton.jit
def _constrain(
    x: tl.tensor, row: tl.tensor, ids: tl.tensor, vocab: tl.tensor, mask: tl.tensor, bits: tl.tensor,
    width: tl.tensor, writes: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Return the logits `x` of a tile with -inf for tokens that the mask disallows, and whether it allows
    any. With `writes`, also write -inf to the disallowed logits in memory."""
    width = tl.load(width)
    words = tl.load(bits + mask.to(tl.int64) * width + ids // 32, mask=ids // 32 < width, other=0)
    allowed = ((words >> (ids % 32)) & 1) != 0
    if writes:
        tl.store(row + ids, _NEVER, mask=(ids < vocab) & (allowed == 0))
    return tl.where(allowed, x, _NEVER), tl.max(allowed.to(tl.int32), 0)


@triton.jit
def _scan(
    logits: tl.tensor, limits: tl.tuple, masks: tl.tuple, floats: tl.tensor, ints: tl.tensor,
    vocab: tl.tensor, stride: tl.tensor,
    OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Store a tile's argmax, its argmax with Gumbel noise, and its chunk maxima. Grid: (rows, tiles).
    `limits` are the sampling parameters of rows, or None for the argmax only; `masks` is a
    `ConstrainedDevice` or None.

    A row of `floats` has maxima, maxima with noise, chunk maxima, candidates; of `ints` ids, two counters.
    """
    row, tile, tiles = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    ids = tile * TILE + tl.arange(0, TILE)
    follow(OVERLAP)
    heat, any_allowed = 0.0, 1
    if limits is not None:
        temperature, top_k, top_p, min_p, seeds, positions = limits
        heat = tl.load(temperature + row)
    if masks is not None:
        mask = tl.load(masks[0] + row)
        if mask == _LATER:
            return
    x = load_logits(logits + row * stride, ids, vocab, heat)
    if masks is not None:  # noqa: SIM102
        if mask >= 0:
            limited = (tl.load(top_k + row) > 0) | (tl.load(top_p + row) < 1) | (tl.load(min_p + row) > 0)
            x, any_allowed = _constrain(
                x, logits + row * stride, ids, vocab, mask, masks[2], masks[1], limited & (heat > 0)
            )
    top, top_id = _best(x, ids)
    floats += row * ((2 + _CHUNKS) * tiles + _FEW)
    ints += row * (2 * tiles + _FEW + 2)
    tl.store(floats + tile, top)
    tl.store(ints + tile, top_id)
    if limits is not None:
        if heat > 0:
            noisy = x
            if any_allowed > 0:
                noisy += _tile_noise(tl.load(seeds + row), tl.load(positions + row), tile * TILE)
            noisy_top, noisy_id = _best(noisy, ids)
            tl.store(floats + tiles + tile, noisy_top)
            tl.store(ints + tiles + tile, noisy_id)
            maxima = tl.max(tl.reshape(x, [_CHUNKS, TILE // _CHUNKS]), 1)
            tl.store(floats + 2 * tiles + tile * _CHUNKS + tl.arange(0, _CHUNKS), maxima)
        if tile == 0:
            tl.store(ints + 2 * tiles + _FEW + tl.arange(0, 2), tl.zeros([2], tl.int32))


@triton.jit
def _reduce(floats: tl.tensor, ints: tl.tensor, tiles: tl.tensor, TILES: tl.constexpr) -> tl.tensor:
    """Return the largest of the values that `_scan` has stored for the tiles of a row, and its token id."""
    at = tl.arange(0, TILES)
    values = tl.load(floats + at, mask=at < tiles, other=_NEVER)
    return _best(values, tl.load(ints + at, mask=at < tiles, other=_BIG))


@triton.jit
def _finish_argmax(
    out: tl.tensor, floats: tl.tensor, ints: tl.tensor, tiles: tl.tensor,
    TILES: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    follow(OVERLAP)
    floats += row * ((2 + _CHUNKS) * tiles + _FEW)
    _, id = _reduce(floats, ints + row * (2 * tiles + _FEW + 2), tiles, TILES)
    tl.store(out + row, id.to(tl.int64))


@triton.jit
def _row_kth(row: tl.tensor, vocab: tl.tensor, heat: tl.tensor, k: tl.tensor) -> tl.tensor:
    """Return the k-th largest logit of a whole row, divided by the temperature `heat`."""
    key, bit = tl.zeros([1], tl.uint32), tl.full([1], 2147483648, tl.uint32)
    for _ in range(32):
        trial = key | bit
        bit = bit >> 1
        counts = tl.zeros([TILE], tl.int32)
        for start in range(0, vocab, TILE):
            ids = start + tl.arange(0, TILE)
            keys = _order(load_logits(row, ids, vocab, heat))
            counts += ((keys >= trial) & (ids < vocab)).to(tl.int32)
        key = tl.where(tl.sum(counts, 0) >= k, trial, key)
    return tl.max(_unorder(key), 0)


@triton.jit
def _masses(
    row: tl.tensor, vocab: tl.tensor, heat: tl.tensor, peak: tl.tensor, floor: tl.tensor, bar: tl.tensor
) -> tl.tensor:
    """Return the probability (an integer) of a row's logits from `floor` on, and of those above `bar`."""
    total, above = tl.zeros([TILE], tl.int64), tl.zeros([TILE], tl.int64)
    for start in range(0, vocab, TILE):
        x = load_logits(row, start + tl.arange(0, TILE), vocab, heat)
        mass = tl.where(x >= floor, _mass(x, peak), 0)
        total += mass
        above += tl.where(x > bar, mass, 0)
    return tl.sum(total, 0), tl.sum(above, 0)


@triton.jit
def _noisy_argmax(
    row: tl.tensor, vocab: tl.tensor, heat: tl.tensor, seed: tl.tensor, position: tl.tensor, floor: tl.tensor,
    bar: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Return the token id with the largest logit plus Gumbel noise, among logits that are at least `floor`
    and above `bar`, and its logit."""
    most, most_id = tl.full([TILE], _NEVER, tl.float32), tl.full([TILE], _BIG, tl.int32)
    for start in range(0, vocab, TILE):
        ids = start + tl.arange(0, TILE)
        x = load_logits(row, ids, vocab, heat)
        noisy = tl.where((x >= floor) & (x > bar), x + _tile_noise(seed, position, start), _NEVER)
        better = noisy > most
        most, most_id = tl.where(better, noisy, most), tl.where(better, ids, most_id)
    _, id = _best(most, most_id)
    return id, tl.max(load_logits(row, id + tl.zeros([1], tl.int32), vocab, heat), 0)


@triton.jit
def _reject(
    row: tl.tensor, vocab: tl.tensor, heat: tl.tensor, k: tl.tensor, top_p: tl.tensor, min_p: tl.tensor,
    seed: tl.tensor, position: tl.tensor, peak: tl.tensor, id: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Return the token id of a row with limits (top_k, top_p or min_p) by rejection sampling. The first
    candidate is `id`, a sample without limits."""
    floor = _min_p_floor(peak, min_p)
    if k > 0:
        floor = tl.maximum(floor, _row_kth(row, vocab, heat, k))
    value = tl.max(load_logits(row, id + tl.zeros([1], tl.int32), vocab, heat), 0)
    bar, rejected, again = tl.zeros_like(value) + _NEVER, value < floor, value == value
    while again:
        if rejected:
            id, value = _noisy_argmax(row, vocab, heat, seed, position, floor, bar)
        if top_p < 1:
            total, above = _masses(row, vocab, heat, peak, floor, value)
            again = (above >= _target_mass(total, top_p)) & (value < peak)
        else:
            again = value != value
        bar, rejected = value, again
    return id


@triton.jit
def _sample_candidates(
    values: tl.tensor, ids: tl.tensor, k: tl.tensor, top_p: tl.tensor, min_p: tl.tensor, seed: tl.tensor,
    position: tl.tensor, peak: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Return the token of a row with top_k. The candidates `values` and `ids` include its k best tokens."""
    kth = _threshold(values, (values > _NEVER).to(tl.int32), k)
    floor = tl.maximum(_min_p_floor(peak, min_p), tl.where(kth == kth, kth, _NEVER))
    mass = tl.where(values >= floor, _mass(values, peak), 0)
    if top_p < 1:
        last = _threshold(values, mass, _target_mass(tl.sum(mass, 0), top_p))
        floor = tl.maximum(floor, tl.where(last <= peak, last, peak))
    noisy = tl.where((values >= floor) & (values > _NEVER), values + _noise(seed, position, ids), _NEVER)
    _, id = _best(noisy, ids)
    return id


@triton.jit
def _collect(
    row: tl.tensor, vocab: tl.tensor, heat: tl.tensor, k: tl.tensor, tops: tl.tensor, candidates: tl.tensor,
    candidate_ids: tl.tensor, counters: tl.tensor, tiles: tl.tensor,
    CHUNKS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Append this program's candidates for the row's `k` best tokens to those of the row's other programs.
    Return whether this is the last of these programs, and the number of candidates so far."""
    at = tl.arange(0, CHUNKS)
    bounds = tl.load(tops + 2 * tiles + at, mask=at < tiles * _CHUNKS, other=_NEVER)
    bound = _threshold(bounds, (bounds > _NEVER).to(tl.int32), k)
    bound = tl.where(bound == bound, bound, _NEVER)
    for tile in range(tl.program_id(1), tiles, tl.num_programs(1)):
        if tl.load(tops + tile) >= bound:
            ids = tile * TILE + tl.arange(0, TILE)
            x = load_logits(row, ids, vocab, heat)
            above = (x >= bound) & (x > _NEVER)
            count = tl.sum(above.to(tl.int32), 0)
            place = tl.atomic_add(counters, count) + tl.cumsum(above.to(tl.int32), 0) - 1
            tl.store(candidates + place, x, mask=above & (place < _FEW))
            tl.store(candidate_ids + place, ids, mask=above & (place < _FEW))
    tl.debug_barrier()
    last = tl.atomic_add(counters + 1, 1) == tl.num_programs(1) - 1
    return last, tl.atomic_add(counters, 0)


@triton.jit
def _finish_sample(
    out: tl.tensor, logits: tl.tensor, limits: tl.tuple, masks: tl.tuple, floats: tl.tensor, ints: tl.tensor,
    vocab: tl.tensor, stride: tl.tensor, tiles: tl.tensor,
    TILES: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Write the token of each row; only rows with top_k use more than one program. Grid: (rows, splits)."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    follow(OVERLAP)
    if masks is not None:  # noqa: SIM102
        if tl.load(masks[0] + row) == _LATER:
            return
    temperature, top_k, top_p, min_p, seeds, positions = limits
    heat, k = tl.load(temperature + row), tl.load(top_k + row).to(tl.int32)
    mass, least = tl.load(top_p + row).to(tl.float32), tl.load(min_p + row).to(tl.float32)
    k = tl.where(k < vocab, k, 0)
    limited = (heat > 0) & ((k > 0) | (mass < 1) | (least > 0))
    by_candidates = limited & (k > 0) & (k <= tiles * _CHUNKS)
    if (split > 0) & (by_candidates == 0):
        return
    floats += row * ((2 + _CHUNKS) * tiles + _FEW)
    ints += row * (2 * tiles + _FEW + 2)
    logits += row * stride
    peak, id = _reduce(floats, ints, tiles, TILES)
    writes = split == 0
    if (heat > 0) & (tl.abs(peak) < float("inf")):
        seed, position = tl.load(seeds + row), tl.load(positions + row)
        _, id = _reduce(floats + tiles, ints + tiles, tiles, TILES)
        by_rejection = limited
        if by_candidates:
            candidates, ids = floats + (2 + _CHUNKS) * tiles, ints + 2 * tiles
            writes, count = _collect(logits, vocab, heat, k, floats, candidates, ids, ids + _FEW, tiles, TILES * _CHUNKS)  # fmt: skip # noqa: E501
            by_rejection = writes & (count > _FEW)
            if writes & (count <= _FEW):
                at = tl.arange(0, _FEW)
                values = tl.load(candidates + at, mask=at < count, other=_NEVER)
                candidate_ids = tl.load(ids + at, mask=at < count, other=0)
                id = _sample_candidates(values, candidate_ids, k, mass, least, seed, position, peak)
        if by_rejection:
            id = _reject(logits, vocab, heat, k, mass, least, seed, position, peak, id)
    if writes:
        tl.store(out + row, id.to(tl.int64))


def _scratch(logits: Tensor) -> tuple[tuple[int, int], int, Tensor, Tensor]:
    num_rows, vocab = logits.shape
    tiles = triton.cdiv(vocab, TILE.value)
    floats = (2 + _CHUNKS.value) * tiles + _FEW.value
    ints = 2 * tiles + _FEW.value + 2
    return (
        (num_rows, tiles),
        triton.next_power_of_2(tiles),
        torch.empty(num_rows * floats, dtype=torch.float32, device=logits.device),
        torch.empty(num_rows * ints, dtype=torch.int32, device=logits.device),
    )


def argmax(logits: Tensor) -> Tensor:
    """Return the index [N] int64 of the first maximum of each row of `logits` [N, V]; NaN is the largest."""
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if len(logits):
        grid, tiles, floats, ints = _scratch(logits)
        ahead, (_, vocab), stride = overlap(len(logits)), logits.shape, logits.stride(0)
        launch(_scan, *grid)(
            logits, None, None, floats, ints, vocab, stride, OVERLAP=ahead, launch_pdl=ahead, num_warps=8
        )
        launch(_finish_argmax, len(logits))(
            out, floats, ints, grid[1], TILES=tiles, OVERLAP=ahead, launch_pdl=ahead, num_warps=1
        )
    return out


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    constrained: ConstrainedDevice | None = None,
) -> Tensor:
    """Sample a token id [N] int64 for each row of `logits` [N, V]; the other tensors are [N].

    Temperature 0 is greedy. A top_k of 0 is off. The token depends only on the logits, the parameters, the
    seed and the position of its row. Which kernels run does not depend on the parameters. `logits` are not
    changed, except that those of tokens that `constrained` disallows may become -inf.
    """
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if len(logits):
        grid, tiles, floats, ints = _scratch(logits)
        ahead, (_, vocab), stride = overlap(len(logits)), logits.shape, logits.stride(0)
        limits = temperature, top_k, top_p, min_p, seeds, positions
        launch(_scan, *grid)(
            logits, limits, constrained, floats, ints, vocab, stride, OVERLAP=ahead, launch_pdl=ahead,
            num_warps=8,
        )  # fmt: skip
        launch(_finish_sample, len(logits), min(_SPLITS, grid[1], max(_PROGRAMS // len(logits), 1)))(
            out, logits, limits, constrained, floats, ints, vocab, stride, grid[1], TILES=tiles,
            OVERLAP=ahead, launch_pdl=ahead, num_warps=8,
        )  # fmt: skip
    return out

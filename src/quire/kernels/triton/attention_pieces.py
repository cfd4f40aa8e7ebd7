"""Tiles of prompts whose keys are cut into pieces, so that a few tiles far into a prompt use the whole GPU.

Each piece has a program of the prefill kernel `attention.tiles`. `cut_tiles` finds tiles and pieces on the
device, for CUDA graphs.
"""
# mypy: disable-error-code="untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def _keys(seq_lens: tl.tensor, num_queries: tl.tensor, first: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """Return the number of keys of the tile that begins at the query `first` of each sequence."""
    return tl.maximum(seq_lens - num_queries + tl.minimum(first + TILE, num_queries), 0)


@triton.jit(do_not_specialize=["num_seqs", "num_tokens", "num_pieces", "programs"])
def cut_tiles(
    few: tl.tensor, work: tl.tensor, query_starts: tl.tensor, seq_lens: tl.tensor, num_seqs: tl.tensor,
    num_tokens: tl.tensor, num_pieces: tl.tensor, programs: tl.tensor,
    FEW: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, LEAST: tl.constexpr, GAIN: tl.constexpr,
    SEQS: tl.constexpr,
) -> None:  # fmt: skip
    """Assign sequences with at most FEW queries to `few` [num_seqs], and cut the others into tiles of TILE
    queries, whose keys are cut into pieces. The last sequence pads the batch. Grid: (1,).

    `work` [num_pieces, 6] has for each piece its sequence, first query, first key, end of the keys, the index
    of the first result of its tile, if the tile is cut, and the tile's number of pieces. Unused pieces have 0
    there, and begin after the last token. `programs` programs share the keys of all tiles; 0: tiles are not
    cut. The results are those of the pieces of cut tiles, at most 2 * `programs`: a tile that is cut is
    longer than a piece.
    """
    seq, last = tl.arange(0, SEQS), num_seqs - 1
    exists = seq < num_seqs
    starts = tl.load(query_starts + seq, mask=exists, other=0)
    num_queries = tl.load(query_starts + seq + 1, mask=exists, other=0) - starts
    lens = tl.load(seq_lens + seq, mask=exists, other=0)
    is_few = (num_queries > 0) & (num_queries <= FEW) & (seq < last)
    tl.store(few + seq, tl.where(is_few, seq, last), mask=exists)
    counts = tl.where((num_queries > FEW) | (seq == last), tl.cdiv(num_queries, TILE), 0)
    most, total = tl.max(counts, 0), 0
    for tile in range(0, most):
        total += tl.sum(tl.where(tile < counts, _keys(lens, num_queries, tile * TILE, TILE), 0), 0)
    size = tl.cdiv(total, programs) if programs > 0 else 1 << 30
    size = tl.maximum(tl.cdiv(size, STEP) * STEP, LEAST)
    next_piece, next_result = 0, 0
    for tile in range(0, most):
        # The last tile of a sequence comes first: it has the most keys.
        used, first = tile < counts, (counts - 1 - tile) * TILE
        keys = _keys(lens, num_queries, first, TILE)
        num = tl.where(used, tl.where(keys - GAIN > size, tl.cdiv(keys, size), 1), 0)
        begin = next_piece + tl.cumsum(num, 0) - num
        cut = tl.where(num > 1, num, 0)
        result = next_result + tl.cumsum(cut, 0) - cut
        for piece in range(0, tl.max(num, 0)):
            here, to = piece < num, work + 6 * (begin + piece)
            tl.store(to, seq, mask=here)
            tl.store(to + 1, first, mask=here)
            tl.store(to + 2, piece * size, mask=here)
            tl.store(to + 3, tl.where(num > 1, (piece + 1) * size, 0x7FFFFFFF), mask=here)
            tl.store(to + 4, result, mask=here)
            tl.store(to + 5, num, mask=here)
        next_piece += tl.sum(num, 0)
        next_result += tl.sum(cut, 0)
    for begin in range(next_piece, num_pieces, SEQS):
        to, unused = work + 6 * (begin + seq), begin + seq < num_pieces
        tl.store(to, last, mask=unused)
        tl.store(to + 1, num_tokens, mask=unused)
        tl.store(to + 5, 0, mask=unused)

"""The input arrays of one step in one buffer, so that a single copy moves them to the device."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.data.step_plan import Ints, StepPlan, spread
from quire.sampling.random import SamplingTensors
from quire.sampling.rows import SamplingRows
from quire.worker.rows import Int64s, Rows

_ALIGN = 64
"""Alignment of each array in bytes. Kernels are compiled for aligned pointers, so an unaligned array would
compile them again."""

Arrays = dict[str, NDArray[Any]]
_NO_PLACES: Int64s = np.empty(0, np.int64)
_NO_IDS: Ints = np.empty(0, np.int32)


class BufferSizes(NamedTuple):
    """The lengths of a step's input arrays."""

    tokens: int
    seqs: int
    samples: int
    blocks: int
    """Number of changed block-table entries."""
    groups: int = 1
    """Number of layer groups, each with its own slots."""
    adapters: bool = False
    """Whether some token has an adapter."""
    drafts: bool = False
    """Whether the device computes inputs of the decodes (speculative decoding on a GPU)."""
    query_len: int = 0
    """Tokens of each sequence in a step of decodes whose inputs the device computes; 0 if they vary."""
    axes: int = 0
    """M-RoPE positions of each token: 1, or 3 (time, height, width); 0 for models without M-RoPE."""


def slots_of(group: int) -> str:
    """Return the name of the array with the cache slots of a layer group's tokens."""
    return f"slots{group}" if group else "slots"


def _layout(sizes: BufferSizes) -> list[tuple[str, type, int]]:
    tokens, seqs, samples, blocks, groups, adapters, drafts, _, axes = sizes
    return [
        *((name, np.int64, tokens) for name in ("token_ids", "sources", "positions")),
        *((slots_of(group), np.int64, tokens) for group in range(groups)),
        *((("mrope_positions", np.int64, axes * tokens),) if axes else ()),
        *((name, np.int64, samples) for name in ("logit_tokens", "logit_rows", "seeds", "sample_at")),
        ("block_places", np.int64, blocks),
        ("top_k", np.int32, samples),
        *((name, np.float32, samples) for name in ("temperature", "top_p", "min_p")),
        ("block_ids", np.int32, blocks),
        ("query_starts", np.int32, seqs + 1),
        *((name, np.int32, seqs) for name in ("seq_lens", "rows")),
        *((("adapters", np.int32, tokens), ("logit_adapters", np.int32, samples)) if adapters else ()),
        *((name, np.int32, seqs) for name in ("planned", "sample_starts") if drafts),
    ]


def _offsets(sizes: BufferSizes) -> tuple[dict[str, tuple[int, type, int]], int]:
    """Return the offset in bytes, type and number of elements of each array by name, and the bytes of the
    buffer."""
    at, places = 0, {}
    for name, kind, length in _layout(sizes):
        places[name] = (at, kind, length)
        at += -(-length * np.dtype(kind).itemsize // _ALIGN) * _ALIGN
    return places, max(at, _ALIGN)


def bytes_of(sizes: BufferSizes) -> int:
    return _offsets(sizes)[1]


def host_arrays(memory: Tensor, sizes: BufferSizes) -> Arrays:
    """Return the input arrays by name, as views of the bytes `memory` on the host."""
    raw = memory.numpy()
    return {
        name: raw[at : at + length * np.dtype(kind).itemsize].view(kind)
        for name, (at, kind, length) in _offsets(sizes)[0].items()
    }


def tensors(memory: Tensor, sizes: BufferSizes) -> dict[str, Tensor]:
    """Return the input arrays by name, as tensors on the device of `memory`."""
    types: dict[type, torch.dtype] = {np.int64: torch.int64, np.int32: torch.int32, np.float32: torch.float32}
    return {
        name: memory[at : at + length * np.dtype(kind).itemsize].view(types[kind])
        for name, (at, kind, length) in _offsets(sizes)[0].items()
    }


class StepBuffers:
    """The input arrays of a step, in host `memory` that is reused for later steps.

    If the same sequences decode again, only the values that change are written."""

    def __init__(self, memory: Tensor, sizes: BufferSizes) -> None:
        self.memory = memory
        self.sizes = sizes
        self.arrays = host_arrays(memory, sizes)
        self._rows = b""
        self._query_len = self._version = 0

    def holds(self, plan: StepPlan, all_rows: Rows) -> bool:
        """Whether the buffer was last written for a decode of the same rows and requests as this plan, so
        that few values change."""
        is_decode = plan.query_len == self._query_len > 0 or (self.sizes.query_len > 0 and len(plan.rows) > 0)
        return is_decode and self._version == all_rows.version and _bytes_of(plan) == self._rows

    def write(self, plan: StepPlan, all_rows: Rows, places: Int64s = _NO_PLACES, ids: Ints = _NO_IDS) -> None:
        """Write the inputs of a step. Values beyond the sizes of the step stay unchanged (see `blank`).

        `places` are the changed entries of the flattened block tables, and `ids` their block ids."""
        if not self.holds(plan, all_rows):
            _fill_rows(self.arrays, plan, all_rows, self.sizes.query_len)
            self._rows, self._query_len, self._version = _bytes_of(plan), plan.query_len, all_rows.version
        if not self.sizes.query_len:
            _fill(self.arrays, plan, all_rows)
        self.arrays["block_places"][: len(places)] = places
        self.arrays["block_ids"][: len(ids)] = ids


def _bytes_of(plan: StepPlan) -> bytes:
    return plan.rows.tobytes() + plan.num_drafts.tobytes()


def _fill_rows(into: Arrays, plan: StepPlan, all_rows: Rows, query_len: int) -> None:
    """Fill the arrays that do not change while rows, requests and tokens per row stay the same."""
    rows, sampling, state = plan.rows, plan.logit_rows, all_rows.sampling
    num_seqs, count = len(rows), len(sampling)
    starts = into["query_starts"]
    if not query_len:
        starts[0] = 0
        np.cumsum(plan.num_tokens, out=starts[1 : num_seqs + 1])
    into["rows"][:num_seqs] = rows
    ends = (starts[:num_seqs] + plan.num_tokens)[plan.samples]
    if len(plan.num_drafts):
        num_samples = 1 + plan.num_drafts[plan.samples]
        into["logit_tokens"][:count] = spread(ends - num_samples, num_samples)
    else:
        into["logit_tokens"][:count] = ends - 1
    into["logit_rows"][:count] = sampling
    into["seeds"][:count] = state.seed[sampling].view(np.int64)
    into["temperature"][:count] = state.sample_temperature[sampling]
    for name in ("top_k", "top_p", "min_p"):
        into[name][:count] = getattr(state, name)[sampling]
    if "adapters" in into:
        adapters = np.repeat(all_rows.adapter[rows], query_len or plan.num_tokens)
        into["adapters"][: len(adapters)] = adapters
        into["logit_adapters"][:count] = all_rows.adapter[sampling]
    if "planned" in into:
        _fill_drafts(into, plan)


def _fill_drafts(into: Arrays, plan: StepPlan) -> None:
    num_seqs = len(plan.rows)
    num_drafts = plan.num_drafts if len(plan.num_drafts) else np.zeros(num_seqs, np.int32)
    num_samples = np.where(plan.samples, 1 + num_drafts, 0)
    into["planned"][:num_seqs] = np.where(num_samples == plan.num_tokens, num_drafts, -1)
    into["sample_starts"][:num_seqs] = np.where(plan.samples, np.cumsum(num_samples) - num_samples, -1)


def _fill(into: Arrays, plan: StepPlan, all_rows: Rows) -> None:
    """Fill the arrays that change in every step."""
    rows, lens = plan.rows.astype(np.intp), plan.num_tokens
    num_seqs, num_tokens, computed = len(rows), plan.total_tokens, all_rows.num_computed[rows]
    row_of_token, positions = rows, computed.astype(np.intp)
    if num_tokens > num_seqs:
        row_of_token = np.repeat(rows, lens)
        positions = np.arange(num_tokens) + np.repeat(computed - into["query_starts"][:num_seqs], lens)
    blocks, offsets = np.divmod(positions, all_rows.block_size)
    into["positions"][:num_tokens] = positions
    if all_rows.mrope is not None and "mrope_positions" in into:
        mrope_positions = into["mrope_positions"].reshape(-1, len(into["positions"]))
        all_rows.mrope.fill(mrope_positions, plan, row_of_token, positions)
    for group, tables in enumerate(all_rows.tables):
        slots = into[slots_of(group)][:num_tokens]
        np.multiply(tables[row_of_token, blocks], all_rows.block_size, out=slots, dtype=np.int64)
        slots += offsets
    into["token_ids"][:num_tokens] = all_rows.tokens[row_of_token, positions]
    unknown = positions >= all_rows.num_known[row_of_token]
    into["sources"][:num_tokens] = np.where(unknown, row_of_token, -1)
    np.add(computed, lens, out=into["seq_lens"][:num_seqs])
    places = all_rows.num_tokens[plan.sampling_rows.astype(np.intp)]
    into["sample_at"][: len(plan.logit_rows)] = (
        spread(places, 1 + plan.num_drafts[plan.samples]) if len(plan.num_drafts) else places
    )


def blank(into: Arrays, first: int, pad_row: int, pad_place: int, query_len: int = 1) -> None:
    """Fill the arrays of a decode step with padding from sequence `first` on. Padding has no keys of its own
    and writes to the row `pad_row`, whose entries begin at `pad_place` in the flattened block tables. With
    several tokens per sequence it attends to the first cache block, since each token must attend to some
    key."""
    for name, array in into.items():
        if (padding := _PADDING.get(name.rstrip("0123456789"))) is not None:
            array[first:] = padding
    into["rows"][first:] = into["logit_rows"][first:] = pad_row
    into["block_places"][:] = pad_place
    into["block_ids"][:] = 0
    into["query_starts"][:] = np.arange(len(into["query_starts"]), dtype=np.int32) * query_len
    if query_len > 1:
        into["seq_lens"][first:] = query_len
    into["logit_tokens"][:] = np.arange(len(into["logit_tokens"]))


def pad(into: Arrays, num_seqs: int) -> None:
    """Pad a step with `num_seqs` sequences up to the size of its arrays: all padding tokens belong to the
    last sequence of the arrays, and the sequences in between are empty."""
    starts = into["query_starts"]
    starts[num_seqs + 1 :] = starts[num_seqs]
    starts[-1] = len(into["token_ids"])


_PADDING: dict[str, float] = {
    "token_ids": 0,
    "sources": -1,
    "positions": 0,
    "mrope_positions": 0,
    "slots": -1,
    "seq_lens": 0,
    "adapters": -1,
    "logit_adapters": -1,
    "seeds": 0,
    "sample_at": 0,
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "planned": -1,
    "sample_starts": -1,
}


def sampling_tensors(inputs: dict[str, Tensor]) -> SamplingTensors:
    return SamplingTensors(
        **{name: inputs[name] for name in ("temperature", "top_k", "top_p", "min_p", "seeds")},
        positions=inputs["sample_at"],
    )


def row_sampling_tensors(state: SamplingRows, rows: NDArray[np.intp]) -> SamplingTensors:
    """Return the sampling parameters of rows with one sampled position each; the positions are left out."""
    return SamplingTensors(
        temperature=torch.from_numpy(state.sample_temperature[rows]),
        top_k=torch.from_numpy(state.top_k[rows].astype(np.int32)),
        top_p=torch.from_numpy(state.top_p[rows].astype(np.float32)),
        min_p=torch.from_numpy(state.min_p[rows].astype(np.float32)),
        seeds=torch.from_numpy(state.seed[rows].view(np.int64)),
        positions=torch.zeros(len(rows), dtype=torch.int64),
    )

"""Word timestamps: aligns transcribed tokens with the audio, by the weights of some cross-attention heads."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from quire.data.step_plan import StepPlan
from quire.data.timestamps import AlignmentHeads
from quire.kernels.cpu import dtw, native
from quire.layers.cross_attention import CrossAttentionCache
from quire.parallel.group import Group
from quire.sampling.sampler import Sampled
from quire.worker.device import ForwardResult
from quire.worker.rows import Rows

_WIDTH = 7
"""Width of the median filter over encoder states, as in all Whisper configurations."""


class Alignment:
    """Aligns the tokens of prompts that contain a transcript with the audio, to find the time of each word.
    The queries of the alignment heads are recorded while the prompt is computed; after its last token they
    are scored against the keys of the audio."""

    def __init__(
        self, cross_cache: CrossAttentionCache, heads: Sequence[tuple[int, int]], all_rows: Rows, group: Group
    ) -> None:
        """Set the alignment `heads`, as (layer, head) over all ranks."""
        self.cross_cache, self.all_rows, self.group = cross_cache, all_rows, group
        self.num_heads = len(heads)
        num_local = cross_cache.layers[0].spec.heads
        self._heads: dict[int, list[int]] = {}
        """Alignment heads of this rank, by layer."""
        for layer, head in heads:
            if head // num_local == group.rank:
                self._heads.setdefault(layer, []).append(head % num_local)
        self._dtw = dynamic_time_warping if native.library() is None else dtw.align
        self._requests: dict[int, AlignmentHeads] = {}
        self._chunks: dict[int, list[list[Tensor]]] = {}
        """Queries by row, chunk and layer, [tokens, heads, head_dim]."""

    def begin(self, plan: StepPlan) -> None:
        for row in [*plan.released, *(new.row for new in plan.admitted)]:
            self._requests.pop(row, None)
            self._chunks.pop(row, None)
        for new in plan.admitted:
            if new.params.aligning is not None:
                self._requests[new.row], self._chunks[new.row] = new.params.aligning, []
        for layer in self._heads:
            self.cross_cache.layers[layer].records_queries = bool(self._requests)

    def end(self, plan: StepPlan, output: ForwardResult, sampled: Sampled) -> None:
        if not self._requests:
            return
        starts = np.cumsum(plan.num_tokens) - plan.num_tokens
        for place, row in enumerate(plan.rows.tolist()):
            if (request := self._requests.get(row)) is None:
                continue
            computed, count = int(self.all_rows.num_computed[row]), int(plan.num_tokens[place])
            # The last token may be computed by a CUDA graph, without queries; its timestamp is not needed.
            end = int(self.all_rows.prompt_len[row]) - 1
            low, high = max(computed, request.first), min(computed + count, end)
            if low < high:
                here = slice(int(starts[place]) + low - computed, int(starts[place]) + high - computed)
                self._chunks[row].append(self._queries(here))
            if computed + count > end:
                sampled.aligned[row] = self._align(row, request.num_states, end - request.first)
                del self._requests[row], self._chunks[row]

    def _queries(self, here: slice) -> list[Tensor]:
        by_layer = []
        for layer, heads in self._heads.items():
            queries = self.cross_cache.layers[layer].queries
            assert queries is not None, "a step with a prompt is never captured"
            by_layer.append(queries[here][:, heads])
        return by_layer

    def _align(self, row: int, num_states: int, num_tokens: int) -> list[int]:
        if num_tokens < 1:
            return []
        device, blocks = self.cross_cache.device, self.cross_cache.tables[row]
        total = torch.zeros(num_tokens, num_states, device=device)
        by_layer = zip(*self._chunks[row], strict=True)
        for (layer, heads), parts in zip(self._heads.items(), by_layer, strict=True):
            keys = self.cross_cache.layers[layer].keys_of(blocks, heads)[: self.cross_cache.num_vectors]
            queries = torch.cat(parts).float().transpose(0, 1)  # [heads, tokens, head_dim]
            scores = queries @ keys.float().permute(1, 2, 0) * self.cross_cache.layers[layer].spec.score_scale
            total += smooth_weights(scores.softmax(-1)[..., :num_states]).sum(0)
        total = self.group.all_reduce(total)
        return self._dtw(-(total / self.num_heads).double().cpu().numpy())


def smooth_weights(weights: Tensor) -> Tensor:
    """Return attention weights [heads, tokens, states], normalized over tokens and smoothed over encoder
    states by a median filter."""
    spread, mean = torch.std_mean(weights, dim=-2, keepdim=True, unbiased=False)
    weights = (weights - mean) / spread.clamp_min(torch.finfo(spread.dtype).tiny)
    half = _WIDTH // 2
    if weights.shape[-1] <= half:
        return weights
    padded = F.pad(weights, (half, half), mode="reflect")
    return padded.unfold(-1, _WIDTH, 1).sort(-1).values[..., half]


def dynamic_time_warping(costs: NDArray[np.float64]) -> list[int]:
    """Compute dynamic time warping over [tokens, states]: return the state at which each token begins on the
    cheapest path. A step advances by a token, by a state or by both."""
    num_tokens, num_states = costs.shape
    total = np.full((num_tokens + 1, num_states + 1), np.inf, np.float32)
    total[0, 0] = 0
    moves = np.full(total.shape, 2, np.int8)
    moves[:, 0] = 1
    flat, width = total.reshape(-1), num_states + 1
    for diagonal in range(2, num_tokens + num_states + 1):  # cells depend on the two previous diagonals only
        tokens = np.arange(max(1, diagonal - num_states), min(num_tokens, diagonal - 1) + 1)
        at = tokens * width + diagonal - tokens
        both, token, state = flat[at - width - 1], flat[at - width], flat[at - 1]
        by_both, by_token = (both < token) & (both < state), (token < both) & (token < state)
        least = np.where(by_both, both, np.where(by_token, token, state))
        flat[at] = costs[tokens - 1, diagonal - tokens - 1] + least
        moves.reshape(-1)[at] = np.where(by_both, 0, np.where(by_token, 1, 2))
    begins, token, state = [0] * num_tokens, num_tokens, num_states
    while token > 0:
        begins[token - 1] = max(state - 1, 0)
        step = moves[token, state]
        token, state = token - int(step != 2), state - int(step != 1)
    return begins

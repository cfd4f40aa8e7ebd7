"""Duration of a step: rates fitted to measurements of one GPU, and assumptions about links."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from shapes import MEASURED, PREFILL_LEN, PREFILL_STEP, SHAPES, Measured, ModelShape

from quire.plan.rates import BATCHES, CONTEXT

Floats = NDArray[np.float64]
KV_BYTES_S = 3.94e12
"""Bytes per second at which decode attention reads the KV cache: 92 % of a copy's 4.28 TB/s, measured
separately at 256 sequences."""
ATTENTION_FLOPS = 400e12
"""FLOP/s of attention over prompts of thousands of tokens."""
_WHOLE = 3.0
"""Weight, in the least squares fit, of measurements of models on one GPU (tp 1)."""


@dataclass(frozen=True, slots=True)
class Links:
    """Bandwidths and latencies of the links between GPUs. Assumed, not measured."""

    nvlink_bytes_s: float = 450e9
    nic_bytes_s: float = 50e9
    """Bytes per second between nodes: one 400 Gb/s NIC per GPU."""
    efficiency: float = 0.75
    """Share of the bandwidth of NVLink and NIC that large messages reach."""
    one_shot_s: float = 8e-6
    """Seconds of a small one-shot all-reduce; 4.5 us were measured, for a GPU with itself in a CUDA graph."""
    two_shot_s: float = 13e-6
    ring_s: float = 25e-6
    """Least seconds of a ring all-reduce by NCCL within a node."""
    node_ring_s: float = 60e-6
    """Least seconds of a ring all-reduce over several nodes."""
    send_s: float = 12e-6
    node_send_s: float = 20e-6
    gpus_per_node: int = 8

    def bytes_s(self, num_gpus: int) -> float:
        """Return the bandwidth of a ring of GPUs. Across nodes there are as many rings as a node has NICs."""
        rings = (
            self.nvlink_bytes_s if num_gpus <= self.gpus_per_node else self.gpus_per_node * self.nic_bytes_s
        )
        return self.efficiency * min(rings, self.nvlink_bytes_s)

    def all_reduce_s(self, num_bytes: float, num_gpus: int) -> float:
        """Return the seconds of an all-reduce, by the algorithm of `parallel/symmetric_memory.py`."""
        if num_gpus == 1:
            return 0.0
        rate, part = self.bytes_s(num_gpus), (num_gpus - 1) / num_gpus
        if num_gpus > self.gpus_per_node:
            return self.node_ring_s + 2 * part * num_bytes / rate
        if num_bytes <= 256 << 10:
            return self.one_shot_s + (num_gpus - 1) * num_bytes / rate
        start_s = self.two_shot_s if num_bytes <= 4 << 20 else self.ring_s
        return start_s + 2 * part * num_bytes / rate

    def exchange_s(self, num_bytes: float, num_gpus: int) -> float:
        """Return the seconds for every GPU to receive `num_bytes` from the others: half of an all-reduce."""
        if num_gpus == 1:
            return 0.0
        start_s = self.ring_s if num_gpus <= self.gpus_per_node else self.node_ring_s
        return start_s / 2 + num_bytes / self.bytes_s(num_gpus)

    def scattered_s(self, num_bytes: float, num_gpus: int) -> float:
        """Return the seconds of an all-to-all in which every GPU sends `num_bytes`."""
        away = max(1 - self.gpus_per_node / num_gpus, 0.0)
        near_s = num_bytes * (1 - away) / (self.efficiency * self.nvlink_bytes_s)
        far_s = num_bytes * away / (self.efficiency * self.nic_bytes_s)
        return (self.node_send_s if away else self.send_s) + max(near_s, far_s)

    def sent_s(self, num_bytes: float, *, other_node: bool) -> float:
        start_s, rate = (
            (self.node_send_s, self.nic_bytes_s) if other_node else (self.send_s, self.nvlink_bytes_s)
        )
        return start_s + num_bytes / (self.efficiency * rate)


class StepShape(NamedTuple):
    """Numbers of tokens in a step plan that determine its duration."""

    num_tokens: int
    num_sampled: int
    kv_tokens: float
    """Tokens in the KV cache of rows that decode."""
    prompt_pairs: float = 0.0
    """Pairs of a prompt token and a token before it."""


@dataclass(frozen=True, slots=True)
class GpuRates:
    """Rates of a GPU by the number of rows, at `BATCHES`."""

    weight_bytes_s: Floats
    layer_s: Floats
    """Seconds of a layer besides reading its weights and its KV cache, at each row count of `BATCHES`."""
    expert_bytes_s: float
    mixture_s: float
    """Seconds that routing adds to a layer."""
    flops: float
    element_s: float
    """Seconds per hidden element and layer, in steps of many tokens."""

    def read_s(self, num_bytes: float, rows: float) -> float:
        return num_bytes * _interpolate(rows, BATCHES, 1 / self.weight_bytes_s)

    def fixed_s(self, rows: float) -> float:
        return _interpolate(rows, BATCHES, self.layer_s)


def _interpolate(rows: float, at: Sequence[int], values: Floats) -> float:
    return float(np.interp(math.log(max(rows, 1)), np.log(at), values))


class LayerCost:
    """Seconds of one layer, or of the head, on one of `tp` devices that share it, without communication.

    With `ep` above 1 each device has some whole experts; otherwise all have a shard of each."""

    def __init__(self, shape: ModelShape, tp: int, rates: GpuRates, ep: int = 1) -> None:
        self.shape, self.tp, self.rates, self.ep = shape, tp, rates, ep

    def products_s(self, layer: int, step: StepShape) -> float:
        """Return the seconds of a layer without attention over the KV cache and without routed experts."""
        shape, rows, rates = self.shape, step.num_tokens, self.rates
        weights = (shape.attention_weights + shape.mlp_weights(layer)) / self.tp
        read_s = rates.read_s(weights * shape.weight_bytes, rows)
        elements_s = rows * shape.hidden * rates.element_s
        return max(read_s, 2 * rows * weights / rates.flops) + rates.fixed_s(rows) + elements_s

    def experts_s(self, layer: int, num_tokens: float) -> float:
        """Return the seconds of a layer's routed experts for `num_tokens`, the tokens of all cores that
        share them."""
        shape, rates = self.shape, self.rates
        if not shape.is_mixture(layer):
            return 0.0
        parts = self.ep if self.ep > 1 else self.tp
        met = shape.experts_met(num_tokens) * shape.expert_weights / parts
        flops = 2 * num_tokens * shape.experts_per_token * shape.expert_weights / parts
        return max(met * shape.weight_bytes / rates.expert_bytes_s, flops / rates.flops) + rates.mixture_s

    def attention_s(self, step: StepShape) -> float:
        """Return the seconds of attention. Decodes read the cache, or multiply with latents; prompts
        multiply."""
        shape, heads = self.shape, self.shape.heads / self.tp
        latent_s = 4 * heads * shape.latent / ATTENTION_FLOPS
        decodes_s = step.kv_tokens * max(shape.kv_bytes(self.tp) / KV_BYTES_S, latent_s)
        return decodes_s + step.prompt_pairs * 4 * heads * shape.head_dim / ATTENTION_FLOPS

    def head_s(self, step: StepShape) -> float:
        weights, rows = self.shape.head_weights / self.tp, max(step.num_sampled, 1)
        return max(self.rates.read_s(2 * weights, rows), 2 * rows * weights / self.rates.flops)


# ---- fitting


def decode_of(batch: int) -> StepShape:
    """Return a decode step of `quire.bench.gpu`."""
    return StepShape(batch, batch, batch * CONTEXT)


PREFILL = StepShape(PREFILL_STEP, PREFILL_STEP // PREFILL_LEN, 0.0, PREFILL_STEP * PREFILL_LEN / 2)


@functools.cache
def fitted() -> GpuRates:
    """Fit the rates by least squares of relative errors, over all measurements."""
    flops, element_s = _fit_prefill()
    columns, targets = [], []
    for row in MEASURED:
        shape, rates = SHAPES[row.model], GpuRates(np.ones(5), np.ones(5), 1, 1, flops, element_s)
        cost = LayerCost(shape, row.tp, rates)
        for number, (batch, ms) in enumerate(zip(BATCHES, row.decode_ms, strict=False)):
            step, column = decode_of(batch), np.zeros(12)
            known_s = shape.layers * (cost.attention_s(step) + batch * shape.hidden * element_s)
            column[number] = _bytes_of(shape) / row.tp
            column[5 + number] = shape.layers
            if shape.experts:
                met = shape.experts_met(batch) * shape.expert_weights * shape.weight_bytes / row.tp
                column[10:] = shape.layers * met, shape.layers
            weight = (_WHOLE if row.tp == 1 else 1.0) / (ms / 1e3)
            columns.append(weight * column)
            targets.append(weight * (ms / 1e3 - known_s))
    solution = np.linalg.lstsq(np.array(columns), np.array(targets), rcond=None)[0]
    return GpuRates(
        1 / solution[:5], solution[5:10], float(1 / solution[10]), float(solution[11]), flops, element_s
    )


def _fit_prefill() -> tuple[float, float]:
    """Fit prefill rates from the shards of one model: FLOPs are divided by tp, elementwise work is not."""
    rows = [row for row in MEASURED if row.model == "llama-3.1-8b"]
    shape = SHAPES["llama-3.1-8b"]
    matmul_flops = 2 * shape.layers * (shape.attention_weights + shape.mlp_weights(0))
    pairs_s = shape.layers * 4 * shape.heads * shape.head_dim * PREFILL_LEN / 2 / ATTENTION_FLOPS
    columns = np.array([[matmul_flops / row.tp, shape.layers * shape.hidden] for row in rows])
    token_s = np.array([1 / row.prefill_tok_s - pairs_s / row.tp for row in rows])
    solution = np.linalg.lstsq(columns / token_s[:, None], np.ones(len(rows)), rcond=None)[0]
    return float(1 / solution[0]), float(solution[1])


def _bytes_of(shape: ModelShape) -> float:
    """Return the bytes of all weights that each step reads, with the head in 16 bits."""
    layers = sum(shape.attention_weights + shape.mlp_weights(layer) for layer in range(shape.layers))
    return layers * shape.weight_bytes + 2 * shape.head_weights


class Correction(NamedTuple):
    """Ratio of the measured to the computed time of a step, without attention, by number of rows."""

    rows: tuple[int, ...] = (1,)
    ratios: tuple[float, ...] = (1.0,)

    def at(self, rows: float) -> float:
        return _interpolate(rows, self.rows, np.array(self.ratios))


@functools.cache
def correction(model: str, tp: int) -> Correction:
    """Return the correction of the nearest measured shard of this model; 1 if there is none."""
    measured = [row for row in MEASURED if row.model == model]
    if not measured:
        return Correction()
    row = min(measured, key=lambda row: abs(math.log(row.tp / tp)))
    steps = [decode_of(batch) for batch in BATCHES[: len(row.decode_ms)]] + [PREFILL]
    took_s = [ms / 1e3 for ms in row.decode_ms] + [PREFILL_STEP / row.prefill_tok_s]
    ratios = [_ratio(row, step, at_s) for step, at_s in zip(steps, took_s, strict=True)]
    return Correction(tuple(step.num_tokens for step in steps), tuple(ratios))


def _ratio(row: Measured, step: StepShape, measured_s: float) -> float:
    shape = SHAPES[row.model]
    cost = LayerCost(shape, row.tp, fitted())
    attention_s = shape.layers * cost.attention_s(step)
    products_s = sum(
        cost.products_s(layer, step) + cost.experts_s(layer, step.num_tokens) for layer in range(shape.layers)
    )
    return (measured_s - attention_s) / (products_s + cost.head_s(step))

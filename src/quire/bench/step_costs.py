"""How long a step takes: rates fitted to what one GPU was measured at, and what is assumed of links."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.bench.shapes import (
    BATCHES,
    CONTEXT,
    MEASURED,
    PREFILL_LEN,
    PREFILL_STEP,
    SHAPES,
    Measured,
    ModelShape,
)

Floats = NDArray[np.float64]
KV_BYTES_S = 3.94e12
"""What decode attention reads: 92 per cent of a copy's 4.28 TB/s, measured by itself at 256 sequences."""
ATTENTION_FLOPS = 400e12
"""Of prompts of thousands of tokens."""
_WHOLE = 3.0
"""How much rows of whole models weigh in the fit."""


@dataclass(frozen=True, slots=True)
class Links:
    """What lies between GPUs. Assumed, not measured."""

    nvlink_bytes_s: float = 450e9
    nic_bytes_s: float = 50e9
    """One 400 Gb/s card for each GPU."""
    efficiency: float = 0.75
    """Of either, for large messages."""
    one_shot_s: float = 8e-6
    """A small sum: 4.5 us of it were measured, of a GPU with itself in a graph."""
    two_shot_s: float = 13e-6
    ring_s: float = 25e-6
    """A sum by NCCL within a node."""
    node_ring_s: float = 60e-6
    """One over several nodes."""
    send_s: float = 12e-6
    node_send_s: float = 20e-6
    gpus_per_node: int = 8

    def bytes_s(self, num_gpus: int) -> float:
        """Around a ring of this many GPUs. Over nodes there are as many rings as a node has NICs."""
        rings = (
            self.nvlink_bytes_s if num_gpus <= self.gpus_per_node else self.gpus_per_node * self.nic_bytes_s
        )
        return self.efficiency * min(rings, self.nvlink_bytes_s)

    def all_reduce_s(self, num_bytes: float, num_gpus: int) -> float:
        """As `parallel/symmetric.py` chooses."""
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
        """Everybody gets so many bytes from the others: half of a ring."""
        if num_gpus == 1:
            return 0.0
        start_s = self.ring_s if num_gpus <= self.gpus_per_node else self.node_ring_s
        return start_s / 2 + num_bytes / self.bytes_s(num_gpus)

    def scattered_s(self, num_bytes: float, num_gpus: int) -> float:
        """Everybody sends so many bytes, another part of them to each."""
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
    """What of a plan decides how long it takes."""

    num_tokens: int
    num_sampled: int
    kv_tokens: float
    """In the caches of rows that decode."""
    prompt_pairs: float = 0.0
    """Of a prompt's token and one before it."""


@dataclass(frozen=True, slots=True)
class GpuRates:
    """What a GPU does in a second, by the number of rows: `BATCHES`."""

    weight_bytes_s: Floats
    layer_s: Floats
    """What a layer takes beside its weights and its cache."""
    expert_bytes_s: float
    mixture_s: float
    """What routing adds to a layer."""
    flops: float
    element_s: float
    """Of a hidden number in a layer, in steps of many tokens."""

    def read_s(self, num_bytes: float, rows: float) -> float:
        return num_bytes * _between(rows, BATCHES, 1 / self.weight_bytes_s)

    def fixed_s(self, rows: float) -> float:
        return _between(rows, BATCHES, self.layer_s)


def _between(rows: float, at: Sequence[int], values: Floats) -> float:
    return float(np.interp(math.log(max(rows, 1)), np.log(at), values))


class LayerCost:
    """Seconds of one layer, or of the head, on one of `tp` devices that share it; nothing said to others.

    Of a mixture's experts, each of `ep` devices has some whole ones; with 1 all have a part of each.
    """

    def __init__(self, shape: ModelShape, tp: int, rates: GpuRates, ep: int = 1) -> None:
        self.shape, self.tp, self.rates, self.ep = shape, tp, rates, ep

    def products_s(self, layer: int, step: StepShape) -> float:
        """All but attention over the cache, and experts."""
        shape, rows, rates = self.shape, step.num_tokens, self.rates
        weights = (shape.attention_weights + shape.mlp_weights(layer)) / self.tp
        read_s = rates.read_s(weights * shape.weight_bytes, rows)
        elements_s = rows * shape.hidden * rates.element_s
        return max(read_s, 2 * rows * weights / rates.flops) + rates.fixed_s(rows) + elements_s

    def experts_s(self, layer: int, num_tokens: float) -> float:
        """`num_tokens` of all cores whose tokens meet in these experts."""
        shape, rates = self.shape, self.rates
        if not shape.is_mixture(layer):
            return 0.0
        parts = self.ep if self.ep > 1 else self.tp
        met = shape.experts_met(num_tokens) * shape.expert_weights / parts
        flops = 2 * num_tokens * shape.experts_per_token * shape.expert_weights / parts
        return max(met * shape.weight_bytes / rates.expert_bytes_s, flops / rates.flops) + rates.mixture_s

    def attention_s(self, step: StepShape) -> float:
        """Decodes read the cache, or multiply with latents; prompts multiply."""
        shape, heads = self.shape, self.shape.heads / self.tp
        latent_s = 4 * heads * shape.latent / ATTENTION_FLOPS
        decodes_s = step.kv_tokens * max(shape.kv_bytes(self.tp) / KV_BYTES_S, latent_s)
        return decodes_s + step.prompt_pairs * 4 * heads * shape.head_dim / ATTENTION_FLOPS

    def head_s(self, step: StepShape) -> float:
        weights, rows = self.shape.head_weights / self.tp, max(step.num_sampled, 1)
        return max(self.rates.read_s(2 * weights, rows), 2 * rows * weights / self.rates.flops)


# ---- fitting


def decode_of(batch: int) -> StepShape:
    """A step of `quire.bench.gpu`'s decodes."""
    return StepShape(batch, batch, batch * CONTEXT)


PREFILL = StepShape(PREFILL_STEP, PREFILL_STEP // PREFILL_LEN, 0.0, PREFILL_STEP * PREFILL_LEN / 2)


@functools.cache
def fitted() -> GpuRates:
    """Least squares of relative errors, over all that was measured."""
    flops, element_s = _fit_prefill()
    columns, wanted = [], []
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
            wanted.append(weight * (ms / 1e3 - known_s))
    found = np.linalg.lstsq(np.array(columns), np.array(wanted), rcond=None)[0]
    return GpuRates(1 / found[:5], found[5:10], float(1 / found[10]), float(found[11]), flops, element_s)


def _fit_prefill() -> tuple[float, float]:
    """Out of the shares of one model: flops divide by tp, what is done for each hidden number does not."""
    rows = [row for row in MEASURED if row.model == "llama-3.1-8b"]
    shape = SHAPES["llama-3.1-8b"]
    products = 2 * shape.layers * (shape.attention_weights + shape.mlp_weights(0))
    pairs_s = shape.layers * 4 * shape.heads * shape.head_dim * PREFILL_LEN / 2 / ATTENTION_FLOPS
    columns = np.array([[products / row.tp, shape.layers * shape.hidden] for row in rows])
    token_s = np.array([1 / row.prefill_tok_s - pairs_s / row.tp for row in rows])
    found = np.linalg.lstsq(columns / token_s[:, None], np.ones(len(rows)), rcond=None)[0]
    return float(1 / found[0]), float(found[1])


def _bytes_of(shape: ModelShape) -> float:
    """All weights that each step reads, the head in 16 bits."""
    layers = sum(shape.attention_weights + shape.mlp_weights(layer) for layer in range(shape.layers))
    return layers * shape.weight_bytes + 2 * shape.head_weights


class Correction(NamedTuple):
    """What was measured over what the rates say, attention apart, by rows of a step."""

    rows: tuple[int, ...] = (1,)
    ratios: tuple[float, ...] = (1.0,)

    def at(self, rows: float) -> float:
        return _between(rows, self.rows, np.array(self.ratios))


@functools.cache
def correction(model: str, tp: int) -> Correction:
    """Of the nearest share of this model that was measured; 1 if none was."""
    measured = [row for row in MEASURED if row.model == model]
    if not measured:
        return Correction()
    row = min(measured, key=lambda each: abs(math.log(each.tp / tp)))
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

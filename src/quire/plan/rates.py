"""Expected speed of a model on some devices, from their peak rates and measurements of two models."""

import math
from functools import cache
from typing import NamedTuple

import numpy as np

from quire.checkpoint.layout import DTYPE_BYTES, cache_specs
from quire.checkpoint.weights import LayerWeights, count_parameters
from quire.plan.devices import DEVICES, Accelerator
from quire.plan.estimate import MemoryFit, computes_in_8_bits, kv_dtype, weight_bytes

_SUM_S = 10e-6
"""Assumed seconds of a small all-reduce within a machine; there are two per layer."""
BATCHES, CONTEXT = (1, 8, 32, 128, 256), 576
_KV_BYTES = 2 * 2 * 8 * 128
"""KV cache bytes of a token in a layer of both measured models."""
_ATTENTION = 0.96 * 4.28 / 4.8
"""Share of the bandwidth that decode attention reached on an H200 (docs/evidence/kernels.md: lengths of 300
to 1,700 at batch 256). At small batches, attention is part of the measured seconds per layer."""


class MeasuredModel(NamedTuple):
    """Rates of a dense model in bf16 by `quire.bench.gpu` on an H200, from the first table of
    docs/performance.md."""

    layers: int
    weights: int
    """Number of weights that a step reads, so without the embedding."""
    decode_ms: tuple[float, ...]
    """Milliseconds of a decode step for each of `BATCHES`, with sequences of `CONTEXT` tokens."""
    prefill_tok_s: float


LLAMA_8B = MeasuredModel(
    layers=32,
    weights=32 * (2 * 4096 * 128 * (32 + 8) + 3 * 4096 * 14336) + 128256 * 4096,
    decode_ms=(3.91, 4.49, 5.09, 7.71, 12.52),
    prefill_tok_s=43_690,
)
"""Llama 3.1 8B, which is limited by memory and compute."""
QWEN_0_6B = MeasuredModel(
    layers=28,
    weights=28 * (2 * 1024 * 128 * (16 + 8) + 3 * 1024 * 3072) + 151936 * 1024,
    decode_ms=(0.69, 1.09, 1.56, 3.17, 5.55),
    prefill_tok_s=391_500,
)
"""Qwen3-0.6B: much of its time is spent between the kernels of each layer."""


class TokenRates(NamedTuple):
    """Expected speed for a batch of sequences; the rates are in tokens per second."""

    batch: int
    decode_ms: float
    """Milliseconds of a decode step, which generates one token for each sequence."""
    decode_tok_s: float
    prefill_tok_s: float


class Cost(NamedTuple):
    """A cost model of a computation: (seconds at peak rates) / efficiency + number of layers x seconds per
    layer."""

    efficiency: float
    """Share of the peak bandwidth or compute that the matrix products reach."""
    layer_s: float
    """Seconds of a layer besides its matrix products: latencies, and operations on activations."""


def _solve(large_s: float, large_floor_s: float, small_s: float, small_floor_s: float) -> Cost:
    """Return the cost model that gives the measured seconds of a large and a small model. Their floors are
    the seconds of the matrix products at peak rates."""
    inverse = (LLAMA_8B.layers * small_s - QWEN_0_6B.layers * large_s) / (
        LLAMA_8B.layers * small_floor_s - QWEN_0_6B.layers * large_floor_s
    )
    return Cost(1 / inverse, (large_s - inverse * large_floor_s) / LLAMA_8B.layers)


def _products_floor(device: Accelerator, num_bytes: float, flops_s: float) -> float:
    """Return the seconds of the matrix products of a decode step at peak rates: the larger of the times for
    reading and for computing, and more if both times are similar."""
    return math.hypot(num_bytes / device.bytes_s, flops_s)


def _attention_seconds(device: Accelerator, cache_bytes: float) -> float:
    return cache_bytes / (_ATTENTION * device.bytes_s)


@cache
def decode_costs() -> tuple[Cost, ...]:
    """Return the cost model of a decode step on an H200, for each batch size of `BATCHES`."""
    device, costs = DEVICES["h200"], []
    for number, batch in enumerate(BATCHES):
        times: list[float] = []
        for model in (LLAMA_8B, QWEN_0_6B):
            attention_s = _attention_seconds(device, batch * CONTEXT * model.layers * _KV_BYTES)
            floor_s = _products_floor(device, 2 * model.weights, 2 * batch * model.weights / device.flops)
            times += [model.decode_ms[number] / 1e3 - attention_s, floor_s]
        costs.append(_solve(*times))
    return tuple(costs)


@cache
def prefill_cost() -> Cost:
    """Return the cost model of a prompt token on an H200."""
    flops = DEVICES["h200"].flops
    large, small = ((1 / model.prefill_tok_s, 2 * model.weights / flops) for model in (LLAMA_8B, QWEN_0_6B))
    return _solve(*large, *small)


def rates(fit: MemoryFit, device: Accelerator, *, batch: int, context: int) -> TokenRates:
    """Return the expected speed on `device` for `batch` sequences of `context` tokens each, divided evenly
    among pipeline stages."""
    assert fit.config is not None, "a layout that does not fit has no rates"
    checkpoint, stage_batch = fit.config.checkpoint, -(-batch // fit.pp)
    weights = count_parameters(checkpoint.facts)
    unused = sum(_unused_weights(layer, stage_batch) for layer in weights.layers) + (
        weights.embedding if weights.head else 0
    )
    unused += weights.tower
    read = weight_bytes(checkpoint, fit.precision) * (1 - unused / weights.total)
    flops = device.narrow_flops if computes_in_8_bits(checkpoint, fit.precision) else device.flops
    efficiency, layer_s = (
        float(np.interp(np.log(stage_batch), np.log(BATCHES), values))
        for values in zip(*decode_costs(), strict=True)
    )
    products_s = _products_floor(device, read, 2 * stage_batch * weights.active / flops) / efficiency
    attention_s = _attention_seconds(device, stage_batch * _cache_bytes(fit, context))
    sums_s = 0.0 if fit.tp == 1 else 2 * _SUM_S
    step_s = (products_s + attention_s) / fit.tp + (layer_s + sums_s) * len(weights.layers)
    prompt = prefill_cost()
    # Operations on activations take longer where memory is slower.
    prompt_layer_s = prompt.layer_s * DEVICES["h200"].bytes_s / device.bytes_s
    token_s = 2 * weights.active / flops / prompt.efficiency + prompt_layer_s * len(weights.layers)
    prefill = fit.num_devices / token_s
    copy_s = copy_seconds(fit, device)
    if copy_s:
        step_s = max(step_s, copy_s)
        prefill = min(prefill, fit.config.scheduler.max_num_batched_tokens / copy_s)
    return TokenRates(batch, 1e3 * step_s, batch / step_s, prefill)


def copy_seconds(fit: MemoryFit, device: Accelerator) -> float:
    """Return the seconds in which a device's offloaded weights are copied, the least time of a step; 0 for
    none."""
    return 0.0 if fit.memory is None else fit.memory.offloaded.host_bytes / device.pcie_bytes_s


def _cache_bytes(fit: MemoryFit, context: int) -> int:
    """Return the KV cache bytes, over all layers, that decoding one token of a sequence of `context`
    tokens reads."""
    assert fit.config is not None
    dtype_bytes = DTYPE_BYTES[kv_dtype(fit.config)]
    requested, layers = fit.config.cache.kv_cache_dtype, cache_specs(fit.config.checkpoint.facts)
    specs = [spec.stored_as(requested) for spec in layers if spec is not None]
    paged = [spec for spec in specs if spec.is_paged]
    num_values = (min(context, spec.window or context) * spec.planes * spec.elements for spec in paged)
    return dtype_bytes * sum(num_values) + sum(spec.row_bytes(dtype_bytes) for spec in specs)


def _unused_weights(layer: LayerWeights, batch: int) -> float:
    """Return the expected number of expert weights that no token of a batch is routed to, for uniform
    routing."""
    if not layer.experts:
        return 0.0
    missed: float = (1 - layer.active_experts / layer.experts) ** batch
    return layer.experts * missed

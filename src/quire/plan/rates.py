"""Expected speed of a layout, from the bandwidth and compute of its devices and measured efficiencies."""

from typing import NamedTuple

import numpy as np

from quire.checkpoint.layout import cache_specs
from quire.checkpoint.weights import LayerWeights, count_parameters
from quire.plan.devices import DEVICES, Accelerator
from quire.plan.estimate import MemoryFit, bytes_of_cache, computes_in_8_bits, weight_bytes

_SUM_S = 10e-6
"""Assumed seconds of a small all-reduce within a machine; there are two per layer."""
BATCHES, CONTEXT = (1, 8, 32, 128, 256), 576
DECODE_MS, PREFILL_TOK_S = (3.868, 4.486, 5.041, 7.523, 12.016), 44_106
"""Results of `quire.bench.gpu` on one H200 with Llama 3.1 8B in bf16: decodes of `BATCHES` sequences of
`CONTEXT` tokens, and prompts. The model is dense, and large enough to be memory-bound."""
_LAYERS, _KV_BYTES = 32, 2 * 2 * 8 * 128
"""Layers of that model, and KV cache bytes of a token in one of them."""
_WEIGHTS = _LAYERS * (2 * 4096 * 128 * (32 + 8) + 3 * 4096 * 14336) + 128256 * 4096
"""Weights of that model, without the embedding."""


class TokenRates(NamedTuple):
    """Tokens per second of a batch."""

    batch: int
    decode_ms: float
    """Milliseconds for one token of each sequence."""
    decode_tok_s: float
    prefill_tok_s: float


def _efficiencies() -> tuple[list[float], float]:
    """Return the efficiencies that an H200 reached: decodes by batch size, and prompts."""
    device = DEVICES["h200"]
    efficiencies = []
    for batch, took_ms in zip(BATCHES, DECODE_MS, strict=True):
        read = 2 * _WEIGHTS + batch * CONTEXT * _LAYERS * _KV_BYTES
        floor_s = max(read / device.bytes_s, 2 * batch * _WEIGHTS / device.flops)
        efficiencies.append(floor_s / (took_ms / 1e3))
    return efficiencies, PREFILL_TOK_S * 2 * _WEIGHTS / device.flops


def rates(fit: MemoryFit, device: Accelerator, *, batch: int, context: int) -> TokenRates:
    """Return the rates for `batch` sequences of `context` tokens. Each pipeline stage has a part of the
    batch."""
    assert fit.config is not None, "a layout that does not fit has no rates"
    decodes, prompts = _efficiencies()
    checkpoint, stage_batch = fit.config.checkpoint, -(-batch // fit.pp)
    weights = count_parameters(checkpoint.facts)
    unused = sum(_unused_weights(layer, stage_batch) for layer in weights.layers) + (
        weights.embedding if weights.head else 0
    )
    unused += weights.tower
    read = weight_bytes(checkpoint, fit.precision) * (1 - unused / weights.total)
    read += stage_batch * _cache_bytes(fit, context)
    flops = device.narrow_flops if computes_in_8_bits(checkpoint, fit.precision) else device.flops
    floor_s = max(read / device.bytes_s, 2 * stage_batch * weights.active / flops) / fit.tp
    sums_s = 0.0 if fit.tp == 1 else 2 * len(weights.layers) * _SUM_S
    step_s = floor_s / float(np.interp(np.log(stage_batch), np.log(BATCHES), decodes)) + sums_s
    prefill = prompts * flops * fit.num_devices / (2 * weights.active)
    copy_s = copy_seconds(fit, device)
    if copy_s:
        step_s = max(step_s, copy_s)
        prefill = min(prefill, fit.config.scheduler.max_num_batched_tokens / copy_s)
    return TokenRates(batch, 1e3 * step_s, batch / step_s, prefill)


def copy_seconds(fit: MemoryFit, device: Accelerator) -> float:
    """Return the seconds in which a device receives its offloaded weights, the least time of any step."""
    return 0.0 if fit.memory is None else fit.memory.offloaded.host_bytes / device.pcie_bytes_s


def _cache_bytes(fit: MemoryFit, context: int) -> int:
    """Return the cache bytes that one token of a sequence reads."""
    assert fit.config is not None
    dtype_bytes = bytes_of_cache(fit.config)
    kv_dtype = fit.config.cache.kv_cache_dtype
    specs = [
        spec.stored_as(kv_dtype) for spec in cache_specs(fit.config.checkpoint.facts) if spec is not None
    ]
    paged = [spec for spec in specs if spec.is_paged]
    num_values = (min(context, spec.window or context) * spec.planes * spec.numbers for spec in paged)
    return dtype_bytes * sum(num_values) + sum(spec.row_bytes(dtype_bytes) for spec in specs)


def _unused_weights(layer: LayerWeights, batch: int) -> float:
    """Return the expected number of expert weights that no token of a batch is routed to, for uniform
    routing."""
    if not layer.experts:
        return 0.0
    missed: float = (1 - layer.met / layer.experts) ** batch
    return layer.experts * missed

"""Rates: how fast a layout can be, from what its devices move and compute, and what was measured of that."""

from typing import NamedTuple

import numpy as np

from quire.bench.shapes import BATCHES, CONTEXT, MEASURED, SHAPES
from quire.checkpoint.layout import cache_specs
from quire.checkpoint.weights import LayerWeights, count
from quire.plan.devices import DEVICES, Accelerator
from quire.plan.estimate import MemoryFit, bytes_of_cache, weight_bytes

_SUM_S = 10e-6
"""Of a small sum between the devices of a machine; two come in each layer. Assumed."""
_MODEL = "llama-3.1-8b"
"""By whose measured rows efficiencies are taken: dense, and large enough for memory to be what counts."""


class TokenRates(NamedTuple):
    """Tokens a second."""

    batch: int
    decode_ms: float
    """Of one token of each sequence."""
    decode_tok_s: float
    prefill_tok_s: float


def _efficiencies() -> tuple[list[float], float]:
    """Shares of the floor that an H200 reached: decodes by batch, and prompts."""
    shape, device = SHAPES[_MODEL], DEVICES["h200"]
    row = next(each for each in MEASURED if each.model == _MODEL and each.tp == 1)
    weights = shape.layers * (shape.attention_weights + shape.mlp_weights(0)) + shape.head_weights
    shares = []
    for batch, took_ms in zip(BATCHES, row.decode_ms, strict=True):
        read = 2 * weights + batch * CONTEXT * shape.layers * shape.kv_bytes(1)
        shares.append(max(read / device.bytes_s, 2 * batch * weights / device.flops) / (took_ms / 1e3))
    return shares, row.prefill_tok_s * 2 * weights / device.flops


def rates(fit: MemoryFit, device: Accelerator, *, batch: int, context: int) -> TokenRates:
    """With so many sequences of so many tokens each. Stages of a pipeline have a part of the batch each."""
    assert fit.config is not None, "a layout that cannot be had has no rates"
    decodes, prompts = _efficiencies()
    checkpoint, own = fit.config.checkpoint, -(-batch // fit.pp)
    weights = count(checkpoint.facts)
    unmet = sum(_unmet(layer, own) for layer in weights.layers) + (weights.embedding if weights.head else 0)
    unmet += weights.tower
    read = weight_bytes(checkpoint, fit.precision) * (1 - unmet / weights.total)
    read += own * _cache_bytes(fit, context)
    flops = device.narrow_flops if fit.precision in ("fp8", "int8") else device.flops
    floor_s = max(read / device.bytes_s, 2 * own * weights.active / flops) / fit.tp
    sums_s = 0.0 if fit.tp == 1 else 2 * len(weights.layers) * _SUM_S
    step_s = floor_s / float(np.interp(np.log(own), np.log(BATCHES), decodes)) + sums_s
    prefill = prompts * flops * fit.num_devices / (2 * weights.active)
    return TokenRates(batch, 1e3 * step_s, batch / step_s, prefill)


def _cache_bytes(fit: MemoryFit, context: int) -> int:
    """What one token of a sequence looks at."""
    assert fit.config is not None
    kept = bytes_of_cache(fit.config)
    specs = [spec for spec in cache_specs(fit.config.checkpoint.facts) if spec is not None]
    paged = [spec for spec in specs if spec.is_paged]
    seen = (min(context, spec.window or context) * spec.planes * spec.numbers for spec in paged)
    return kept * sum(seen) + sum(spec.row_bytes(kept) for spec in specs)


def _unmet(layer: LayerWeights, batch: int) -> float:
    """Numbers of experts that nobody in a batch is given to, of uniform routing."""
    if not layer.experts:
        return 0.0
    missed: float = (1 - layer.met / layer.experts) ** batch
    return layer.experts * missed

"""Rates: how fast a layout can be, from what its devices move and compute, and what was measured of that."""

from typing import NamedTuple

import numpy as np

from quire.bench.shapes import BATCHES, CONTEXT, MEASURED, SHAPES
from quire.config.layout import cache_specs
from quire.config.weights import LayerWeights, count
from quire.plan.devices import DEVICES, Device
from quire.plan.reckon import Fit, kv_bytes_per_token, weight_bytes

_SUM_S = 10e-6
"""Of a small sum between the devices of a machine; two come in each layer. Assumed."""
_MODEL = "llama-3.1-8b"
"""By whose measured rows efficiencies are taken: dense, and large enough for memory to be what counts."""


class Rates(NamedTuple):
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


def rates(fit: Fit, device: Device, *, batch: int, context: int) -> Rates:
    """With so many sequences of so many tokens each."""
    assert fit.config is not None, "a layout that cannot be had has no rates"
    decodes, prompts = _efficiencies()
    share = float(np.interp(np.log(batch), np.log(BATCHES), decodes))
    facts, num = fit.config.checkpoint.facts, fit.num_devices
    weights = count(facts)
    whole = weight_bytes(fit.config.checkpoint, fit.precision) * num / num
    unmet = sum(_unmet(layer, facts.moe.experts if facts.moe else 0, batch) for layer in weights.layers)
    read = whole * (1 - unmet / weights.total) - (0 if not weights.head else weights.embedding * 2)
    kept = kv_bytes_per_token(fit.config.checkpoint, _kv_dtype(fit))
    windows = [spec.window for spec in cache_specs(facts) if spec is not None and spec.kind == "window"]
    seen = min(context, max((each for each in windows if each), default=context))
    cache = sum(
        num_layers * each * (1 if kind == "state" else seen if " of " in kind else context)
        for kind, (num_layers, each) in kept.items()
    )
    flops = device.narrow_flops if fit.precision in ("fp8", "int8") else device.flops
    floor_s = max((read + batch * cache) / device.bytes_s, 2 * batch * weights.active / flops) / fit.tp
    sums_s = 0.0 if fit.tp == 1 else 2 * len(weights.layers) * _SUM_S
    step_s = floor_s / share + sums_s
    prefill = prompts * flops * num / (2 * weights.active)
    return Rates(batch, 1e3 * step_s, batch / step_s * max(1, min(fit.pp, batch)) / fit.pp, prefill)


def _unmet(layer: LayerWeights, experts: int, batch: int) -> float:
    """Numbers of experts that nobody in a batch is given to, of uniform routing."""
    if not layer.experts:
        return 0.0
    missed: float = (1 - layer.met / layer.experts) ** batch
    return layer.experts * missed if experts else 0.0


def _kv_dtype(fit: Fit) -> str:
    assert fit.config is not None
    kept = fit.config.cache.kv_cache_dtype
    return kept if kept.startswith("fp8_") else fit.config.model.dtype

"""A plan in words: the formula term by term, what fits and what does not, the line to type."""

import shlex
from typing import Any

from quire.checkpoint.layout import OF_ROWS
from quire.checkpoint.model import Checkpoint
from quire.checkpoint.weights import count
from quire.memory import human
from quire.plan.devices import Accelerator
from quire.plan.estimate import PRECISIONS, MemoryFit, Wanted, kv_bytes_per_token, kv_dtype, weight_bytes
from quire.plan.rates import TokenRates, rates

_BATCHES = (1, 32, 256)


def best(found: list[MemoryFit], preferred: str) -> MemoryFit | None:
    """What is recommended: the preferred precision if it fits at all, else the first that does."""
    working = [fit for fit in found if not fit.why_not]
    return next((fit for fit in working if fit.precision == preferred), working[0] if working else None)


def facts_of(checkpoint: Checkpoint, precisions: tuple[str, ...], dtype: str) -> dict[str, Any]:
    """What the model is, whatever it runs on."""
    weights = count(checkpoint.facts)
    kept = kv_bytes_per_token(checkpoint, dtype)
    return {
        "architecture": checkpoint.facts.architecture,
        "parameters": weights.total,
        "active_parameters": weights.active,
        "weight_bytes": {name: weight_bytes(checkpoint, name) for name in precisions},
        "kv_bytes": {
            kind: {"layers": layers, "per_row" if kind in OF_ROWS else "per_token": each}
            for kind, (layers, each) in kept.items()
        },
        "kv_bytes_per_token": sum(
            layers * each for kind, (layers, each) in kept.items() if kind not in OF_ROWS
        ),
    }


def described(fit: MemoryFit, device: Accelerator, wanted: Wanted) -> dict[str, Any]:
    """One precision and layout as plain values."""
    found: dict[str, Any] = {
        "precision": fit.precision,
        "tensor_parallel_size": fit.tp,
        "pipeline_parallel_size": fit.pp,
        "fits": not fit.why_not,
        "why_not": fit.why_not,
    }
    if fit.memory is not None and fit.cache is not None:
        found["bytes_per_device"] = {**fit.memory.terms(), "KV cache": fit.cache.num_bytes}
        found["cache_tokens"] = fit.cache.num_tokens
        found["concurrency"] = round(fit.cache.num_tokens / wanted.context, 2)
    if not fit.why_not:
        found["rates"] = [rate._asdict() for rate in _rates(fit, device, wanted)]
    return found


def _rates(fit: MemoryFit, device: Accelerator, wanted: Wanted) -> list[TokenRates]:
    batches = sorted({*_BATCHES, wanted.concurrency})
    assert fit.cache is not None
    held = [batch for batch in batches if batch * wanted.context <= fit.cache.num_tokens]
    return [rates(fit, device, batch=batch, context=wanted.context) for batch in held]


def command(model: str, fit: MemoryFit, wanted: Wanted) -> str:
    """What to type."""
    flags: dict[str, Any] = {"max_model_len": wanted.context, **wanted.flags}
    flags |= PRECISIONS[fit.precision].flags if fit.precision in PRECISIONS else {}
    flags |= {"tensor_parallel_size": fit.tp} if fit.tp > 1 else {}
    flags |= {"pipeline_parallel_size": fit.pp} if fit.pp > 1 else {}
    words = [f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in flags.items()]
    return " ".join(["quire serve", shlex.quote(model), *words])


def text(
    model: str,
    checkpoint: Checkpoint,
    device: Accelerator,
    count_: int,
    wanted: Wanted,
    found: list[MemoryFit],
    note: str,
) -> str:
    """All of it, for a terminal."""
    precisions = tuple(dict.fromkeys(fit.precision for fit in found))
    chosen = best(found, precisions[0])
    dtype = "bfloat16" if chosen is None or chosen.config is None else kv_dtype(chosen.config)
    said = facts_of(checkpoint, precisions, dtype)
    lines = [f"{model}: {said['architecture']}, {said['parameters'] / 1e9:.2f} B parameters"]
    if said["active_parameters"] < 0.8 * said["parameters"]:
        lines[0] += f", {said['active_parameters'] / 1e9:.2f} B of them met by a token"
    lines += [f"Note: {note}"] if note else []
    sizes = ", ".join(f"{name} {size / 1e9:,.1f}" for name, size in said["weight_bytes"].items())
    lines.append(f"Weights, GB: {sizes}")
    kinds = ", ".join(
        f"{each['layers']} layers ({kind}) x {each.get('per_token', each.get('per_row')):,}"
        for kind, each in said["kv_bytes"].items()
    )
    per_token = said["kv_bytes_per_token"]
    lines.append(f"KV cache in {dtype}, bytes: {kinds} = {per_token:,} a token")
    every = wanted.concurrency * wanted.context * per_token
    lines.append(
        f"  {wanted.concurrency} requests of {wanted.context:,} tokens: {every / 1e9:,.1f} GB if all is kept"
    )
    lines += ["", f"{device.label}, {human(device.total_bytes)} each, up to {count_}:"]
    lines += [_line(fit, wanted) for fit in found]
    if chosen is None:
        return "\n".join([*lines, "", "Nothing of this fits: more devices, fewer bits or a shorter context."])
    return "\n".join(
        [
            *lines,
            "",
            *_formula(chosen),
            "",
            *_speeds(chosen, device, wanted),
            "",
            command(model, chosen, wanted),
            *_notes(chosen),
        ]
    )


def _line(fit: MemoryFit, wanted: Wanted) -> str:
    layout = f"tp {fit.tp}" + (f" x pp {fit.pp}" if fit.pp > 1 else "")
    if fit.why_not or fit.cache is None:
        return f"  no   {fit.precision:<6} {layout:<12} {fit.why_not}"
    fit_tokens = fit.cache.num_tokens
    held = f"{fit_tokens:,} tokens of cache, {fit_tokens / wanted.context:.1f} requests of {wanted.context:,}"
    return f"  yes  {fit.precision:<6} {layout:<12} {held}"


def _formula(fit: MemoryFit) -> list[str]:
    """As the guide has it: weights + libraries + the peak of activations + KV of a sequence x sequences."""
    assert fit.memory is not None and fit.cache is not None
    terms = {**fit.memory.terms(), "KV cache": fit.cache.num_bytes}
    lines = [f"Memory of one device, {fit.precision}, tp {fit.tp}, pp {fit.pp}:"]
    lines += [
        f"  {'' if number == 0 else '+ '}{name:<14}{human(size):>14}".replace("  +", " +")
        for number, (name, size) in enumerate(terms.items())
    ]
    return [*lines, f" = {'total':<14}{human(sum(terms.values())):>14}"]


def _speeds(fit: MemoryFit, device: Accelerator, wanted: Wanted) -> list[str]:
    lines = ["Expected (floor of bytes and flops x what an H200 was measured to reach):"]
    for rate in _rates(fit, device, wanted):
        lines.append(
            f"  batch {rate.batch:>4}: {rate.decode_ms:7.2f} ms a token, {rate.decode_tok_s:>9,.0f} tok/s"
        )
    return [*lines, f"  prompts: {_rates(fit, device, wanted)[0].prefill_tok_s:,.0f} tok/s"]


def _notes(fit: MemoryFit) -> list[str]:
    kept = PRECISIONS.get(fit.precision)
    return [f"  ({kept.note})"] if kept is not None and kept.note else []

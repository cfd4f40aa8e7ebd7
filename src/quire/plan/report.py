"""A plan as text and as a chart: memory by term, the layouts that fit or not, and the command to run."""

import re
import shlex
from itertools import groupby
from pathlib import Path
from typing import Any

from quire.bench.plot import stacked_chart
from quire.checkpoint.hub import is_default_model
from quire.checkpoint.layout import ROW_KINDS
from quire.checkpoint.model import Checkpoint
from quire.checkpoint.weights import count_parameters
from quire.config.kv_offloading import default_host_bytes
from quire.memory import human
from quire.plan.devices import Accelerator
from quire.plan.estimate import (
    PRECISIONS,
    MemoryFit,
    Wanted,
    kv_bytes_per_token,
    kv_dtype,
    smallest,
    weight_bytes,
)
from quire.plan.rates import TokenRates, copy_seconds, rates

_BATCHES = (1, 32, 256)
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
_COLOURS = {
    "weights": "#4c72b0",
    "activations": "#dd8452",
    "graphs": "#937860",
    "libraries": "#8c8c8c",
    "offload buffers": "#8172b3",
    "KV cache": "#55a868",
    "state checkpoints": "#64b5cd",
}


def best(fits: list[MemoryFit], preferred: str) -> MemoryFit | None:
    """Return the recommended layout: with the preferred precision if it fits, otherwise the first that
    fits."""
    working = [fit for fit in fits if not fit.why_not]
    return next((fit for fit in working if fit.precision == preferred), working[0] if working else None)


def facts_of(checkpoint: Checkpoint, precisions: tuple[str, ...], dtype: str) -> dict[str, Any]:
    """Return the properties of the model that do not depend on the device."""
    weights = count_parameters(checkpoint.facts)
    by_kind = kv_bytes_per_token(checkpoint, dtype)
    return {
        "architecture": checkpoint.facts.architecture,
        "parameters": weights.total,
        "active_parameters": weights.active,
        "weight_bytes": {name: weight_bytes(checkpoint, name) for name in precisions},
        "kv_bytes": {
            kind: {"layers": layers, "per_row" if kind in ROW_KINDS else "per_token": num_bytes}
            for kind, (layers, num_bytes) in by_kind.items()
        },
        "kv_bytes_per_token": sum(
            layers * num_bytes for kind, (layers, num_bytes) in by_kind.items() if kind not in ROW_KINDS
        ),
    }


def described(fit: MemoryFit, device: Accelerator, wanted: Wanted) -> dict[str, Any]:
    """Return a dictionary for JSON output: a layout in one precision, its memory and its expected speed."""
    result: dict[str, Any] = {
        "precision": fit.precision,
        "tensor_parallel_size": fit.tp,
        "pipeline_parallel_size": fit.pp,
        "fits": not fit.why_not,
        "why_not": fit.why_not,
    }
    if fit.memory is not None and fit.cache is not None:
        result["bytes_per_device"] = fit.memory.terms(fit.cache)
        result["cache_tokens"] = fit.cache.num_tokens
        result["concurrency"] = round(fit.cache.num_tokens / wanted.context, 2)
        if num_tokens := host_tier_tokens(fit):
            result["host_tier_tokens"] = num_tokens
        if fit.memory.offloaded.layers:
            result["offloaded"] = {
                "host_bytes_per_device": fit.memory.offloaded.host_bytes,
                "layers_per_device": len(fit.memory.offloaded.layers),
                "stated_pcie_bytes_s": device.pcie_bytes_s,
                "max_steps_s": round(1 / copy_seconds(fit, device), 2),
            }
    if not fit.why_not:
        result["rates"] = [rate._asdict() for rate in _rates(fit, device, wanted)]
    return result


def _rates(fit: MemoryFit, device: Accelerator, wanted: Wanted) -> list[TokenRates]:
    assert fit.cache is not None
    most = fit.cache.num_tokens // wanted.context
    batches = {*_BATCHES, wanted.concurrency, min(most, max(_BATCHES))}
    held = sorted(batch for batch in batches if 0 < batch <= most)
    return [rates(fit, device, batch=batch, context=wanted.context) for batch in held]


def unserved(device: Accelerator) -> str:
    return (
        f"Quire runs on NVIDIA GPUs and on CPUs, not on {device.label}: its memory is planned, nothing more"
    )


def command(model: str, fit: MemoryFit, wanted: Wanted) -> str:
    """Return the `quire serve` command for this layout and workload."""
    flags: dict[str, Any] = {"max_model_len": wanted.context, **wanted.flags}
    flags |= PRECISIONS[fit.precision].flags if fit.precision in PRECISIONS else {}
    flags |= {"tensor_parallel_size": fit.tp} if fit.tp > 1 else {}
    flags |= {"pipeline_parallel_size": fit.pp} if fit.pp > 1 else {}
    words = [f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in flags.items()]
    # Sizes, and names such as llama-3-70b, are no model that could be served.
    is_name = "/" in model or Path(model).exists() or is_default_model(model)
    name = shlex.quote(model) if is_name else "MODEL"
    return " ".join(["quire serve", name, *words])


def text(
    model: str,
    checkpoint: Checkpoint,
    device: Accelerator,
    count_: int,
    wanted: Wanted,
    fits: list[MemoryFit],
    note: str,
) -> str:
    """Return the whole report for a terminal."""
    precisions = tuple(dict.fromkeys(fit.precision for fit in fits))
    chosen = best(fits, precisions[0])
    dtype = "bfloat16" if chosen is None or chosen.config is None else kv_dtype(chosen.config)
    facts = facts_of(checkpoint, precisions, dtype)
    lines = [f"{model}: {facts['architecture']}, {facts['parameters'] / 1e9:.2f} B parameters"]
    if facts["active_parameters"] < 0.8 * facts["parameters"]:
        lines[0] += f", {facts['active_parameters'] / 1e9:.2f} B of them active per token"
    if checkpoint.quant is not None:
        lines[0] += f", stored as {checkpoint.quant.method}"
    lines += [f"Note: {note}"] if note else []
    lines += [] if device.served else [f"Note: {unserved(device)}"]
    sizes = ", ".join(f"{name} {size / 1e9:,.1f}" for name, size in facts["weight_bytes"].items())
    lines.append(f"Weights, GB: {sizes}")
    kinds = ", ".join(
        f"{entry['layers']} layers ({kind}) x {entry.get('per_token', entry.get('per_row')):,}"
        for kind, entry in facts["kv_bytes"].items()
    )
    per_token = facts["kv_bytes_per_token"]
    lines.append(f"KV cache in {dtype}, bytes: {kinds} = {per_token:,} per token")
    total_bytes = wanted.concurrency * wanted.context * per_token
    lines.append(
        f"  {_requests(wanted.concurrency)} of {wanted.context:,} tokens: "
        f"{total_bytes / 1e9:,.1f} GB if all tokens are kept"
    )
    lines += ["", f"{device.label}, {human(device.total_bytes)} each, up to {count_}:"]
    lines += _lines(fits, wanted)
    if chosen is None:
        return "\n".join([*lines, "", f"Nothing fits: {_remedy(checkpoint, device, count_, wanted, fits)}"])
    return "\n".join(
        [
            *lines,
            "",
            *_formula(chosen),
            "",
            *_speeds(chosen, device, wanted),
            *_offload(chosen, device),
            *_host_tier(chosen),
            "",
            *([command(model, chosen, wanted), *_notes(chosen)] if device.served else []),
        ]
    )


def memory_chart(model: str, device: Accelerator, fits: list[MemoryFit]) -> str:
    """Return an SVG chart of the memory of one device, by purpose, for each layout that fits; the frame is
    the device's memory."""
    bars = [
        (f"{fit.precision} tp{fit.tp}" + (f" pp{fit.pp}" if fit.pp > 1 else ""), fit.memory.terms(fit.cache))
        for fit in fits
        if fit.memory is not None and fit.cache is not None
    ]
    title = f"{model}: one {device.label}, {human(device.total_bytes)}"
    used = {name for _, terms in bars for name in terms}
    colours = {name: colour for name, colour in _COLOURS.items() if name in used}
    return stacked_chart(title, bars, total=device.total_bytes, colours=colours, text=human)


def _lines(fits: list[MemoryFit], wanted: Wanted) -> list[str]:
    """Return a printed line per layout. Layouts of a precision that fail for the same reason share one
    line, with the figure of the layout that comes nearest."""
    lines = []
    for (precision, reason), group in groupby(fits, key=_reason):
        same = list(group)
        if len(same) == 1 or not reason:
            lines += [_line(fit, wanted) for fit in same]
            continue
        best_fit = (min if "exceed" in reason else max)(same, key=_first_number)
        layouts = f"{len(same)} layouts"
        lines.append(f"  no   {precision:<6} {layouts:<12} at best {_layout(best_fit)}: {best_fit.why_not}")
    return lines


def _reason(fit: MemoryFit) -> tuple[str, str]:
    return fit.precision, _NUMBER.sub("#", fit.why_not)


def _first_number(fit: MemoryFit) -> float:
    numbers = _NUMBER.findall(fit.why_not)
    return float(numbers[0].replace(",", "")) if numbers else 0.0


def _remedy(
    checkpoint: Checkpoint, device: Accelerator, count_: int, wanted: Wanted, fits: list[MemoryFit]
) -> str:
    """Return advice for a model that does not fit: fewer concurrent requests, more devices, or a lower
    precision."""
    held = max((fit.cache.num_tokens for fit in fits if fit.cache is not None), default=0)
    if held >= wanted.context:
        return (
            f"{_requests(held // wanted.context)} of {wanted.context:,} tokens at once would do "
            "(--concurrency), or a shorter context, or more devices."
        )
    smallest_precision = min(
        dict.fromkeys(fit.precision for fit in fits), key=lambda name: weight_bytes(checkpoint, name)
    )
    for more in (2, 4, 8, 16, 32):
        count = more * count_
        machine = device.machine(count)
        tried = smallest(
            checkpoint, machine, wanted, (smallest_precision,), most=count, per_node=device.per_node
        )
        if not tried[-1].why_not:
            return f"{tried[-1].num_devices} {device.label} would do, in {smallest_precision}."
    return "use a lower precision, a shorter context or a larger device."


def _requests(count: int) -> str:
    return f"{count:,} request" + ("s" if count != 1 else "")


def _layout(fit: MemoryFit) -> str:
    return f"tp {fit.tp}" + (f" x pp {fit.pp}" if fit.pp > 1 else "")


def _line(fit: MemoryFit, wanted: Wanted) -> str:
    layout = _layout(fit)
    if fit.why_not or fit.cache is None:
        return f"  no   {fit.precision:<6} {layout:<12} {fit.why_not}"
    fit_tokens = fit.cache.num_tokens
    held = f"{fit_tokens:,} tokens of cache, {fit_tokens / wanted.context:.1f} requests of {wanted.context:,}"
    return f"  yes  {fit.precision:<6} {layout:<12} {held}"


def _formula(fit: MemoryFit) -> list[str]:
    """Return the lines of the memory formula: weights + libraries + peak activations + KV cache of a
    sequence x sequences."""
    assert fit.memory is not None and fit.cache is not None
    terms = fit.memory.terms(fit.cache)
    lines = [f"Memory of one device, {fit.precision}, tp {fit.tp}, pp {fit.pp}:"]
    width = max(14, *(len(name) + 2 for name in terms))
    lines += [
        f"  {'' if number == 0 else '+ '}{name:<{width}}{human(size):>14}".replace("  +", " +")
        for number, (name, size) in enumerate(terms.items())
    ]
    return [*lines, f" = {'total':<{width}}{human(sum(terms.values())):>14}"]


def _speeds(fit: MemoryFit, device: Accelerator, wanted: Wanted) -> list[str]:
    lines = ["Expected (roofline x efficiency measured on an H200):"]
    for rate in _rates(fit, device, wanted):
        lines.append(
            f"  batch {rate.batch:>4}: {rate.decode_ms:7.2f} ms per token, {rate.decode_tok_s:>9,.0f} tok/s"
        )
    return [*lines, f"  prompts: {_rates(fit, device, wanted)[0].prefill_tok_s:,.0f} tok/s"]


def _offload(fit: MemoryFit, device: Accelerator) -> list[str]:
    """Return the lines on offloaded weights: their host memory, and the speed limit of their copies."""
    assert fit.memory is not None
    layers, host_bytes, _ = fit.memory.offloaded
    if not layers:
        return []
    copy_s = copy_seconds(fit, device)
    return [
        f"Offloaded: {human(host_bytes)} of host memory for each device, {len(layers)} of its layers. Every"
        f" step copies them, which takes {1e3 * copy_s:,.0f} ms:",
        f"  at most {1 / copy_s:,.2f} tokens/s for one request. Assumed: {device.pcie_bytes_s / 1e9:.0f} GB/s"
        " of PCIe, as stated for the device; it was not measured",
    ]


def _host_tier(fit: MemoryFit) -> list[str]:
    """Return the line on host memory for evicted KV blocks: its bytes and tokens, over all devices."""
    if (num_tokens := host_tier_tokens(fit)) == 0:
        return []
    assert fit.config is not None
    note = ", if ten times as much is free" if fit.config.cache.kv_offloading_size is None else ""
    size = human(_host_tier_bytes(fit))
    return [f"KV cache tier in host memory: {size}, {num_tokens:,} more tokens{note}"]


def host_tier_tokens(fit: MemoryFit) -> int:
    """Return the number of tokens that fit in host memory for evicted KV blocks."""
    if fit.cache is None or not (num_bytes := _host_tier_bytes(fit)):
        return 0
    per_token = fit.cache.num_bytes * fit.num_devices / max(fit.cache.num_tokens, 1)
    return int(num_bytes / per_token)


def _host_tier_bytes(fit: MemoryFit) -> int:
    """Return the bytes of host memory for evicted KV blocks; the default is that of a host with enough
    memory."""
    if fit.config is None or fit.cache is None or not fit.config.cache.has_tiers:
        return 0
    if (gib := fit.config.cache.kv_offloading_size) is not None:
        return int(gib * 2**30)
    device_bytes = fit.cache.num_bytes * fit.num_devices
    return default_host_bytes(1 << 62, device_bytes, num_devices=fit.num_devices, num_engines=1)


def _notes(fit: MemoryFit) -> list[str]:
    precision = PRECISIONS.get(fit.precision)
    return [f"  ({precision.note})"] if precision is not None and precision.note else []

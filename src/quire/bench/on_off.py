"""`quire bench on-off`: measures each optimization on this machine, switched off and on in turns."""

import argparse
import gc
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from quire.bench.on_off_media import images, open_seeing
from quire.bench.plot import BarGroup, bar_chart
from quire.config.cli import FlagParser, add_engine_flags, engine_args_from
from quire.configure import configure
from quire.data.outputs import RequestOutput
from quire.data.params import SamplingParams
from quire.entrypoints.llm import LLM
from quire.errors import ConfigError

Settings = Mapping[str, Any]


class WorkloadSizes(NamedTuple):
    """Sizes of the workloads: lengths in tokens, numbers of requests, and bytes of KV cache."""

    longest: int
    """Tokens of the longest request; a step has at most a quarter as many, except without chunked prefill."""
    prefix: int
    """Number of tokens of the prefix that requests share."""
    sharing: int
    streams: int
    """Number of requests that decode beside long prompts, or after long contexts."""
    long_prompts: int
    context: int
    answer: int
    image_edge: int
    """Height and width of an image, in pixels."""
    num_images: int
    cache_bytes: int


SIZES = {
    "tiny": WorkloadSizes(256, 64, 3, 2, 1, 64, 16, 56, 2, 1 << 26),
    "cpu": WorkloadSizes(1024, 384, 6, 4, 2, 512, 96, 224, 8, 1 << 30),
    "cuda": WorkloadSizes(8192, 2048, 64, 64, 8, 2048, 256, 448, 32, 24 << 30),
}


class OnOffRun(NamedTuple):
    """Results of one run of a workload, with an optimization switched off or on."""

    ttft_s: float
    """Mean time to first token, in seconds."""
    rate: float
    """Output tokens per second; images per second for the encoder."""
    gap_s: float = 0.0
    """The longest time between two tokens of a stream, in seconds; 0 if it was not measured."""


class OnOffPart(NamedTuple):
    """An optimization, and the workload that measures it."""

    name: str
    claim: str
    """Gain of the optimization as stated in vLLM's guide."""
    off: Settings
    on: Settings
    workload: str
    measure: Callable[[LLM, WorkloadSizes, int], OnOffRun]
    opened: Callable[[Settings, WorkloadSizes], LLM] | None = None
    """Function that opens the engine from changed settings and sizes; None opens the requested model."""
    measure_off: Callable[[LLM, WorkloadSizes, int], OnOffRun] | None = None
    """Function that measures the run without the optimization; None: `measure` does."""


class Row(NamedTuple):
    """The results of an optimization, or the reason why it was not measured."""

    part: OnOffPart
    off: OnOffRun | None = None
    on: OnOffRun | None = None
    seconds: float = 0.0
    why_not: str = ""

    @property
    def ratio(self) -> float:
        assert self.off is not None and self.on is not None
        return self.on.rate / self.off.rate


def add_flags(parser: FlagParser) -> None:
    group = parser.add_argument_group("Benchmark", "The workloads to measure.")
    group.add_argument("--parts", help=f"Which of: {', '.join(PARTS)}. Default: all.")
    group.add_argument("--rounds", type=int, default=3, help="Repetitions; the table shows medians.")
    group.add_argument("--size", choices=SIZES, help="Size of the workloads. Default: by device.")
    group.add_argument("--svg", type=Path, help="File for an SVG chart.")
    group.add_argument("--output-json", type=Path, help="File for the results.")
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    names = args.parts.split(",") if args.parts else list(PARTS)
    if unknown := [name for name in names if name not in PARTS]:
        raise ConfigError(f"unknown part {unknown[0]!r}; known: {', '.join(PARTS)}")
    engine_args = engine_args_from(args)
    if engine_args.get("load_format") == "dummy":
        engine_args["skip_tokenizer_init"] = True
    began = time.perf_counter()
    bench = Bench(engine_args, args.size)
    rows = [bench.row(PARTS[name](bench), args.rounds) for name in names]
    print("\n".join(table(rows)))
    total = f"{bench.name} on {bench.machine.name}, {time.perf_counter() - began:.0f} s in all"
    print(f"\n{total}: " + ", ".join(f"{row.part.name} {row.seconds:.0f}" for row in rows))
    if args.svg:
        args.svg.write_text(picture(rows, f"On against off: {bench.name}, {bench.machine.name}"))
    if args.output_json:
        args.output_json.write_text(json.dumps([_figures(row) for row in rows], indent=1) + "\n")
    return 0


class Bench:
    """Measures optimizations. The engine with default settings stays open; engines with changed settings are
    open while they are measured."""

    def __init__(self, engine_args: Settings, size: str | None) -> None:
        self._engine_args = dict(engine_args)
        config = configure({"model": None} | self._engine_args)
        self.machine, self.is_gguf = config.machine, config.checkpoint.path.is_file()
        self.name = Path(config.model.served_model_name[0]).name
        self.sizes = SIZES[size or self.machine.device]
        self.first_sizes = self.sizes if self.machine.device == "cuda" else SIZES["tiny"]
        """Sizes of the warm-up run, in which a GPU compiles kernels."""
        self._plain = self.open({}, self.sizes)

    def open(self, change: Settings, sizes: WorkloadSizes) -> LLM:
        settings = {
            "max_model_len": sizes.longest,
            "max_num_batched_tokens": sizes.longest // 4,
            "max_num_seqs": sizes.sharing + sizes.streams + sizes.long_prompts,
            "kv_cache_memory_bytes": sizes.cache_bytes,
            "use_tqdm_on_load": False,
        }
        return LLM(**(settings | self._engine_args | dict(change)))

    def row(self, part: OnOffPart, rounds: int) -> Row:
        """Measure an optimization off and on in turns, so that a disturbance of the machine affects both
        sides."""
        began = time.perf_counter()
        print(f"{part.name}: {part.workload} ...", file=sys.stderr, flush=True)
        engines: list[LLM] = []
        try:
            for change in (part.off, part.on):
                opened = part.opened or self.open
                engines.append(self._plain if change == {} else opened(change, self.sizes))
            sides = list(zip(engines, (part.measure_off or part.measure, part.measure), strict=True))
            for llm, measure in sides:
                measure(llm, self.first_sizes, -1)
            turns = [[measure(llm, self.sizes, turn) for llm, measure in sides] for turn in range(rounds)]
            off, on = (_median_run([turn[side] for turn in turns]) for side in (0, 1))
        except ConfigError as error:
            return Row(part, why_not=str(error), seconds=time.perf_counter() - began)
        finally:
            for llm in engines:
                if llm is not self._plain:
                    _close(llm)
        return Row(part, off, on, time.perf_counter() - began)


def _close(llm: LLM) -> None:
    llm.llm_engine.close()
    gc.collect()


def _median_run(runs: Sequence[OnOffRun]) -> OnOffRun:
    return OnOffRun(*(median(column) for column in zip(*runs, strict=True)))


# ---- workloads


def _prompt(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(10, 250) for _ in range(length)]


def _greedy_params(length: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)


def _run(llm: LLM, prompts: Sequence[Any], length: int) -> OnOffRun:
    """Run all prompts at once; return the mean time to first token and the tokens per second."""
    began = time.perf_counter()
    outputs = llm.generate(prompts, _greedy_params(length), use_tqdm=False)
    took = time.perf_counter() - began
    return OnOffRun(_ttft(outputs), len(prompts) * length / took)


def _ttft(outputs: Sequence[RequestOutput]) -> float:
    return mean(output.metrics.first_token_latency for output in outputs if output.metrics is not None)


def _decode(llm: LLM, prompts: Sequence[list[int]], length: int) -> OnOffRun:
    """Measure decode steps only: the prompts are in the prefix cache by then."""
    llm.generate(prompts, _greedy_params(1), use_tqdm=False)
    outputs = llm.generate(prompts, _greedy_params(length), use_tqdm=False)
    times = [output.metrics for output in outputs if output.metrics is not None]
    took = max(stats.last_token_ts for stats in times) - min(stats.first_token_ts for stats in times)
    return OnOffRun(_ttft(outputs), len(prompts) * (length - 1) / took)


def _mixed_lengths(sizes: WorkloadSizes, turn: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return the prompts and sampling parameters of four batches, with outputs of very different lengths."""
    draw = random.Random(turn)
    prompts = [_prompt(draw, 16) for _ in range(4 * sizes.streams)]
    return prompts, [_greedy_params(draw.randint(sizes.answer // 8, sizes.answer)) for _ in prompts]


def _continuous(llm: LLM, sizes: WorkloadSizes, turn: int) -> OnOffRun:
    """Send all requests at once: when a request ends, the next one takes its place in the batch."""
    return _in_batches(llm, sizes, turn, size=4 * sizes.streams)


def _static(llm: LLM, sizes: WorkloadSizes, turn: int) -> OnOffRun:
    """Send the requests in batches: each batch waits until all requests of the one before have ended."""
    return _in_batches(llm, sizes, turn, size=sizes.streams)


def _in_batches(llm: LLM, sizes: WorkloadSizes, turn: int, *, size: int) -> OnOffRun:
    prompts, params = _mixed_lengths(sizes, turn)
    began, ttfts = time.perf_counter(), []
    for first in range(0, len(prompts), size):
        waited = time.perf_counter() - began
        batch = slice(first, first + size)
        outputs = llm.generate(prompts[batch], params[batch], use_tqdm=False)
        ttfts += [waited + _ttft([output]) for output in outputs]
    took = time.perf_counter() - began
    return OnOffRun(mean(ttfts), sum(entry.max_tokens or 0 for entry in params) / took)


def _sharing(llm: LLM, sizes: WorkloadSizes, turn: int) -> OnOffRun:
    draw = random.Random(turn)
    prefix = _prompt(draw, sizes.prefix)
    llm.generate([prefix], _greedy_params(1), use_tqdm=False)
    return _run(llm, [prefix + _prompt(draw, 16) for _ in range(sizes.sharing)], 8)


def _beside_long_prompts(llm: LLM, sizes: WorkloadSizes, turn: int) -> OnOffRun:
    """Decode streams while long prompts are computed; measure their tokens per second and longest gap."""
    engine, draw = llm.llm_engine, random.Random(turn)
    names = [f"stream {turn} {number}" for number in range(sizes.streams)]
    longs = [f"long {turn} {number}" for number in range(sizes.long_prompts)]
    for name in names:
        engine.add_request(name, _prompt(draw, 16), _greedy_params(sizes.longest - 32))
    counts = dict.fromkeys(names, 0)
    while min(counts.values()) < 4:
        _step(llm, counts)
    for name in longs:
        engine.add_request(name, _prompt(draw, sizes.longest - 16), _greedy_params(1))
    before, waiting = dict(counts), set(longs)
    began = last = time.perf_counter()
    ttfts, gaps = [], []
    while waiting:
        for name in _step(llm, counts) & waiting:
            waiting.discard(name)
            ttfts.append(time.perf_counter() - began)
        gaps.append(time.perf_counter() - last)
        last = time.perf_counter()
    num_generated = sum(counts[name] - before[name] for name in names)
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    return OnOffRun(mean(ttfts), num_generated / (last - began), max(gaps))


def _step(llm: LLM, counts: dict[str, int]) -> set[str]:
    """Run one engine step and return the ids of the requests with new output. `counts` has the number of
    output tokens by request id; it is updated for the ids that it contains."""
    outputs = llm.llm_engine.step()
    for output in outputs:
        if output.request_id in counts:
            assert isinstance(output, RequestOutput)
            counts[output.request_id] = len(output.outputs[0].token_ids)
    return {output.request_id for output in outputs}


def _one_stream(llm: LLM, sizes: WorkloadSizes, turn: int) -> OnOffRun:
    return _decode(llm, [_prompt(random.Random(turn), 32)], sizes.answer)


def _long_contexts(llm: LLM, sizes: WorkloadSizes, turn: int) -> OnOffRun:
    """Measure decoding after long prompts. Each turn has the same prompts, so that only the first turn
    computes them."""
    draw = random.Random(0)
    prompts = [_prompt(draw, sizes.context) for _ in range(sizes.streams)]
    return _decode(llm, prompts, sizes.answer // 2)


def _quoting(llm: LLM, sizes: WorkloadSizes, turn: int) -> OnOffRun:
    """Generate a text that repeats the prompt. With random weights the output soon repeats itself anyway."""
    if llm.config.model.skip_tokenizer_init:
        return _one_stream(llm, sizes, turn)
    text = Path(__file__).read_text(encoding="utf-8")[400 + turn : 2000 + turn]
    again = f"The file:\n```python\n{text}\n```\nThe same file again:\n```python\n{text[:200]}"
    ids = llm.get_tokenizer().encode(again)[-(sizes.longest - sizes.answer - 8) :]
    return _decode(llm, [ids], sizes.answer)


def _encode_images(llm: LLM, sizes: WorkloadSizes, turn: int) -> OnOffRun:
    return _run(llm, images(sizes.num_images, sizes.image_edge, turn), 1)


# ---- parts


def _weights(bench: Bench) -> OnOffPart:
    """Build the comparison for quantized weights: those of a GGUF file against dequantized ones or, for other
    models, fp8 against unquantized weights."""
    if bench.is_gguf:
        change: dict[str, Settings] = {"off": {"quantization": "none"}, "on": {}}
        name = "packed weights (GGUF)"
    else:
        change, name = {"off": {}, "on": {"quantization": "fp8"}}, "fp8 weights"
    text = f"one stream, {bench.sizes.answer} tokens"
    return OnOffPart(name, "+50 %", change["off"], change["on"], text, _one_stream)


def _batching(bench: Bench) -> OnOffPart:
    sizes = bench.sizes
    rows = {"max_num_seqs": sizes.streams}
    text = (
        f"{4 * sizes.streams} requests of {sizes.answer // 8} to {sizes.answer} tokens, {sizes.streams} at "
        "once; off: each batch waits for its longest request"
    )
    return OnOffPart(
        "continuous batching", "+100 to 2300 %", rows, rows, text, _continuous, measure_off=_static
    )


def _encoder(bench: Bench) -> OnOffPart:
    folder = tempfile.TemporaryDirectory()

    def opened(change: Settings, sizes: WorkloadSizes) -> LLM:
        machine = bench.machine
        if machine.device == "cuda" and machine.num_devices < 2:
            raise ConfigError("two ranks need two GPUs")
        return open_seeing(Path(folder.name), change, sizes.image_edge, sizes.num_images)

    return OnOffPart(
        "encoder DP (mm_encoder_tp_mode)",
        "+10 to 40 %",
        {"mm_encoder_tp_mode": "weights"},
        {"mm_encoder_tp_mode": "data"},
        f"two ranks, {bench.sizes.num_images} images of {bench.sizes.image_edge} pixels; images per second",
        _encode_images,
        opened,
    )


def _plain_part(
    name: str,
    claim: str,
    off: Settings,
    on: Settings,
    workload: str,
    measure: Callable[[LLM, WorkloadSizes, int], OnOffRun],
) -> Callable[[Bench], OnOffPart]:
    return lambda bench: OnOffPart(name, claim, off, on, workload.format(**bench.sizes._asdict()), measure)


def _whole_prompts(bench: Bench) -> OnOffPart:
    sizes = bench.sizes
    # A whole prompt needs token budget beside the streams, otherwise it waits until they are done.
    off = {"enable_chunked_prefill": False, "max_num_batched_tokens": sizes.longest + sizes.streams}
    text = (
        f"{sizes.streams} streams while {sizes.long_prompts} prompts of {sizes.longest - 16} tokens arrive;"
        f" chunks of {sizes.longest // 4}"
    )
    return OnOffPart("chunked prefill", "+30 %", off, {}, text, _beside_long_prompts)


_NGRAM = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 3}
PARTS: dict[str, Callable[[Bench], OnOffPart]] = {
    "batching": _batching,
    "prefix": _plain_part(
        "prefix caching",
        "+400 %",
        {"enable_prefix_caching": False},
        {},
        "{sharing} requests with {prefix} shared and 16 own tokens, 8 output tokens",
        _sharing,
    ),
    "chunks": _whole_prompts,
    "graphs": _plain_part(
        "graphs, on a CPU tapes (enforce_eager)",
        "+15 %",
        {"enforce_eager": True},
        {},
        "one stream, {answer} tokens",
        _one_stream,
    ),
    "weights": _weights,
    "cache": _plain_part(
        "fp8 cache",
        "+50 %",
        {},
        {"kv_cache_dtype": "fp8"},
        "{streams} streams with {context} tokens of context",
        _long_contexts,
    ),
    "drafts": _plain_part(
        "speculation (ngram)",
        "+200 %",
        {},
        {"speculative_config": _NGRAM},
        "one stream that quotes, {answer} tokens",
        _quoting,
    ),
    "encoder": _encoder,
}


# ---- output


def table(rows: Sequence[Row]) -> list[str]:
    """Return the results as a Markdown table."""
    lines = [
        "| optimization | workload | first token, ms: off / on | output/s: off / on | gain | guide |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for row in rows:
        part = row.part
        if row.off is None or row.on is None:
            lines.append(f"| {part.name} | {part.workload} | - | - | {row.why_not} | {part.claim} |")
            continue
        workload = part.workload
        if row.off.gap_s:
            workload += f"; longest gap {1000 * row.off.gap_s:,.0f} / {1000 * row.on.gap_s:,.0f} ms"
        first = f"{1000 * row.off.ttft_s:,.1f} / {1000 * row.on.ttft_s:,.1f}"
        rates = f"{row.off.rate:,.1f} / {row.on.rate:,.1f}"
        gain = f"{100 * (row.ratio - 1):+.0f} %"
        lines.append(f"| {' | '.join([part.name, workload, first, rates, gain, part.claim])} |")
    return lines


def picture(rows: Sequence[Row], title: str) -> str:
    """Return an SVG chart of the rate with each optimization, relative to the rate without it."""
    groups = [
        BarGroup(
            row.part.name.partition(" (")[0],
            {"off": 1.0, "on": row.ratio},
            {"off": f"{row.off.rate:,.0f} per second", "on": f"{row.on.rate:,.0f}, {row.ratio:.2f} x"},
        )
        for row in rows
        if row.off is not None and row.on is not None
    ]
    return bar_chart(title, groups, mark=1.0)


def _figures(row: Row) -> dict[str, Any]:
    runs = {"off": row.off, "on": row.on}
    figures = {name: result._asdict() for name, result in runs.items() if result is not None}
    return {"part": row.part.name, "workload": row.part.workload, **figures, "why_not": row.why_not}

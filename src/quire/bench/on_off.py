"""`quire bench on-off`: what each optimization is worth on this machine, turned off and on in turns."""

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

from quire.bench.bars import BarGroup, svg
from quire.bench.on_off_media import images, open_seeing
from quire.config.cli import FlagParser, add_engine_flags, given_from
from quire.configure import configure
from quire.data.outputs import RequestOutput
from quire.data.params import SamplingParams
from quire.entrypoints.llm import LLM
from quire.errors import ConfigError

Settings = Mapping[str, Any]


class WorkloadSizes(NamedTuple):
    """How large the workloads are, in tokens and requests."""

    longest: int
    """Of a request; a step has a quarter of it, but for prompts that are not cut."""
    prefix: int
    """What requests share."""
    sharing: int
    streams: int
    """Requests that decode beside long prompts, and with long contexts."""
    long_prompts: int
    context: int
    answer: int
    image_edge: int
    """Pixels."""
    num_images: int
    cache_bytes: int


SIZES = {
    "tiny": WorkloadSizes(256, 64, 3, 2, 1, 64, 16, 56, 2, 1 << 26),
    "cpu": WorkloadSizes(1024, 384, 6, 4, 2, 512, 96, 224, 8, 1 << 30),
    "cuda": WorkloadSizes(8192, 2048, 64, 64, 8, 2048, 256, 448, 32, 24 << 30),
}


class OnOffRun(NamedTuple):
    """What came of one run of a workload."""

    ttft_s: float
    """The mean until a first token."""
    rate: float
    """Tokens a second that came out; images a second, where those are seen."""
    gap_s: float = 0.0
    """The longest time between two tokens of a stream, where that is looked at."""


class OnOffPart(NamedTuple):
    """An optimization, and the workload that it is for."""

    name: str
    claim: str
    """Of vLLM's guide."""
    off: Settings
    on: Settings
    workload: str
    measure: Callable[[LLM, WorkloadSizes, int], OnOffRun]
    opened: Callable[[Settings, WorkloadSizes], LLM] | None = None
    """By default the model that was asked for, with these settings."""


class Row(NamedTuple):
    """A part, measured; without figures the reason why not."""

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
    group = parser.add_argument_group("Benchmark", "What is measured.")
    group.add_argument("--parts", help=f"Which of: {', '.join(PARTS)}. Default: all.")
    group.add_argument("--rounds", type=int, default=3, help="Turns of each; the table has medians.")
    group.add_argument("--size", choices=SIZES, help="Of the workloads. Default: by the device.")
    group.add_argument("--svg", type=Path, help="File for a picture.")
    group.add_argument("--output-json", type=Path, help="File for the figures.")
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    wanted = args.parts.split(",") if args.parts else list(PARTS)
    if unknown := [name for name in wanted if name not in PARTS]:
        raise ConfigError(f"unknown part {unknown[0]!r}; known: {', '.join(PARTS)}")
    given = given_from(args)
    if given.get("load_format") == "dummy":
        given["skip_tokenizer_init"] = True
    began = time.perf_counter()
    bench = Bench(given, args.size)
    rows = [bench.row(PARTS[name](bench), args.rounds) for name in wanted]
    print("\n".join(table(rows)))
    total = f"{bench.name} on {bench.machine.name}, {time.perf_counter() - began:.0f} s in all"
    print(f"\n{total}: " + ", ".join(f"{row.part.name} {row.seconds:.0f}" for row in rows))
    if args.svg:
        args.svg.write_text(picture(rows, f"On against off: {bench.name}, {bench.machine.name}"))
    if args.output_json:
        args.output_json.write_text(json.dumps([_figures(row) for row in rows], indent=1) + "\n")
    return 0


class Bench:
    """The engine as it is by default, and others beside it for as long as they are measured."""

    def __init__(self, given: Settings, size: str | None) -> None:
        self._given = dict(given)
        config = configure({"model": None} | self._given)
        self.machine, self.is_gguf = config.machine, config.checkpoint.path.is_file()
        self.name = Path(config.model.served_model_name[0]).name
        self.sizes = SIZES[size or self.machine.device]
        self.first_sizes = self.sizes if self.machine.device == "cuda" else SIZES["tiny"]
        """Of the run that is not counted: a GPU compiles kernels for what it meets."""
        self._plain = self.open({}, self.sizes)

    def open(self, change: Settings, sizes: WorkloadSizes) -> LLM:
        settings = {
            "max_model_len": sizes.longest,
            "max_num_batched_tokens": sizes.longest // 4,
            "max_num_seqs": sizes.sharing + sizes.streams + sizes.long_prompts,
            "kv_cache_memory_bytes": sizes.cache_bytes,
            "use_tqdm_on_load": False,
        }
        return LLM(**(settings | self._given | dict(change)))

    def row(self, part: OnOffPart, rounds: int) -> Row:
        """In turns, so that a busy moment of the machine meets both."""
        began = time.perf_counter()
        print(f"{part.name}: {part.workload} ...", file=sys.stderr, flush=True)
        engines: list[LLM] = []
        try:
            for change in (part.off, part.on):
                opened = part.opened or self.open
                engines.append(self._plain if change == {} else opened(change, self.sizes))
            for llm in engines:
                part.measure(llm, self.first_sizes, -1)
            turns = [[part.measure(llm, self.sizes, turn) for llm in engines] for turn in range(rounds)]
            off, on = (_middle([turn[which] for turn in turns]) for which in (0, 1))
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


def _middle(found: Sequence[OnOffRun]) -> OnOffRun:
    return OnOffRun(*(median(column) for column in zip(*found, strict=True)))


# ---- the workloads


def _prompt(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(10, 250) for _ in range(length)]


def _asked(length: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)


def _run(llm: LLM, prompts: Sequence[Any], length: int) -> OnOffRun:
    """All at once: the mean of first tokens, and the tokens a second."""
    began = time.perf_counter()
    outputs = llm.generate(prompts, _asked(length), use_tqdm=False)
    took = time.perf_counter() - began
    return OnOffRun(_ttft(outputs), len(prompts) * length / took)


def _ttft(outputs: Sequence[RequestOutput]) -> float:
    return mean(each.metrics.first_token_latency for each in outputs if each.metrics is not None)


def _decode(llm: LLM, prompts: Sequence[list[int]], length: int) -> OnOffRun:
    """The steps behind the first tokens, of prompts that are known by then."""
    llm.generate(prompts, _asked(1), use_tqdm=False)
    outputs = llm.generate(prompts, _asked(length), use_tqdm=False)
    times = [each.metrics for each in outputs if each.metrics is not None]
    took = max(each.last_token_ts for each in times) - min(each.first_token_ts for each in times)
    return OnOffRun(_ttft(outputs), len(prompts) * (length - 1) / took)


def _sharing(llm: LLM, sizes: WorkloadSizes, turn: int) -> OnOffRun:
    draw = random.Random(turn)
    prefix = _prompt(draw, sizes.prefix)
    llm.generate([prefix], _asked(1), use_tqdm=False)
    return _run(llm, [prefix + _prompt(draw, 16) for _ in range(sizes.sharing)], 8)


def _beside_long_prompts(llm: LLM, sizes: WorkloadSizes, turn: int) -> OnOffRun:
    """Streams while long prompts are computed: their tokens a second, and their longest wait."""
    engine, draw = llm.llm_engine, random.Random(turn)
    names = [f"stream {turn} {number}" for number in range(sizes.streams)]
    longs = [f"long {turn} {number}" for number in range(sizes.long_prompts)]
    for name in names:
        engine.add_request(name, _prompt(draw, 16), _asked(sizes.longest - 32))
    counts = dict.fromkeys(names, 0)
    while min(counts.values()) < 4:
        _step(llm, counts)
    for name in longs:
        engine.add_request(name, _prompt(draw, sizes.longest - 16), _asked(1))
    before, waiting = dict(counts), set(longs)
    began = last = time.perf_counter()
    ttfts, gaps = [], []
    while waiting:
        for name in _step(llm, counts) & waiting:
            waiting.discard(name)
            ttfts.append(time.perf_counter() - began)
        gaps.append(time.perf_counter() - last)
        last = time.perf_counter()
    made = sum(counts[name] - before[name] for name in names)
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    return OnOffRun(mean(ttfts), made / (last - began), max(gaps))


def _step(llm: LLM, counts: dict[str, int]) -> set[str]:
    """Who has got something."""
    outputs = llm.llm_engine.step()
    for output in outputs:
        if output.request_id in counts:
            assert isinstance(output, RequestOutput)
            counts[output.request_id] = len(output.outputs[0].token_ids)
    return {output.request_id for output in outputs}


def _one_stream(llm: LLM, sizes: WorkloadSizes, turn: int) -> OnOffRun:
    return _decode(llm, [_prompt(random.Random(turn), 32)], sizes.answer)


def _long_contexts(llm: LLM, sizes: WorkloadSizes, turn: int) -> OnOffRun:
    """The same prompts in each turn, so that only the first computes them."""
    draw = random.Random(0)
    prompts = [_prompt(draw, sizes.context) for _ in range(sizes.streams)]
    return _decode(llm, prompts, sizes.answer // 2)


def _quoting(llm: LLM, sizes: WorkloadSizes, turn: int) -> OnOffRun:
    """A text that is said again. A model of random weights has no text; what it says soon repeats itself."""
    if llm.config.model.skip_tokenizer_init:
        return _one_stream(llm, sizes, turn)
    text = Path(__file__).read_text(encoding="utf-8")[400 + turn : 2000 + turn]
    again = f"The file:\n```python\n{text}\n```\nThe same file again:\n```python\n{text[:200]}"
    ids = llm.get_tokenizer().encode(again)[-(sizes.longest - sizes.answer - 8) :]
    return _decode(llm, [ids], sizes.answer)


def _looking(llm: LLM, sizes: WorkloadSizes, turn: int) -> OnOffRun:
    return _run(llm, images(sizes.num_images, sizes.image_edge, turn), 1)


# ---- the parts


def _weights(bench: Bench) -> OnOffPart:
    """A GGUF file is kept as it is packed, or not; other weights are narrowed, or not."""
    if bench.is_gguf:
        change: dict[str, Settings] = {"off": {"quantization": "none"}, "on": {}}
        name = "packed weights (GGUF)"
    else:
        change, name = {"off": {}, "on": {"quantization": "fp8"}}, "fp8 weights"
    text = f"one stream, {bench.sizes.answer} tokens"
    return OnOffPart(name, "+50 %", change["off"], change["on"], text, _one_stream)


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
        f"two ranks, {bench.sizes.num_images} images of {bench.sizes.image_edge} pixels; images a second",
        _looking,
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
    # a prompt that is not cut needs room beside the streams, or waits until they are done
    off = {"enable_chunked_prefill": False, "max_num_batched_tokens": sizes.longest + sizes.streams}
    text = (
        f"{sizes.streams} streams while {sizes.long_prompts} prompts of {sizes.longest - 16} tokens come;"
        f" chunks of {sizes.longest // 4}"
    )
    return OnOffPart("chunked prefill", "+30 %", off, {}, text, _beside_long_prompts)


_NGRAM = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 3}
PARTS: dict[str, Callable[[Bench], OnOffPart]] = {
    "prefix": _plain_part(
        "prefix caching",
        "+400 %",
        {"enable_prefix_caching": False},
        {},
        "{sharing} requests that share {prefix} tokens, 16 of their own, 8 out",
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
        "{streams} streams with {context} tokens behind them",
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


# ---- what is shown


def table(rows: Sequence[Row]) -> list[str]:
    """Markdown."""
    lines = [
        "| optimization | workload | first token, ms: off / on | out a second: off / on | gain | guide |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for row in rows:
        part = row.part
        if row.off is None or row.on is None:
            lines.append(f"| {part.name} | {part.workload} | - | - | {row.why_not} | {part.claim} |")
            continue
        workload = part.workload
        if row.off.gap_s:
            workload += f"; longest wait {1000 * row.off.gap_s:,.0f} / {1000 * row.on.gap_s:,.0f} ms"
        first = f"{1000 * row.off.ttft_s:,.1f} / {1000 * row.on.ttft_s:,.1f}"
        rates = f"{row.off.rate:,.1f} / {row.on.rate:,.1f}"
        gain = f"{100 * (row.ratio - 1):+.0f} %"
        lines.append(f"| {' | '.join([part.name, workload, first, rates, gain, part.claim])} |")
    return lines


def picture(rows: Sequence[Row], title: str) -> str:
    """Rates, each against its own without."""
    groups = [
        BarGroup(
            row.part.name.partition(" (")[0],
            {"off": 1.0, "on": row.ratio},
            {"off": f"{row.off.rate:,.0f} a second", "on": f"{row.on.rate:,.0f}, {row.ratio:.2f} x"},
        )
        for row in rows
        if row.off is not None and row.on is not None
    ]
    return svg(title, groups, mark=1.0)


def _figures(row: Row) -> dict[str, Any]:
    seen = {"off": row.off, "on": row.on}
    figures = {name: found._asdict() for name, found in seen.items() if found is not None}
    return {"part": row.part.name, "workload": row.part.workload, **figures, "why_not": row.why_not}

"""Helpers of the benchmarks: times of GPU kernels and of engines, and tables of results."""

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from quire import LLM, SamplingParams

T = TypeVar("T")
COPY_BYTES_S = 4.28e12
"""Copy bandwidth of an H200 in bytes per second, the floor of kernels that read memory."""
COLD_BYTES = 256 << 20
"""Bytes to read between two uses of a tensor that should not be in the GPU's cache."""


# ---- GPU kernels


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def event_s(run: Callable[[], object], repeats: int = 5) -> float:
    """Return the median seconds of a run on the GPU, by CUDA events; the first run does not count."""
    run()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[repeats // 2]


def graph_us(run: Callable[[], object], repeats: int = 9) -> float:
    """Return the median microseconds of one run, captured and replayed as a CUDA graph."""
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    graph.replay()
    return 1e6 * event_s(graph.replay, repeats)


def cold_seconds(run: Callable[[T], object], caches: Sequence[T]) -> float:
    """Return the seconds of one launch of `run`, from a CUDA graph with one launch for each of `caches`."""
    return graph_us(lambda: [run(cache) for cache in caches], repeats=5) / 1e6 / len(caches)


def print_best(rows: Iterable[dict[str, Any]]) -> None:
    """Print the six fastest rows of each model, number of sequences and number of keys."""
    for _, group in itertools.groupby(rows, key=lambda row: (row["model"], row["seqs"], row["keys"])):
        for row in sorted(group, key=lambda row: row["us"])[:6]:
            print(*(f"{name}={value}" for name, value in row.items()))


# ---- engines


def open_dummy(path: str, **settings: Any) -> LLM:
    """Open an engine with random weights, without a tokenizer and prefix caching, and print the time."""
    began = time.perf_counter()
    fixed = {"load_format": "dummy", "skip_tokenizer_init": True, "enable_prefix_caching": False}
    llm = LLM(path, **{"max_model_len": 4096, "disable_log_stats": True} | fixed | settings)
    print(f"started in {time.perf_counter() - began:.1f} s", flush=True)
    return llm


def generate_s(
    llm: LLM, prompts: Sequence[Any], length: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the seconds to generate `length` tokens for each prompt."""
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
    began = clock()
    llm.generate(prompts, params, use_tqdm=False)
    return clock() - began

"""Ranks as processes for tests: the same function in each, over Gloo."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from quire.config.parallel import Rank
from quire.config.sections import ParallelSection
from quire.parallel.world import World, join

TIMEOUT_S = 120.0


def run_ranks(folder: Path, what: Callable[..., Any], *args: Any, **sizes: Any) -> list[Any]:
    """Return the result of `what(world, *args)` in each rank of a world of these sizes
    (tensor_parallel_size, ...).
    """
    parallel = ParallelSection(device="cpu", cpu_threads=1, **sizes)
    count = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    if parallel.enable_expert_parallel:
        count *= parallel.data_parallel_size
    init_method, context = f"file://{folder}/init_method", multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(count)]
    ranks = [
        context.Process(target=_run, args=(parallel, index, init_method, expected, what, *args), daemon=True)
        for index, (_, expected) in enumerate(pipes)
    ]
    for rank, (_, expected) in zip(ranks, pipes, strict=True):
        rank.start()
        expected.close()
    try:
        output = [actual.recv() for actual, _ in pipes]
    finally:
        for rank in ranks:
            rank.join(TIMEOUT_S)
            rank.kill()
    return output


def _run(
    parallel: ParallelSection,
    index: int,
    init_method: str,
    answer: Connection,
    what: Callable[..., Any],
    *args: Any,
) -> None:
    torch.set_num_threads(1)
    world: World = join(parallel, Rank.of(index, parallel), init_method, torch.device("cpu"), TIMEOUT_S)
    answer.send(what(world, *args))

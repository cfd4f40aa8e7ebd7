"""Tests of all-reduces through symmetric memory: two processes on one GPU, which torch allows for tests."""

import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from quire.parallel.group import TorchGroup
from quire.parallel.symmetric_memory import SymmetricGroup, with_symmetric_memory

pytestmark = pytest.mark.gpu
SHAPES = ((1, 4096), (3, 136), (32, 4096), (128, 4096), (255, 4104))
"""One-shot and two-shot, aligned and ragged."""


def add(rank: int, size: int, meeting: str, answer: Connection) -> None:
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    group = with_symmetric_memory(TorchGroup(dist.group.WORLD), torch.device("cuda", 0))
    assert isinstance(group, SymmetricGroup)
    generator, wrong = torch.Generator().manual_seed(0), []
    for dtype in (torch.bfloat16, torch.float32):
        for shape in SHAPES:
            parts = [torch.randn(shape, generator=generator).to(dtype) for _ in range(size)]
            plain = group.all_reduce(parts[rank].cuda()).cpu()
            x, graph = parts[rank].cuda(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = group.all_reduce(x)
            for _ in range(3):
                x.copy_(parts[rank])
                graph.replay()
                torch.cuda.synchronize()
                if not torch.equal(out.cpu(), sum(parts[1:], parts[0])) or not torch.equal(out.cpu(), plain):
                    wrong.append((dtype, shape))
    answer.send(wrong)
    dist.barrier()
    os._exit(0)  # the other process may have unmapped the memory by now


def test_sums_are_correct_with_and_without_graphs(tmp_path: Path) -> None:
    context, size = multiprocessing.get_context("spawn"), 2
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    ranks = [
        context.Process(target=add, args=(rank, size, f"file://{tmp_path}/meeting", expected), daemon=True)
        for rank, (_, expected) in enumerate(pipes)
    ]
    for rank, (_, expected) in zip(ranks, pipes, strict=True):
        rank.start()
        expected.close()
    assert [actual.recv() for actual, _ in pipes] == [[], []]
    for rank in ranks:
        rank.join(30)

"""Time the host's part of a decode step, with a graph that computes nothing.

    python benchmarks/host_step.py

`plan` and `update` are the scheduler's part, `submit` and `wait` the worker's. Calls of the GPU driver are
not included.
"""

import gc
import time
from collections import deque
from typing import Any

import numpy as np
import test_helpers  # noqa: F401, I001
import torch
from test_graphs import stand_in
from torch import Tensor

from quire.bench.sched import add_requests, make_scheduler
from quire.data.step_plan import Pending, StepPlan
from quire.sampling.rows import SamplingRows
from quire.sampling.sampler import Sampler
from quire.worker.cuda.device import CudaDevice
from quire.worker.device import DeviceStep, ForwardResult, Model
from quire.worker.features import PromptLogprobs
from quire.worker.rows import Rows
from quire.worker.runner import Runner

CPU, VOCAB = torch.device("cpu"), 50


class Blank(CudaDevice):
    """CUDA device whose model computes nothing, neither for prompts nor for decodes."""

    def _eager(self, plan: StepPlan, *inputs: Any) -> DeviceStep:  # type: ignore[override]
        rows = torch.from_numpy(plan.sampling_rows).long()
        logits, token_ids = torch.zeros(len(rows), VOCAB), torch.zeros_like(rows)
        return DeviceStep(lambda: ForwardResult(torch.zeros(0), logits, token_ids, rows=rows))


class Attention:
    capturable = True


def head(states: Tensor) -> Tensor:
    return states


def make(num_seqs: int) -> Runner:
    sampling = SamplingRows(num_seqs, VOCAB, CPU)
    all_rows = Rows(max_rows=num_seqs, max_len=4096, block_size=16, sampling=sampling)
    model = Model(head, head, Attention())  # type: ignore[arg-type]
    device = Blank(model, all_rows, lambda logits, *asked: logits, CPU)
    device.graphs._by_size = {(num_seqs, False): stand_in(num_seqs, device.block_tables)}
    device.graphs._sizes = [num_seqs]
    sampler = Sampler(VOCAB, CPU, "raw_logprobs", device.sample)
    parts = [PromptLogprobs(head, all_rows, "raw_logprobs")]
    return Runner(device=device, all_rows=all_rows, sampler=sampler, parts=parts)


def main(num_seqs: int = 256, num_steps: int = 900) -> None:
    torch.set_num_threads(1)
    runner, scheduler = make(num_seqs), make_scheduler(num_seqs, prefix_caching=False, max_len=4096)
    add_requests(scheduler, [(512, 2 * num_steps)] * num_seqs)
    in_flight: deque[tuple[StepPlan, Pending, list[float]]] = deque()
    found = []
    gc.disable()
    for _ in range(num_steps):
        times = [time.perf_counter()]
        plan = scheduler.plan()
        assert plan is not None
        times.append(time.perf_counter())
        in_flight.append((plan, runner.submit(plan), times))
        times.append(time.perf_counter())
        if len(in_flight) == 2:
            plan, pending, times = in_flight.popleft()
            began = time.perf_counter()
            result = pending.wait()
            landed = time.perf_counter()
            scheduler.update(plan, result)
            if plan.is_decode and len(plan.rows) == num_seqs:
                found.append([*np.diff(times), landed - began, time.perf_counter() - landed])
    plan_us, submit_us, wait_us, update_us = 1e6 * np.mean(found[len(found) // 3 :], axis=0)
    total = plan_us + submit_us + wait_us + update_us
    print(
        f"{num_seqs} sequences: plan {plan_us:.0f}, submit {submit_us:.0f}, wait {wait_us:.0f},"
        f" update {update_us:.0f}, all {total:.0f} us"
    )


if __name__ == "__main__":
    main()

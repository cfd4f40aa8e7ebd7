"""Pipeline stages and tensor-parallel ranks as threads for tests: a worker in each, fed with every plan."""

import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from threads import groups

from quire.config.engine import EngineConfig
from quire.config.parallel import Rank
from quire.configure import configure
from quire.core.build import build_scheduler
from quire.core.engine_core import EngineCore
from quire.data.multimodal import Media
from quire.data.params import SamplingParams
from quire.data.request import Request
from quire.data.step_plan import RowLogprobs, StepOutput, StepPlan, StepResult
from quire.memory import CacheSize
from quire.parallel.world import World
from quire.worker.worker import Worker

TIMEOUT_S = 120.0


class Outcome:
    """The outcome of one step: the result of the last stage, or an error of any stage."""

    def __init__(self, num_stages: int, errors: list[dict[int, Any]], num_shares: int = 1) -> None:
        self.errors = errors
        self.num_shares = num_shares
        self.said: SimpleQueue[tuple[int, StepResult | Exception]] = SimpleQueue()
        self.num_stages = num_stages

    def ready(self, timeout_s: float) -> bool:
        return self.said.qsize() == self.num_stages

    def wait(self) -> StepResult:
        by_stage = dict(self.said.get(timeout=TIMEOUT_S) for _ in range(self.num_stages))
        for output in by_stage.values():
            if isinstance(output, Exception):
                self.errors.append(by_stage)
                raise output
        result = by_stage[self.num_stages - self.num_shares]
        assert isinstance(result, StepResult)
        return result


class StagedExecutor:
    """Runs a worker in a thread for each stage and rank, or all in sequence in this thread."""

    def __init__(self, config: EngineConfig, in_threads: bool = True) -> None:
        self.in_threads = in_threads
        parallel = config.parallel
        self.num_shares = parallel.tensor_parallel_size
        pp = [groups(parallel.pipeline_parallel_size) for _ in range(self.num_shares)]
        tp = [groups(self.num_shares) for _ in pp[0]]
        self.workers = [
            Worker(config, World(Rank(pp=stage, tp=share), tp=group, pp=pp[share][stage]))
            for stage, item in enumerate(tp)
            for share, group in enumerate(item)
        ]
        self.errors: list[dict[int, Any]] = []
        """Plans of the failed steps, by stage."""
        self.plans: list[SimpleQueue[tuple[StepPlan, Outcome] | None]] = [SimpleQueue() for _ in self.workers]
        self.threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True)
            for number in range(len(self.workers))
        ]

    def start(self) -> CacheSize:
        for worker in self.workers:
            worker.load()
        size = min((worker.measure() for worker in self.workers), key=lambda size: size.num_blocks)
        for worker in self.workers:
            worker.allocate(size)
            worker.warm_up()
        for thread in self.threads if self.in_threads else ():
            thread.start()
        return size

    def submit(self, plan: StepPlan) -> Outcome:
        outcome = Outcome(len(self.workers), self.errors, self.num_shares)
        for number, plans in enumerate(self.plans):
            plans.put((plan, outcome))
            if not self.in_threads:
                self._run_one(number)
        return outcome

    def watch(self) -> None: ...

    def close(self) -> None:
        for plans in self.plans if self.in_threads else ():
            plans.put(None)
        for thread in self.threads if self.in_threads else ():
            thread.join(TIMEOUT_S)

    def _run(self, number: int) -> None:
        while self._run_one(number):
            pass

    def _run_one(self, number: int) -> bool:
        if (entry := self.plans[number].get()) is None:
            return False
        plan, outcome = entry
        try:
            outcome.said.put((number, self.workers[number].submit(plan).wait()))
        except Exception as error:
            outcome.said.put((number, error))
        return True


class Engine:
    """A core over stages, or over one worker, and its outputs."""

    def __init__(self, model: Path, *, in_threads: bool = True, **settings: Any) -> None:
        # Two threads would share their tapes.
        defaults = {"model": str(model), "dtype": "float32", "block_size": 4, "enforce_eager": True}
        defaults |= {"use_tqdm_on_load": False, "max_num_seqs": 8, "num_gpu_blocks_override": 200}
        self.config = configure(defaults | settings)
        self.executor = StagedExecutor(self.config, in_threads)
        size = self.executor.start()
        depth = self.config.parallel.pipeline_parallel_size
        self.core = EngineCore(self.executor, build_scheduler(self.config, size), depth=depth)
        self.steps: list[StepOutput] = []
        self.most_in_flight = 0
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[RowLogprobs]] = {}
        self.prompt_logprobs: dict[str, list[RowLogprobs]] = {}

    def add(self, id: str, prompt: list[int], count: int, media: Media | None = None, **fields: Any) -> None:
        params = SamplingParams(**({"temperature": 0.0, "max_tokens": count, "ignore_eos": True} | fields))
        limit = len(prompt) + count
        self.tokens[id], self.logprobs[id], self.prompt_logprobs[id] = [], [], []
        sizes = {"prompt_len": len(prompt), "limit": limit}
        self.core.add(Request(id=id, tokens=list(prompt), params=params, seed=7, media=media, **sizes))

    def step(self) -> None:
        step = self.core.step()
        if step is None:
            return
        self.most_in_flight = max(self.most_in_flight, 1 + len(self.core.step_queue))
        for id, token_id in zip(step.request_ids, step.token_ids, strict=True):
            self.tokens[id].append(token_id)
        for id, actual in step.logprobs.items():
            self.logprobs[id].extend(actual)
        for id, many in step.prompt_logprobs.items():
            self.prompt_logprobs[id] += many
        self.steps.append(step)

    def run(self) -> dict[str, list[int]]:
        while self.core.has_work:
            self.step()
        return self.tokens

    def close(self) -> None:
        self.executor.close()

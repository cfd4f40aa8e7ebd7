"""The executor of several ranks: starts the ranks together, sends them plans, and detects lost ranks."""

import contextlib
import hashlib
import itertools
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from queue import Empty
from typing import Any, NoReturn

import msgspec
from tqdm import tqdm

from quire.config.engine import EngineConfig
from quire.config.env import Env
from quire.config.expert_parallel import process_group_address, steps_together
from quire.data.codec import decode_outcome, encode_masks, encode_plan
from quire.data.kv_tiers import BlockLoad, BlockRead, LoadDone
from quire.data.lora import AdapterFacts, LoRARequest
from quire.data.step_plan import Masks, StepPlan, StepResult
from quire.errors import ConfigError, EngineDead, EngineError, QuireError, RequestError
from quire.executor.messages import (
    DONE,
    BackgroundWork,
    Failed,
    FromRank,
    Order,
    Phase,
    PhaseDone,
    PhaseProgress,
    RankEnded,
    Returned,
    WorkerCall,
    encode,
    encode_call,
)
from quire.executor.multi_node import MultiNodeRanks
from quire.executor.tcp import interface_to
from quire.executor.worker_group import LocalRanks, WorkerGroup
from quire.executor.worker_process import local_ranks
from quire.logs import get_logger
from quire.memory import CacheSize, smallest_cache
from quire.system.pickled_calls import are_pickles_allowed, call_method, pack_function, unpack_results
from quire.system.scratch import Scratch

log = get_logger(__name__)

SLICE_S = 0.25
"""Seconds between two checks for lost ranks during a wait for a step."""
CONSISTENT_S = 5.0
"""Seconds within which all ranks must report a failed step, after the first report."""
CAUSE_S = 1.0
"""Seconds to wait for a message of the rank that caused a failed start, after another rank has reported its
loss."""
WARM_UP_FAILURE_S = 60.0
"""Seconds for the other ranks to end a warm-up after one rank failed: they may wait in a collective."""
REPORT_S = 5.0
"""Seconds between two log lines about the progress of the start."""
_LOOK_S = 0.002
"""Seconds between two checks for the results of a call."""
_FOREVER_S = float("inf")
_CAUSE = 2


def _cause_score(message: Failed | RankEnded) -> int:
    """Return how likely a message is the cause of a failed start: 2 for an error of the rank itself, 1 for
    its end, 0 for the loss of another rank."""
    if isinstance(message, RankEnded):
        return 1
    return _CAUSE if message.is_cause else 0


class RankedExecutor:
    """Starts the ranks of a worker group, sends them plans and calls, and detects lost ranks."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        env = Env.read(os.environ)
        self._start_s = env.timeouts.engine_ready_timeout_s
        self._step_s = env.timeouts.execute_model_timeout_seconds
        self._failed: dict[int, dict[int, Failed]] = {}
        """Failures by step, then by rank."""
        self._failed_at = 0.0
        self._warm_at = 0.0
        """Last time at which no rank had failed in the current warm-up."""
        self._last_done = -1
        """Number of the last step with a returned result; -1 before the first."""
        self._returned: dict[int, dict[int, Returned]] = {}
        """Results by call, then by rank."""
        self._numbers = itertools.count()
        self._background: dict[int, tuple[Future[Any], Callable[[list[Any]], Any]]] = {}
        """Unfinished background work by number, with the function that combines the ranks' results."""
        self._lock = threading.Lock()
        """Held while messages of ranks are handled: several threads wait for calls and steps."""
        self._ordering = threading.Lock()
        """Held while an order is sent: blocks are read for other engines in a thread of their own."""
        self._dead: str | None = None
        self._end: Callable[[], object] = lambda: None

    def start_ranks(self) -> WorkerGroup:
        """Start the processes of all ranks, and return the group by which they are reached."""
        raise NotImplementedError

    # ---- start

    def start(self) -> CacheSize:
        deadline = time.monotonic() + self._start_s
        self.worker_group = self.start_ranks()
        self._end = weakref.finalize(self, self.worker_group.end)
        try:
            with Report(self.worker_group.names) as report:
                self._run_phase("load", report, deadline)
                measured = self._run_phase("measure", report, deadline)
                size = smallest_cache(rank.size for rank in measured if rank.size)
                self._run_phase("allocate", report, deadline, size)
                self._run_phase("warm_up", report, deadline)
                self._run_phase("run", report, deadline)
        except BaseException as error:
            self.worker_group.end_reason = str(error) or type(error).__name__
            self.close()
            raise
        return size

    def _run_phase(
        self, phase: Phase, report: "Report", deadline: float, size: CacheSize | None = None
    ) -> list[PhaseDone]:
        """Run a phase of the start on every rank, wait for all, and return their messages in the order of
        ranks. Raise ConfigError if a rank fails, EngineDead at the `deadline`."""
        self.worker_group.send_order(encode(Order(phase, size)))
        done: dict[int, PhaseDone] = {}
        while len(done) < len(self.worker_group.names):
            try:
                index, message = self.worker_group.messages.get(
                    timeout=min(SLICE_S, max(deadline - time.monotonic(), 0))
                )
            except Empty:
                report.tick()
                if time.monotonic() > deadline:
                    raise EngineDead(self._timeout_message(report, done)) from None
                continue
            match message:
                case PhaseProgress():
                    report.note(index, str(message))
                case PhaseDone():
                    report.note(index, DONE[phase])
                    done[index] = message
                case Failed() | RankEnded():
                    raise ConfigError(self._failure_message(index, message))
        return [done[index] for index in sorted(done)]

    def _timeout_message(self, report: "Report", done: dict[int, PhaseDone]) -> str:
        missing = [str(index) for index in range(len(self.worker_group.names)) if index not in done]
        return (
            f"the engine was not ready within {self._start_s:g} s (VLLM_ENGINE_READY_TIMEOUT_S): "
            f"waiting for rank {', '.join(missing)}; {report.text}"
        )

    def _failure_message(self, index: int, message: Failed | RankEnded) -> str:
        """Return why the start failed, by the rank that caused it: other ranks only report its loss."""
        messages, deadline = {index: message}, time.monotonic() + CAUSE_S
        while not any(_cause_score(message) == _CAUSE for message in messages.values()):
            try:
                other, later = self.worker_group.messages.get(timeout=max(deadline - time.monotonic(), 0))
            except Empty:
                break
            if isinstance(later, Failed | RankEnded):
                messages.setdefault(other, later)  # a rank that failed also ends
        index = max(messages, key=lambda index: _cause_score(messages[index]))
        message, name = messages[index], self.worker_group.names[index]
        if isinstance(message, RankEnded):
            return f"rank {index} ({name}) ended while it was starting: {message.reason}; see the log"
        return f"rank {index} ({name}) cannot start: {message.error}"

    # ---- steps

    def submit(self, plan: StepPlan) -> "RemoteStep":
        self._send(encode_plan(plan))
        return RemoteStep(self, plan.step, time.monotonic() + self._step_s)

    def sample_tokens(self, masks: Masks) -> None:
        self._send(encode_masks(masks))

    def _send(self, data: bytes) -> None:
        self.watch()
        try:
            self.worker_group.send(data, self._step_s)
        except TimeoutError as error:
            self._fail_engine(f"the ranks take no more plans: {error}")

    def outcome(self, step: int, timeout_s: float) -> StepResult | None:
        """Return the result of this step; None if it takes over `timeout_s` seconds. Raise an EngineError if
        it failed. Results of earlier steps are dropped."""
        until = time.monotonic() + timeout_s
        while (left := until - time.monotonic()) >= 0:
            data = self.worker_group.receive(min(left, SLICE_S))
            self.watch()
            if data is None:
                continue
            outcome = decode_outcome(data)
            if outcome.step == step:
                if outcome.result is None or step in self._failed:
                    self._fail(step, outcome.error)
                self._last_done = step
                return outcome.result
        return None

    def _fail(self, step: int, error: str) -> NoReturn:
        """Raise EngineError if all ranks of a stage failed the step in the same way, so that they still
        agree; raise EngineDead if only some of them did."""
        until = time.monotonic() + CONSISTENT_S
        while not self._is_consistent(step) and time.monotonic() < until:
            time.sleep(0.005)
            self.watch()
        failed = self._failed.get(step, {})
        if not self._is_consistent(step):
            self._fail_engine(f"step {step} failed on {self._names(failed)} only: {error}")
        del self._failed[step]
        raise EngineError(error or next(iter(failed.values())).error)

    def _is_consistent(self, step: int) -> bool:
        """Whether a step failed so that the ranks still agree: in each pipeline stage on all tensor-parallel
        ranks or on none."""
        size = self.config.parallel.tensor_parallel_size
        counts = Counter(index // size for index in self._failed.get(step, ()))
        return bool(counts) and set(counts.values()) == {size}

    def _names(self, indices: Iterable[int]) -> str:
        return ", ".join(self.worker_group.names[index] for index in sorted(indices))

    # ---- calls

    def call(
        self,
        method: str | bytes | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> list[Any]:
        if not isinstance(method, str | bytes):
            return unpack_results(self.call(pack_function(method, args, kwargs), timeout_s=timeout_s))
        name = method if isinstance(method, str) else "the function"
        number = next(self._numbers)
        until = time.monotonic() + (_FOREVER_S if timeout_s is None else timeout_s)
        try:
            packed = method if isinstance(method, bytes) else b""
            data = encode_call(WorkerCall(number, name, list(args), dict(kwargs or {}), packed))
        except (TypeError, ValueError, OverflowError) as error:
            if isinstance(method, str) and are_pickles_allowed():
                return self.call(call_method, (method, *args), kwargs, timeout_s)
            raise RequestError(f"{name}: its arguments cannot be sent: {error}", param="args") from None
        returned = self._returned[number] = {}
        try:
            self._send(data)
            while len(returned) < len(self.worker_group.names):
                if time.monotonic() > until:
                    raise RequestError(
                        f"{name} did not end within {timeout_s:g} s, and still runs", param="timeout"
                    )
                time.sleep(_LOOK_S)
                self.watch()
                if method == "warm_up":
                    self._check_warm_up(returned)
        finally:
            del self._returned[number]
        return [self._value(index, returned[index]) for index in sorted(returned)]

    def _check_warm_up(self, returned: dict[int, Returned]) -> None:
        """Fail the engine if the other ranks do not end a warm-up in time after one rank has failed."""
        failed = {index: result for index, result in returned.items() if result.error}
        if not failed:
            self._warm_at = time.monotonic()
        elif time.monotonic() - self._warm_at > WARM_UP_FAILURE_S:
            error = next(iter(failed.values())).error
            self._fail_engine(f"warm_up failed on {self._names(failed)}, and the others wait for it: {error}")

    def _value(self, index: int, returned: Returned) -> Any:
        if returned.is_request:
            raise RequestError(returned.error)
        if returned.error:
            raise EngineError(f"{self.worker_group.names[index]}: {returned.error}")
        return returned.value

    # ---- adapters and KV cache blocks

    def fetch(self, lora: LoRARequest) -> Future[AdapterFacts]:
        return self._start_background(combine_facts, "fetch", adapter=lora)

    def drop(self, name: str) -> None:
        with self._ordering:
            self.worker_group.send_order(encode(Order("drop", name=name)))

    def load(self, load: BlockLoad) -> Future[LoadDone]:
        return self._start_background(combine_loads, "load", load=load)

    def read(self, read: BlockRead) -> Future[Any]:
        return self._start_background(lambda values: values[read.rank], "read", read=read)

    def _start_background(
        self, combine: Callable[[list[Any]], Any], phase: BackgroundWork, **order: Any
    ) -> Future[Any]:
        number, future = next(self._numbers), Future[Any]()
        self._background[number], self._returned[number] = (future, combine), {}
        with self._ordering:
            self.worker_group.send_order(encode(Order(phase, number=number, **order)))
        return future

    def _finish_background(self, number: int) -> None:
        """Resolve background work after all ranks have answered."""
        (future, combine), returned = self._background.pop(number), self._returned.pop(number)
        try:
            future.set_result(combine([self._value(index, returned[index]) for index in sorted(returned)]))
        except RequestError as error:
            future.set_exception(RequestError(str(error), param="lora_request"))
        except QuireError as error:
            future.set_exception(error)

    # ---- health

    def watch(self) -> None:
        """Handle the messages of ranks that have arrived, without waiting. Raise EngineDead if a rank is
        gone, or if a step failed on some ranks and not on all."""
        if self._dead is not None:
            raise EngineDead(self._dead)
        with self._lock:
            with contextlib.suppress(Empty):
                while True:
                    self._handle(*self.worker_group.messages.get_nowait())
            if self._failed and time.monotonic() - self._failed_at > CONSISTENT_S:
                self._check_failed()

    def _check_failed(self) -> None:
        """Fail the engine if a step that is no longer waited for failed on some ranks only."""
        for step, failed in self._failed.items():
            if not self._is_consistent(step):
                error = next(iter(failed.values())).error
                self._fail_engine(f"step {step} failed on {self._names(failed)} only: {error}")
        self._failed.clear()

    def _handle(self, index: int, message: FromRank) -> None:
        name = self.worker_group.names[index]
        if isinstance(message, RankEnded):
            self._fail_engine(f"{name} is gone: {message.reason}")
        if isinstance(message, Returned) and (returned := self._returned.get(message.number)) is not None:
            returned[index] = message
            if message.number in self._background and len(returned) == len(self.worker_group.names):
                self._finish_background(message.number)
        if not isinstance(message, Failed):
            return
        if message.step is None or message.is_fatal or message.step <= self._last_done:
            self._fail_engine(f"{name} failed: {message.error}")
        self._failed.setdefault(message.step, {})[index] = message
        self._failed_at = time.monotonic()

    def fail_timed_out(self, step: int) -> NoReturn:
        limit = f"{self._step_s:g} s (VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS)"
        self._fail_engine(f"step {step} did not end within {limit}: a rank hangs")

    def _fail_engine(self, reason: str) -> NoReturn:
        self._dead = reason
        self.worker_group.end_reason = None
        raise EngineDead(reason)

    def close(self) -> None:
        self._end()


def combine_loads(values: list[Any]) -> LoadDone:
    """Combine the loads of all ranks: a block counts as loaded only if every rank has loaded it."""
    return LoadDone.merged([msgspec.convert(value, LoadDone) for value in values])


def combine_facts(values: list[Any]) -> AdapterFacts:
    """Combine the `AdapterFacts` of all ranks; if the digests differ, hash all of them into one."""
    facts = [msgspec.convert(value, AdapterFacts) for value in values]
    digests = [rank.digest for rank in facts]
    digest = digests[0] if len({*digests}) == 1 else hashlib.sha256(b"".join(digests)).digest()
    most = (max(getattr(rank, name) for rank in facts) for name in ("rank", "num_bytes", "num_extra_vocab"))
    return AdapterFacts(digest, *most)


class RemoteStep:
    """The pending result of a step that runs on the ranks. If the result is late, the engine fails."""

    def __init__(self, executor: RankedExecutor, step: int, deadline: float) -> None:
        self._executor = executor
        self._step = step
        self._deadline = deadline
        self._result: StepResult | None = None
        self._error: EngineError | None = None

    def ready(self, timeout_s: float) -> bool:
        if self._result is None and self._error is None:
            try:
                self._result = self._executor.outcome(self._step, timeout_s)
            except EngineDead:
                raise
            except EngineError as error:
                self._error = error
        is_done = self._result is not None or self._error is not None
        if not is_done and time.monotonic() > self._deadline:
            self._executor.fail_timed_out(self._step)
        return is_done

    def wait(self) -> StepResult:
        while not self.ready(SLICE_S):
            pass
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


class Report:
    """Shows the progress of the ranks during the start: in one line that is rewritten on a terminal, or in
    log lines at intervals."""

    def __init__(self, names: list[str]) -> None:
        self._progress = ["starting"] * len(names)
        self._last_text = ""
        self._next = time.monotonic() + REPORT_S
        self._bar = tqdm(bar_format="{desc}", disable=not sys.stderr.isatty(), leave=False)

    def __enter__(self) -> "Report":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    @property
    def text(self) -> str:
        return ", ".join(f"rank {index}: {what}" for index, what in enumerate(self._progress))

    def note(self, index: int, what: str) -> None:
        self._progress[index] = what
        self.tick()

    def tick(self) -> None:
        if not self._bar.disable:
            self._bar.set_description_str(self.text)
        elif time.monotonic() > self._next and self.text != self._last_text:
            self._next, self._last_text = time.monotonic() + REPORT_S, self.text
            log.info("%s", self.text)


class MultiprocessExecutor(RankedExecutor):
    """Runs each rank as a process, on this machine or on other nodes."""

    def start_ranks(self) -> WorkerGroup:
        if self.config.parallel.nnodes > 1:
            return MultiNodeRanks(self.config, self._start_s)
        return LocalWorkerGroup(self.config)


class LocalWorkerGroup(LocalRanks):
    """All ranks of an engine on this machine, with a file as rendezvous."""

    def __init__(self, config: EngineConfig) -> None:
        self._scratch = Scratch()
        init_method, head = f"file://{self._scratch.path}/init_method", "127.0.0.1"
        if steps_together(config.parallel):  # with the ranks of other engines
            init_method, head = process_group_address(config.parallel), config.parallel.data_parallel_address
        super().__init__(local_ranks(config, 0, init_method, interface_to(head)))

    def end(self) -> None:
        super().end()
        self._scratch.remove()

"""The executor over ranks: brings them up together, hands them plans, and knows when one is gone."""

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
from quire.data.lora import AdapterFacts, LoRARequest
from quire.data.plan import Masks, StepPlan, StepResult
from quire.errors import ConfigError, EngineDead, EngineError, QuireError, RequestError
from quire.executor.messages import (
    DONE,
    Did,
    Doing,
    Failed,
    Gone,
    Order,
    Phase,
    Returned,
    Word,
    WorkerCall,
    encode,
    encode_call,
)
from quire.executor.multi_node import NodesCrew
from quire.executor.tcp import interface_to
from quire.executor.worker_group import LocalCrew, WorkerGroup
from quire.executor.worker_process import own_places
from quire.logs import get_logger
from quire.memory import CacheSize
from quire.system.scratch import Scratch

log = get_logger(__name__)

SLICE_S = 0.25
"""How often a wait for a step looks whether all ranks are there."""
ALIKE_S = 5.0
"""For all ranks to say that a step failed, when one has."""
CAUSE_S = 1.0
"""For the rank whose error is the cause, when another was cut off by its end."""
TOGETHER_S = 60.0
"""For the other ranks to end a warm-up, when one has failed in it: they may wait for it in a collective."""
REPORT_S = 5.0
_LOOK_S = 0.002
"""How often a call looks for what was returned."""
_FOREVER_S = float("inf")
_CAUSE = 2


def _blame(word: Failed | Gone) -> int:
    """Order what ranks said by how much it tells: a rank without an error of its own waited for another."""
    if isinstance(word, Gone):
        return 1
    return _CAUSE if word.is_cause else 0


class RankedExecutor:
    """Ranks that are reached through a crew."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        env = Env.read(os.environ)
        self._start_s, self._step_s = env.engine_ready_timeout_s, env.execute_model_timeout_seconds
        self._failed: dict[int, dict[int, Failed]] = {}
        """By step, then by rank."""
        self._failed_at = 0.0
        self._warm_at = 0.0
        """When no rank had failed in the warm-up that runs."""
        self._passed = -1
        """The last step that counts as done."""
        self._returned: dict[int, dict[int, Returned]] = {}
        """By call, then by rank."""
        self._numbers = itertools.count()
        self._fetching: dict[int, Future[AdapterFacts]] = {}
        """By number: of those that not all ranks have read."""
        self._hearing = threading.Lock()
        """Calls are waited for in another thread than steps are, and either hears what the ranks say."""
        self._dead: str | None = None
        self._end: Callable[[], object] = lambda: None

    def muster(self) -> WorkerGroup:
        """Start all ranks."""
        raise NotImplementedError

    # ---- start

    def start(self) -> CacheSize:
        deadline = time.monotonic() + self._start_s
        self.worker_group = self.muster()
        self._end = weakref.finalize(self, self.worker_group.end)
        try:
            with Report(self.worker_group.names) as report:
                self._all("load", report, deadline)
                measured = self._all("measure", report, deadline)
                size = min((did.size for did in measured if did.size), key=lambda size: size.num_blocks)
                self._all("allocate", report, deadline, size)
                self._all("warm_up", report, deadline)
                self._all("run", report, deadline)
        except BaseException as error:
            self.worker_group.farewell = str(error) or type(error).__name__
            self.close()
            raise
        return size

    def _all(
        self, phase: Phase, report: "Report", deadline: float, size: CacheSize | None = None
    ) -> list[Did]:
        """Have every rank do it; what they said when it was done."""
        self.worker_group.tell(encode(Order(phase, size)))
        done: dict[int, Did] = {}
        while len(done) < len(self.worker_group.names):
            try:
                index, word = self.worker_group.heard.get(
                    timeout=min(SLICE_S, max(deadline - time.monotonic(), 0))
                )
            except Empty:
                report.tick()
                if time.monotonic() > deadline:
                    raise EngineDead(self._late(report, done)) from None
                continue
            match word:
                case Doing():
                    report.note(index, str(word))
                case Did():
                    report.note(index, DONE[phase])
                    done[index] = word
                case Failed() | Gone():
                    raise ConfigError(self._cause(index, word))
        return [done[index] for index in sorted(done)]

    def _late(self, report: "Report", done: dict[int, Did]) -> str:
        missing = [str(index) for index in range(len(self.worker_group.names)) if index not in done]
        return (
            f"the engine was not ready within {self._start_s:g} s (VLLM_ENGINE_READY_TIMEOUT_S): "
            f"waiting for rank {', '.join(missing)}; {report.text}"
        )

    def _cause(self, index: int, word: Failed | Gone) -> str:
        """Return why the start failed, by the rank whose fault it is: others only say that it went away."""
        words, deadline = {index: word}, time.monotonic() + CAUSE_S
        while not any(_blame(each) == _CAUSE for each in words.values()):
            try:
                other, heard = self.worker_group.heard.get(timeout=max(deadline - time.monotonic(), 0))
            except Empty:
                break
            if isinstance(heard, Failed | Gone):
                words.setdefault(other, heard)  # a rank that failed also ends
        index = max(words, key=lambda each: _blame(words[each]))
        word, name = words[index], self.worker_group.names[index]
        if isinstance(word, Gone):
            return f"rank {index} ({name}) ended while it was starting: {word.why}; the log may say more"
        return f"rank {index} ({name}) cannot start: {word.error}"

    # ---- steps

    def submit(self, plan: StepPlan) -> "Remote":
        self._send(encode_plan(plan))
        return Remote(self, plan.step, time.monotonic() + self._step_s)

    def draw(self, masks: Masks) -> None:
        self._send(encode_masks(masks))

    def _send(self, data: bytes) -> None:
        self.watch()
        try:
            self.worker_group.send(data, self._step_s)
        except TimeoutError as error:
            self._die(f"the ranks take no more plans: {error}")

    def outcome(self, step: int, timeout_s: float) -> StepResult | None:
        """Of this step, if it comes in time. What the ranks say of those before it, nobody waits for."""
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
                self._passed = step
                return outcome.result
        return None

    def _fail(self, step: int, error: str) -> NoReturn:
        """Raise what a step failed with, once it is known whether the ranks stand where they did before."""
        until = time.monotonic() + ALIKE_S
        while not self._is_alike(step) and time.monotonic() < until:
            time.sleep(0.005)
            self.watch()
        failed = self._failed.get(step, {})
        if not self._is_alike(step):
            self._die(f"step {step} failed on {self._names(failed)} only: {error}")
        del self._failed[step]
        raise EngineError(error or next(iter(failed.values())).error)

    def _is_alike(self, step: int) -> bool:
        """Whether all ranks of a stage have failed or none: who did its part has nothing to undo."""
        size = self.config.parallel.tensor_parallel_size
        counts = Counter(index // size for index in self._failed.get(step, ()))
        return bool(counts) and set(counts.values()) == {size}

    def _names(self, indices: Iterable[int]) -> str:
        return ", ".join(self.worker_group.names[index] for index in sorted(indices))

    # ---- calls

    def call(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> list[Any]:
        if not isinstance(method, str):
            raise RequestError(
                "a function cannot be sent to workers in other processes: name a method of theirs", "method"
            )
        number = next(self._numbers)
        until = time.monotonic() + (_FOREVER_S if timeout_s is None else timeout_s)
        try:
            data = encode_call(WorkerCall(number, method, list(args), dict(kwargs or {})))
        except (TypeError, ValueError, OverflowError) as error:
            raise RequestError(f"{method}: its arguments cannot be sent: {error}", param="args") from None
        found = self._returned[number] = {}
        try:
            self._send(data)
            while len(found) < len(self.worker_group.names):
                if time.monotonic() > until:
                    raise RequestError(
                        f"{method} was not over within {timeout_s:g} s, and still runs", param="timeout"
                    )
                time.sleep(_LOOK_S)
                self.watch()
                if method == "warm_up":
                    self._check_together(found)
        finally:
            del self._returned[number]
        return [self._value(index, found[index]) for index in sorted(found)]

    def _check_together(self, returned: dict[int, Returned]) -> None:
        """Give up ranks that wait in a warm-up for one that has failed in it."""
        failed = {index: each for index, each in returned.items() if each.error}
        if not failed:
            self._warm_at = time.monotonic()
        elif time.monotonic() - self._warm_at > TOGETHER_S:
            error = next(iter(failed.values())).error
            self._die(f"warm_up failed on {self._names(failed)}, and the others wait for it: {error}")

    def _value(self, index: int, returned: Returned) -> Any:
        if returned.is_request:
            raise RequestError(returned.error)
        if returned.error:
            raise EngineError(f"{self.worker_group.names[index]}: {returned.error}")
        return returned.value

    # ---- adapters

    def fetch(self, lora: LoRARequest) -> Future[AdapterFacts]:
        number, future = next(self._numbers), Future[AdapterFacts]()
        self._fetching[number], self._returned[number] = future, {}
        self.worker_group.tell(encode(Order("fetch", number=number, adapter=lora)))
        return future

    def drop(self, name: str) -> None:
        self.worker_group.tell(encode(Order("drop", name=name)))

    def _read(self, number: int) -> None:
        """All ranks have answered."""
        future, found = self._fetching.pop(number), self._returned.pop(number)
        try:
            values = [self._value(index, found[index]) for index in sorted(found)]
            future.set_result(united([msgspec.convert(each, AdapterFacts) for each in values]))
        except RequestError as error:
            future.set_exception(RequestError(str(error), param="lora_request"))
        except QuireError as error:
            future.set_exception(error)

    # ---- who is there

    def watch(self) -> None:
        """Raise EngineDead if a rank is gone, or has failed alone."""
        if self._dead is not None:
            raise EngineDead(self._dead)
        with self._hearing:
            with contextlib.suppress(Empty):
                while True:
                    self._hear(*self.worker_group.heard.get_nowait())
            if self._failed and time.monotonic() - self._failed_at > ALIKE_S:
                self._check_failed()

    def _check_failed(self) -> None:
        """Steps that nobody waits for any more."""
        for step, failed in self._failed.items():
            if not self._is_alike(step):
                error = next(iter(failed.values())).error
                self._die(f"step {step} failed on {self._names(failed)} only: {error}")
        self._failed.clear()

    def _hear(self, index: int, word: Word) -> None:
        name = self.worker_group.names[index]
        if isinstance(word, Gone):
            self._die(f"{name} is gone: {word.why}")
        if isinstance(word, Returned) and (found := self._returned.get(word.number)) is not None:
            found[index] = word
            if word.number in self._fetching and len(found) == len(self.worker_group.names):
                self._read(word.number)
        if not isinstance(word, Failed):
            return
        if word.step is None or word.is_fatal or word.step <= self._passed:
            self._die(f"{name} failed: {word.error}")
        self._failed.setdefault(word.step, {})[index] = word
        self._failed_at = time.monotonic()

    def give_up(self, step: int) -> NoReturn:
        limit = f"{self._step_s:g} s (VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS)"
        self._die(f"step {step} did not end within {limit}: a rank hangs")

    def _die(self, why: str) -> NoReturn:
        self._dead = why
        self.worker_group.farewell = None
        raise EngineDead(why)

    def close(self) -> None:
        self._end()


def united(facts: list[AdapterFacts]) -> AdapterFacts:
    """An adapter as all ranks have it. Where they have read different contents, it is all of these."""
    digests = [each.digest for each in facts]
    one = digests[0] if len({*digests}) == 1 else hashlib.sha256(b"".join(digests)).digest()
    most = (max(getattr(each, name) for each in facts) for name in ("rank", "num_bytes", "num_own"))
    return AdapterFacts(one, *most)


class Remote:
    """A step that the ranks have."""

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
            self._executor.give_up(self._step)
        return is_done

    def wait(self) -> StepResult:
        while not self.ready(SLICE_S):
            pass
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


class Report:
    """How far the ranks have come: one line that is rewritten on a terminal, or a line now and then."""

    def __init__(self, names: list[str]) -> None:
        self._doing = ["starting"] * len(names)
        self._said = ""
        self._next = time.monotonic() + REPORT_S
        self._bar = tqdm(bar_format="{desc}", disable=not sys.stderr.isatty(), leave=False)

    def __enter__(self) -> "Report":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    @property
    def text(self) -> str:
        return ", ".join(f"rank {index}: {what}" for index, what in enumerate(self._doing))

    def note(self, index: int, what: str) -> None:
        self._doing[index] = what
        self.tick()

    def tick(self) -> None:
        if not self._bar.disable:
            self._bar.set_description_str(self.text)
        elif time.monotonic() > self._next and self.text != self._said:
            self._next, self._said = time.monotonic() + REPORT_S, self.text
            log.info("%s", self.text)


class MultiprocessExecutor(RankedExecutor):
    """Each rank is a process, of this machine or of those that join it."""

    def muster(self) -> WorkerGroup:
        if self.config.parallel.nnodes > 1:
            return NodesCrew(self.config, self._start_s)
        return LocalWorkerGroup(self.config)


class LocalWorkerGroup(LocalCrew):
    """All ranks of an engine on this machine; they meet in a file."""

    def __init__(self, config: EngineConfig) -> None:
        self._scratch = Scratch()
        meeting, head = f"file://{self._scratch.path}/meeting", "127.0.0.1"
        if steps_together(config.parallel):  # with the ranks of other engines
            meeting, head = process_group_address(config.parallel), config.parallel.data_parallel_address
        super().__init__(own_places(config, 0, meeting, interface_to(head)))

    def end(self) -> None:
        super().end()
        self._scratch.remove()

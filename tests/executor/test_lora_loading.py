"""Tests of adapters that ranks load in the background."""

import queue
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from quire.data.lora import AdapterFacts, LoRARequest
from quire.errors import EngineDead, EngineError, RequestError
from quire.executor import lora_loading as lora_reading
from quire.executor.lora_loading import AT_ONCE, MAX_HUNG, AdapterReading
from quire.executor.messages import Order, Returned, decode_from_rank, decode_order, encode
from quire.executor.multiprocess import RankedExecutor
from quire.executor.worker_process import _run_background
from quire.sched.lora import READ_S

PATIENCE_S = 60.0
ONE = LoRARequest("one", 1, "/one")


class FakePort:
    """A rank's port whose orders come from the test."""

    def __init__(self) -> None:
        self.orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self.said: queue.SimpleQueue[Returned] = queue.SimpleQueue()

    def order(self) -> Order:
        return self.orders.get()

    def report(self, word: Any) -> None:
        self.said.put(decode_from_rank(encode(word)))  # type: ignore[arg-type]


class FakeRanks:
    """Two ranks, each with its own loader."""

    names = ("first", "second")

    def __init__(self, *workers: Any) -> None:
        self.messages: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self.ports = [FakePort() for _ in workers]
        for worker, port in zip(workers, self.ports, strict=True):
            worker.device = SimpleNamespace(type="cpu")
            threading.Thread(target=_run_background, args=(worker, port), daemon=True).start()

    def send_order(self, order: bytes) -> None:
        for port in self.ports:
            port.orders.put(decode_order(order))

    def deliver(self, index: int) -> None:
        """Deliver the next message of a rank to the executor."""
        self.messages.put((index, self.ports[index].said.get(timeout=PATIENCE_S)))


class FakeWorker:
    """Loads any adapter unless it is named wrong."""

    def __init__(self, digest: bytes = b"d" * 32, error: Exception | None = None) -> None:
        self.digest, self.error = digest, error
        self.kept: list[str] = []
        self.dropped = threading.Event()

    def fetch_adapter(self, lora: LoRARequest) -> AdapterFacts:
        if self.error is not None:
            raise self.error
        self.kept.append(lora.lora_name)
        return AdapterFacts(self.digest, 8, 100)

    def drop_adapter(self, name: str) -> None:
        self.kept.remove(name)
        self.dropped.set()


def executor_of(*workers: FakeWorker) -> tuple[Any, FakeRanks]:
    executor: Any = RankedExecutor(None)  # type: ignore[arg-type]
    executor.worker_group = worker_group = FakeRanks(*workers)
    return executor, worker_group


def test_adapter_is_loaded_when_every_rank_has_it() -> None:
    workers = FakeWorker(), FakeWorker()
    executor, worker_group = executor_of(*workers)
    future = executor.fetch(ONE)
    worker_group.deliver(1)
    executor.watch()
    assert not future.done()
    worker_group.deliver(0)
    executor.watch()
    assert future.result(0).digest == b"d" * 32
    executor.drop("one")
    for worker in workers:  # each name has its own thread
        assert worker.dropped.wait(PATIENCE_S)
    second = executor.fetch(LoRARequest("two", 2, "/two"))
    for index in (0, 1):
        worker_group.deliver(index)
    executor.watch()
    assert second.result(0) and [worker.kept for worker in workers] == [["two"], ["two"]]


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (RequestError("No adapter found for /one"), RequestError, "^No adapter found for /one$"),
        (MemoryError("none left"), EngineError, "second: MemoryError: none left"),
    ],
)
def test_load_error_of_one_rank_fails_the_adapter(
    error: Exception, kind: type[Exception], words: str
) -> None:
    executor, worker_group = executor_of(FakeWorker(), FakeWorker(error=error))
    future = executor.fetch(ONE)
    for index in (0, 1):
        worker_group.deliver(index)
    executor.watch()
    with pytest.raises(kind, match=words):
        future.result(0)


def test_contents_that_differ_between_machines_get_a_new_digest() -> None:
    executor, worker_group = executor_of(FakeWorker(b"a" * 32), FakeWorker(b"b" * 32))
    future = executor.fetch(ONE)
    for index in (0, 1):
        worker_group.deliver(index)
    executor.watch()
    assert future.result(0).digest not in (b"a" * 32, b"b" * 32)


def test_slow_disk_delays_only_its_own_adapter() -> None:
    """Check adapters behind it; operations on one name stay in order."""
    answers = threading.Event()

    class Slow(FakeWorker):
        device = SimpleNamespace(type="cpu")

        def fetch_adapter(self, lora: LoRARequest) -> AdapterFacts:
            if lora.lora_path == "/slow":
                assert answers.wait(PATIENCE_S)
            return super().fetch_adapter(lora)

    worker = Slow()
    reading = AdapterReading(worker)
    stuck = reading.fetch(LoRARequest("slow", 1, "/slow"))
    reading.drop("slow")
    second = reading.fetch(LoRARequest("slow", 1, "/quick"))
    assert reading.fetch(ONE).result(PATIENCE_S) and not stuck.done() and not second.done()
    answers.set()
    assert second.result(PATIENCE_S) and worker.kept == ["one", "slow"]
    reading.close()


def test_hung_loads_free_their_threads_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lora_reading, "_LOOK_S", 0.01)
    answers, now = threading.Event(), [0.0]
    begun: queue.SimpleQueue[str] = queue.SimpleQueue()

    class Stuck(FakeWorker):
        device = SimpleNamespace(type="cpu")

        def fetch_adapter(self, lora: LoRARequest) -> AdapterFacts:
            begun.put(lora.lora_name)
            assert lora.lora_path != "/stuck" or answers.wait(PATIENCE_S)
            return super().fetch_adapter(lora)

    reading = AdapterReading(Stuck(), clock=lambda: now[0])
    stuck = []
    for turn in range(0, MAX_HUNG, AT_ONCE):
        names = [f"stuck{turn + number}" for number in range(AT_ONCE)]
        stuck += [reading.fetch(LoRARequest(name, 1, "/stuck")) for name in names]
        assert {begun.get(timeout=PATIENCE_S) for _ in names} == {*names}
        if turn + AT_ONCE < MAX_HUNG:
            other = reading.fetch(LoRARequest(f"quick{turn}", 1, "/quick"))
            with pytest.raises(TimeoutError):
                other.result(0.05)
            now[0] += READ_S
            assert other.result(PATIENCE_S) and begun.get(timeout=PATIENCE_S) == f"quick{turn}"
    assert f"{AT_ONCE} LoRA adapters are still being read after 600 s" in caplog.text
    now[0] += READ_S
    with pytest.raises(RequestError, match=f"{MAX_HUNG} adapters are being read from storage that does not"):
        reading.fetch(ONE).result(PATIENCE_S)
    answers.set()
    assert all(future.result(PATIENCE_S) for future in stuck)
    assert reading.fetch(ONE).result(PATIENCE_S)


def test_load_behind_a_hung_load_of_the_same_name_takes_no_thread() -> None:
    answers = threading.Event()

    class Stuck(FakeWorker):
        device = SimpleNamespace(type="cpu")

        def fetch_adapter(self, lora: LoRARequest) -> AdapterFacts:
            assert answers.wait(PATIENCE_S)
            return super().fetch_adapter(lora)

    reading = AdapterReading(Stuck())
    before = threading.active_count()
    futures = [reading.fetch(ONE) for _ in range(100)]
    assert threading.active_count() <= before + 1
    answers.set()
    assert all(future.result(PATIENCE_S) for future in futures)


def test_operation_queued_while_the_last_one_ends_is_run() -> None:
    """Check the race between the loader's last look at its queue and its end."""
    looked, message, forgotten, answers = (threading.Event() for _ in range(4))

    class Watched(dict[str, Any]):
        """Lets the test run between two operations."""

        def get(self, name: str, default: Any = None) -> Any:
            actual = super().get(name, default)
            if threading.current_thread() is not threading.main_thread() and not looked.is_set():
                looked.set()
                message.wait(0.3)
            return actual

        def __delitem__(self, name: str) -> None:
            super().__delitem__(name)
            forgotten.set()

    class Slow(FakeWorker):
        device = SimpleNamespace(type="cpu")

        def fetch_adapter(self, lora: LoRARequest) -> AdapterFacts:
            assert lora.lora_path != "/slow" or answers.wait(PATIENCE_S)
            return super().fetch_adapter(lora)

    reading = AdapterReading(Slow())
    reading._last = Watched()
    reading.fetch(ONE)
    assert looked.wait(PATIENCE_S)
    second = reading.fetch(LoRARequest("one", 1, "/slow"))
    message.set()
    assert forgotten.wait(PATIENCE_S)
    third = reading.fetch(ONE)
    with pytest.raises(TimeoutError):
        third.result(0.2)
    answers.set()
    assert second.result(PATIENCE_S) and third.result(PATIENCE_S)


def test_call_that_ranks_do_not_receive_is_fatal() -> None:
    executor, worker_group = executor_of(FakeWorker(), FakeWorker())

    def send(data: bytes, timeout_s: float) -> None:
        raise TimeoutError("not taken")

    worker_group.send = send  # type: ignore[attr-defined]
    with pytest.raises(EngineDead, match="the ranks take no more plans: not taken"):
        executor.call("check_health")
    with pytest.raises(EngineDead):
        executor.watch()

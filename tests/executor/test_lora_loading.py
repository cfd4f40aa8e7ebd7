"""Adapters that ranks read beside their steps: when one is there, and what is said of one that is not."""

import queue
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from quire.data.lora import AdapterFacts, LoRARequest
from quire.errors import EngineDead, EngineError, RequestError
from quire.executor import lora_loading as lora_reading
from quire.executor.lora_loading import AT_ONCE, MAX_HUNG, AdapterReading
from quire.executor.messages import Order, Returned, decode_order, decode_word, encode
from quire.executor.multiprocess import RankedExecutor
from quire.executor.worker_process import _read_adapters
from quire.sched.lora import READ_S

PATIENCE_S = 60.0
ONE = LoRARequest("one", 1, "/one")


class Port:
    """A rank's, whose orders come from the test."""

    def __init__(self) -> None:
        self.orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self.said: queue.SimpleQueue[Returned] = queue.SimpleQueue()

    def order(self) -> Order:
        return self.orders.get()

    def say(self, word: Any) -> None:
        self.said.put(decode_word(encode(word)))  # type: ignore[arg-type]


class Crew:
    """Two ranks, each with a reader of its own."""

    names = ("first", "second")

    def __init__(self, *workers: Any) -> None:
        self.heard: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self.ports = [Port() for _ in workers]
        for worker, port in zip(workers, self.ports, strict=True):
            worker.device = SimpleNamespace(type="cpu")
            threading.Thread(target=_read_adapters, args=(worker, port), daemon=True).start()

    def send_order(self, order: bytes) -> None:
        for port in self.ports:
            port.orders.put(decode_order(order))

    def hear(self, index: int) -> None:
        """The next word of a rank reaches the executor."""
        self.heard.put((index, self.ports[index].said.get(timeout=PATIENCE_S)))


class Worker:
    """Reads what it is told to, unless that is wrong."""

    def __init__(self, digest: bytes = b"d" * 32, error: Exception | None = None) -> None:
        self.digest, self.error = digest, error
        self.kept: list[str] = []

    def fetch_adapter(self, lora: LoRARequest) -> AdapterFacts:
        if self.error is not None:
            raise self.error
        self.kept.append(lora.lora_name)
        return AdapterFacts(self.digest, 8, 100)

    def drop_adapter(self, name: str) -> None:
        self.kept.remove(name)


def executor_of(*workers: Worker) -> tuple[Any, Crew]:
    executor: Any = RankedExecutor(None)  # type: ignore[arg-type]
    executor.worker_group = worker_group = Crew(*workers)
    return executor, worker_group


def test_an_adapter_is_there_when_every_rank_has_it() -> None:
    workers = Worker(), Worker()
    executor, worker_group = executor_of(*workers)
    future = executor.fetch(ONE)
    worker_group.hear(1)
    executor.watch()
    assert not future.done()
    worker_group.hear(0)
    executor.watch()
    assert future.result(0).digest == b"d" * 32
    executor.drop("one")
    again = executor.fetch(LoRARequest("two", 2, "/two"))
    for index in (0, 1):
        worker_group.hear(index)
    executor.watch()
    assert again.result(0) and [worker.kept for worker in workers] == [["two"], ["two"]]


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (RequestError("No adapter found for /one"), RequestError, "^No adapter found for /one$"),
        (MemoryError("none left"), EngineError, "second: MemoryError: none left"),
    ],
)
def test_one_rank_that_cannot_read_it_is_enough(error: Exception, kind: type[Exception], words: str) -> None:
    executor, worker_group = executor_of(Worker(), Worker(error=error))
    future = executor.fetch(ONE)
    for index in (0, 1):
        worker_group.hear(index)
    executor.watch()
    with pytest.raises(kind, match=words):
        future.result(0)


def test_contents_that_differ_between_machines_are_the_prefix_of_neither() -> None:
    executor, worker_group = executor_of(Worker(b"a" * 32), Worker(b"b" * 32))
    future = executor.fetch(ONE)
    for index in (0, 1):
        worker_group.hear(index)
    executor.watch()
    assert future.result(0).digest not in (b"a" * 32, b"b" * 32)


def test_a_disk_that_does_not_answer_holds_up_its_own_adapter_alone() -> None:
    """Others that wait behind it; what is told of one name happens in order."""
    answers = threading.Event()

    class Slow(Worker):
        device = SimpleNamespace(type="cpu")

        def fetch_adapter(self, lora: LoRARequest) -> AdapterFacts:
            if lora.lora_path == "/slow":
                assert answers.wait(PATIENCE_S)
            return super().fetch_adapter(lora)

    worker = Slow()
    reading = AdapterReading(worker)
    stuck = reading.fetch(LoRARequest("slow", 1, "/slow"))
    reading.drop("slow")
    again = reading.fetch(LoRARequest("slow", 1, "/quick"))
    assert reading.fetch(ONE).result(PATIENCE_S) and not stuck.done() and not again.done()
    answers.set()
    assert again.result(PATIENCE_S) and worker.kept == ["one", "slow"]
    reading.close()


def test_reads_that_hang_give_their_places_to_others_until_too_many_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lora_reading, "_LOOK_S", 0.01)
    answers, now = threading.Event(), [0.0]
    begun: queue.SimpleQueue[str] = queue.SimpleQueue()

    class Stuck(Worker):
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
    assert f"{AT_ONCE} reads of adapters have not ended within 600 s" in caplog.text
    now[0] += READ_S
    with pytest.raises(RequestError, match=f"{MAX_HUNG} adapters are being read from storage that does not"):
        reading.fetch(ONE).result(PATIENCE_S)
    answers.set()
    assert all(future.result(PATIENCE_S) for future in stuck)
    assert reading.fetch(ONE).result(PATIENCE_S)


def test_what_waits_behind_a_hung_read_of_its_name_takes_no_thread() -> None:
    answers = threading.Event()

    class Stuck(Worker):
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


def test_what_is_told_while_the_one_before_ends_is_waited_for_too() -> None:
    """Between a reader's look at who was told last and its saying that nobody is, somebody may be told."""
    looked, told, forgotten, answers = (threading.Event() for _ in range(4))

    class Watched(dict[str, Any]):
        """Lets the test in between."""

        def get(self, name: str, default: Any = None) -> Any:
            found = super().get(name, default)
            if threading.current_thread() is not threading.main_thread() and not looked.is_set():
                looked.set()
                told.wait(0.3)
            return found

        def __delitem__(self, name: str) -> None:
            super().__delitem__(name)
            forgotten.set()

    class Slow(Worker):
        device = SimpleNamespace(type="cpu")

        def fetch_adapter(self, lora: LoRARequest) -> AdapterFacts:
            assert lora.lora_path != "/slow" or answers.wait(PATIENCE_S)
            return super().fetch_adapter(lora)

    reading = AdapterReading(Slow())
    reading._last = Watched()
    reading.fetch(ONE)
    assert looked.wait(PATIENCE_S)
    second = reading.fetch(LoRARequest("one", 1, "/slow"))
    told.set()
    assert forgotten.wait(PATIENCE_S)
    third = reading.fetch(ONE)
    with pytest.raises(TimeoutError):
        third.result(0.2)
    answers.set()
    assert second.result(PATIENCE_S) and third.result(PATIENCE_S)


def test_a_call_that_the_ranks_do_not_take_is_the_end() -> None:
    executor, worker_group = executor_of(Worker(), Worker())

    def send(data: bytes, timeout_s: float) -> None:
        raise TimeoutError("not taken")

    worker_group.send = send  # type: ignore[attr-defined]
    with pytest.raises(EngineDead, match="the ranks take no more plans: not taken"):
        executor.call("check_health")
    with pytest.raises(EngineDead):
        executor.watch()

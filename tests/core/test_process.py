"""Tests of the engine core process: messages of clients, steps, progress reports and slow clients."""

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from library import FakeLoader, digest, lora
from mirror import follow
from symbolic import Engine, continuation

from quire.core import process
from quire.core.clients import Clients
from quire.core.process import CoreServer
from quire.core.stats_log import StatsLog
from quire.data.multimodal import Media, MediaItem
from quire.data.params import SamplingParams
from quire.data.request import Request
from quire.data.step_plan import FinishReason, StepOutput, StepPlan
from quire.data.wire import (
    Abort,
    Add,
    ControlCall,
    FromCore,
    Heartbeat,
    Hello,
    Missing,
    Ready,
    StepDone,
    ToCore,
    decode_from_core,
    encode,
)
from quire.metrics.pages import MetricsLayout, MetricsPages
from quire.sched.lora import LoRAScheduler

TOKEN = "shared"


class Client:
    """A fake API process."""

    def __init__(self, address: str, *, rcvhwm: int = 0) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, rcvhwm)
        self.socket.connect(address)
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.beats: list[Heartbeat] = []
        self.missing: list[str] = []
        self.is_ready = False

    def send(self, message: ToCore) -> None:
        self.socket.send(encode(message))

    def read(self) -> None:
        """Read all messages that have arrived."""
        while self.socket.poll(0):
            self.take(decode_from_core(self.socket.recv()))

    def take(self, message: FromCore) -> None:
        match message:
            case StepDone(output):
                for id, token_id in zip(output.request_ids, output.token_ids, strict=True):
                    self.tokens.setdefault(id, []).append(token_id)
                self.reasons |= {id: finish.reason for id, finish in output.finished.items()}
            case Heartbeat():
                self.beats.append(message)
            case Missing():
                self.missing.append(message.request_id)
            case Ready():
                self.is_ready = True


class TickingClock:
    """A clock that advances by 0.1 ms with every read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-4
        return self.now


class Bench:
    """A core over the symbolic worker, stepped by hand, and its clients."""

    def __init__(self, folder: str, clock: Callable[[], float] = time.monotonic, **limits: Any) -> None:
        self.address = f"ipc://{folder}/core"
        self.engine = Engine(**limits)
        pages = MetricsPages(MetricsLayout(4096))
        ready = Ready(pid=1, max_model_len=4096, num_blocks=64, num_tokens=63 * 16)
        stats_log = StatsLog(3600, pages, quiet=True)
        self.server = CoreServer(
            self.engine.core, self.address, ready, pages, stats_log, token=TOKEN, clock=clock
        )
        self.clients: list[Client] = []

    def join(self, **options: Any) -> Client:
        client = Client(self.address, **options)
        self.clients.append(client)
        client.send(Hello(TOKEN))
        while not client.is_ready:
            self.turn_and_read(client)
        return client

    def turn_and_read(self, *clients: Client) -> None:
        self.server.turn()
        for client in clients:
            client.read()

    def turn_until(self, done: Callable[[], bool], *readers: Client, max_turns: int = 20_000) -> None:
        for _ in range(max_turns):
            if done():
                return
            self.turn_and_read(*readers)
        raise AssertionError(f"not within {max_turns} turns")

    def close(self) -> None:
        for client in self.clients:
            client.socket.close()
        self.server.clients.close()


@pytest.fixture
def make_bench() -> Iterator[Callable[..., Bench]]:
    """Yield a factory; socket paths must be short, so they are not below pytest's directory."""
    made: list[Bench] = []
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:

        def make(**limits: Any) -> Bench:
            (Path(folder) / str(len(made))).mkdir()
            made.append(Bench(f"{folder}/{len(made)}", **limits))
            return made[-1]

        yield make
        for bench in made:
            bench.close()


def make_request(id: str, prompt: list[int], count: int) -> Request:
    return Request(
        id=id,
        tokens=list(prompt),
        params=SamplingParams(max_tokens=count),
        prompt_len=len(prompt),
        limit=len(prompt) + count,
        seed=0,
    )


def prompt(number: int) -> list[int]:
    return [(number + 7 * i) % 97 for i in range(5)]


def test_requests_are_routed_and_tokens_return_to_their_clients(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    one, two = bench.join(), bench.join()
    one.send(Add([make_request("a", prompt(1), 6)]))
    two.send(Add([make_request("b", prompt(2), 9), make_request("c", prompt(3), 4)]))
    bench.turn_until(lambda: len(one.reasons) + len(two.reasons) == 3, one, two)
    assert one.tokens == {"a": continuation(prompt(1), 6)}
    assert two.tokens == {"b": continuation(prompt(2), 9), "c": continuation(prompt(3), 4)}
    assert not bench.server.clients.owner


def test_dropped_batches_of_events_are_counted_once(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    follow(bench.engine.kv).num_dropped = 3
    client = bench.join()
    client.send(Add([make_request("a", prompt(1), 6)]))
    bench.turn_until(lambda: bool(client.reasons), client)
    pages = bench.server.metrics
    assert pages.own[pages.layout.places["kv_event_batches_dropped"]] == 3


def test_invalid_message_is_skipped_and_the_next_one_is_read(make_bench: Callable[..., Bench]) -> None:
    """Check messages of strangers on a network port and of API processes of another version."""
    bench = make_bench()
    client = bench.join()
    for strange in ([b"GET / HTTP/1.1"], [b""], [b"", b"two parts"], [b"\x81\xa4type\xa5other"]):
        client.socket.send_multipart(strange)
    client.send(Add([make_request("a", prompt(1), 6)]))
    bench.turn_until(lambda: bool(client.reasons), client)
    assert client.tokens == {"a": continuation(prompt(1), 6)}


def test_client_must_send_hello_with_the_token_first(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    member, foreign = bench.join(), Client(bench.address)
    bench.clients.append(foreign)
    for message in (Hello(), Hello("guess"), Add([make_request("a", prompt(1), 6)]), Abort(["b"])):
        foreign.send(message)
    member.send(Add([make_request("b", prompt(2), 4)]))
    bench.turn_until(lambda: bool(member.reasons), member, foreign)
    assert member.tokens == {"b": continuation(prompt(2), 4)}
    assert not foreign.is_ready and not foreign.beats and not foreign.reasons


def test_request_with_missing_media_is_returned(make_bench: Callable[..., Bench]) -> None:
    """Check that the client is notified and sends it again, and that a reset is sent to all clients."""
    bench = make_bench()
    client = bench.join()
    request = make_request("a", prompt(1), 2)
    request.media = Media([MediaItem(modality="image", key=b"cat", offset=0, length=1)])
    client.send(Add([request]))
    bench.turn_until(lambda: bool(client.missing), client)
    assert client.missing == ["a"] and not bench.server.clients.owner and not bench.server.core.has_work
    client.send(ControlCall(1, "reset_mm_cache"))
    bench.turn_until(lambda: bool(client.beats) and client.beats[-1].num_resets == 1, client)


def test_unplannable_work_is_reported_without_spinning(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that heartbeats do not report progress while nothing moves, and that no CPU is burnt."""
    bench = make_bench()
    client = bench.join()
    plan, wait = bench.engine.scheduler.plan, bench.server.clients.wait
    acts: list[str] = []

    def refuse() -> StepPlan | None:
        acts.append("plan")
        return None

    def wait_and_note(timeout_s: float, *others: Any) -> None:
        assert timeout_s == process.RETRY_S
        acts.append("wait")
        wait(timeout_s, *others)

    client.send(Add([make_request("a", prompt(1), 6)]))
    monkeypatch.setattr(bench.engine.scheduler, "plan", refuse)
    bench.turn_until(lambda: "plan" in acts, client)
    acts.clear()
    client.beats.clear()
    monkeypatch.setattr(bench.server.clients, "wait", wait_and_note)
    bench.turn_until(lambda: len(client.beats) >= 4, client)
    stalls = [beat.stalled_s for beat in client.beats]
    assert stalls == sorted(stalls) and stalls[-1] >= 3 * process.BEAT_S
    assert acts[0::2] == ["wait"] * len(acts[0::2]) and acts[1::2] == ["plan"] * len(acts[1::2])

    monkeypatch.setattr(bench.server.clients, "wait", wait)
    monkeypatch.setattr(bench.engine.scheduler, "plan", plan)
    bench.turn_until(lambda: "a" in client.reasons, client)
    client.beats.clear()
    bench.turn_until(lambda: len(client.beats) >= 2, client)
    assert client.beats[-1].stalled_s == 0.0, "idle is not stalled"


def test_core_whose_requests_wait_for_an_adapter_is_not_stuck(
    make_bench: Callable[..., Bench],
) -> None:
    """Check that a server does not report itself dead while a disk is slow."""
    library = FakeLoader(at_once=False)
    bench = make_bench(adapters=LoRAScheduler(library, max_slots=1, max_read=1))
    bench.engine.worker.host = library.host
    client = bench.join()
    request = make_request("a", prompt(1), 6)
    request.lora = lora("x")
    client.send(Add([request]))
    bench.turn_until(lambda: bool(library.requested), client)
    client.beats.clear()
    bench.turn_until(lambda: len(client.beats) >= 4, client)
    assert client.beats[-1].stats.waiting_adapters == ["x"]

    def gets_on() -> bool:
        """Return whether heartbeats report progress; a stuck core reports a growing time."""
        return client.beats[-1].stalled_s < len(client.beats) * process.BEAT_S / 2

    bench.turn_until(gets_on, client, max_turns=500)
    library.complete_next()
    bench.turn_until(lambda: "a" in client.reasons, client)
    assert client.tokens["a"] == continuation(prompt(1), 6, digest("/adapters/x"))


def test_stuck_core_still_receives_shutdown(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench()
    client = bench.join()
    monkeypatch.setattr(bench.engine.scheduler, "plan", lambda: None)
    client.send(Add([make_request("a", prompt(1), 6)]))
    bench.turn_until(lambda: bench.engine.core.has_work, client)
    client.send(Abort(["a"]))
    bench.turn_until(lambda: not bench.engine.core.has_work, client)
    client.beats.clear()
    bench.turn_until(lambda: any(beat.stalled_s == 0.0 for beat in client.beats), client, max_turns=600)
    client.beats.clear()
    bench.turn_until(lambda: len(client.beats) >= 2, client, max_turns=600)
    assert all(beat.stalled_s == 0.0 for beat in client.beats)


def test_many_arriving_requests_do_not_delay_steps(make_bench: Callable[..., Bench]) -> None:
    """Check that the core does not read all arriving messages before it computes."""
    bench = make_bench(clock=TickingClock())
    client = bench.join()
    num = 5000
    client.send(Add([make_request("first", prompt(1), 50)]))
    bench.turn_until(lambda: "first" in client.tokens, client)
    for number in range(num):
        client.send(Add([make_request(str(number), prompt(number), 1)]))
        client.send(Abort([str(number)]))
    num_tokens = len(client.tokens["first"])
    bench.turn_until(lambda: len(client.tokens["first"]) > num_tokens + 5, client)
    outside = bench.server.clients._socket
    assert outside.poll(60_000), "some requests are not read yet"
    bench.turn_until(lambda: not (bench.engine.core.has_work or outside.poll(0)), client)
    assert client.tokens["first"] == continuation(prompt(1), 50)


def test_client_that_reads_nothing_is_dropped_and_notified_later(
    make_bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    """Check that the core neither grows behind a stopped API process, nor waits for it, nor leaves requests
    hanging.
    """
    most = 20_000
    bench = make_bench(num_blocks=8000, max_num_seqs=80, max_num_batched_tokens=512)
    server = bench.server
    server.clients.close()
    server.clients = clients = Clients(
        bench.address, server._abort, token=TOKEN, high_water=8, max_queued_bytes=most
    )
    deaf = bench.join(rcvhwm=1)
    (deaf_id,) = clients.known
    good = bench.join()
    deaf.send(Add([make_request(f"deaf-{number}", prompt(number), 1500) for number in range(40)]))
    good.send(Add([make_request("good", prompt(5), 1000)]))
    fullest = 0
    while "good" not in good.reasons:
        bench.turn_and_read(good)
        fullest = max([fullest, *(queue.num_bytes for queue in clients.queues.values())])
        while clients.queues.keys() - {deaf_id}:  # ZMQ's thread may be slow on a busy machine
            good.socket.poll(10)
            good.read()
            clients.flush()
    assert most / 2 < fullest <= most
    assert good.tokens == {"good": continuation(prompt(5), 1000)}
    assert not bench.engine.core.has_work, "outputs without a reader are not computed"
    assert "An API process does not read" in caplog.text
    bench.turn_until(lambda: len(deaf.reasons) == 40, deaf)
    assert set(deaf.reasons.values()) == {"error"}
    for number in range(40):
        output = deaf.tokens[f"deaf-{number}"]
        assert output == continuation(prompt(number), len(output)), "earlier outputs are in order"
    deaf.send(Add([make_request("again", prompt(9), 5)]))
    bench.turn_until(lambda: "again" in deaf.reasons, deaf)
    assert deaf.tokens["again"] == continuation(prompt(9), 5)
    assert not clients.queues and not clients.owner


def test_finish_lost_in_a_dropped_queue_is_reported_as_an_error(make_bench: Callable[..., Bench]) -> None:
    """Check a request that ended in the core while its last message was discarded."""
    bench = make_bench()
    client = bench.join(rcvhwm=1)
    given_up: list[list[str]] = []
    clients = bench.server.clients
    clients._max_queued_bytes, clients._give_up = 20_000, given_up.append
    (identity,) = clients.known
    num_ended = 0
    while not given_up:
        finished = {f"{num_ended}-{'x' * 1000}": FinishReason("stop")}
        clients.send(identity, StepDone(StepOutput([], [], finished=finished)))
        num_ended += 1
    assert given_up == [[]], "none of them was still there"
    for _ in range(6000):
        clients.flush()
        client.socket.poll(10)
        client.read()
        if len(client.reasons) == num_ended:
            break
    assert len(client.reasons) == num_ended
    assert set(client.reasons.values()) == {"stop", "error"}


def test_disconnected_client_aborts_its_requests(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(num_blocks=400)
    clients, given_up = bench.server.clients, list[str]()
    give_up = clients._give_up

    def note_and_give_up(request_ids: list[str]) -> None:
        given_up.extend(request_ids)
        give_up(request_ids)

    clients._give_up = note_and_give_up
    gone, good = bench.join(), bench.join()
    gone.send(Add([make_request("gone", prompt(1), 4000)]))
    good.send(Add([make_request("good", prompt(2), 400)]))
    bench.turn_until(lambda: "gone" in gone.tokens, gone, good)
    gone.socket.close()
    bench.turn_until(lambda: "good" in good.reasons and not bench.engine.core.has_work, good)
    assert given_up == ["gone"]
    assert good.tokens["good"] == continuation(prompt(2), 400)


def test_request_resent_over_a_new_connection_replaces_the_first(
    make_bench: Callable[..., Bench],
) -> None:
    """Check an API process that lost its connection and cannot tell whether its requests still run."""
    bench = make_bench()
    lost, back = bench.join(), bench.join()
    lost.send(Add([make_request("a", prompt(1), 200)]))
    bench.turn_until(lambda: "a" in lost.tokens, lost)
    second = make_request("a", prompt(1), 6)
    second.tokens, second.has_run = [*prompt(1), *lost.tokens["a"][:2]], True
    back.send(Add([second]))
    bench.turn_until(lambda: "a" in back.reasons, lost, back)
    assert second.tokens + back.tokens["a"] == prompt(1) + continuation(prompt(1), 6)
    assert back.reasons == {"a": "length"} and not lost.reasons
    assert not bench.engine.core.has_work and not bench.server.clients.owner


def test_request_of_a_core_with_a_longer_context_ends_at_this_limit(
    make_bench: Callable[..., Bench],
) -> None:
    """Check a restarted core whose cache allows only shorter sequences."""
    bench = make_bench(num_blocks=2000, max_num_batched_tokens=4096)
    client = bench.join()
    long, longer = make_request("a", [1] * 4094, 900), make_request("b", [1] * 4000, 900)
    longer.tokens = longer.tokens + [2] * 96
    client.send(Add([long, longer]))
    bench.turn_until(lambda: len(client.reasons) == 2, client)
    assert client.reasons == {"a": "length", "b": "length"}
    assert {id: len(tokens) for id, tokens in client.tokens.items()} == {"a": 2}
    assert not bench.engine.core.has_work and not bench.server.clients.owner


def test_duplicate_id_does_not_end_the_core(make_bench: Callable[..., Bench]) -> None:
    """Check that the later request replaces the earlier one of the same client or of another.

    It also replaces a sequence of the same prompt.
    """
    bench = make_bench()
    one, two = bench.join(), bench.join()
    one.send(Add([make_request("a", prompt(1), 900)]))
    bench.turn_until(lambda: "a" in bench.server.clients.owner)
    one.send(Add([make_request("a", prompt(2), 6)]))
    two.send(Add([make_request("b", prompt(3), 4)], siblings=[("b", 1)]))
    two.send(Add([make_request("c", prompt(3), 4)]))
    bench.turn_until(lambda: "a" in one.reasons and "c" in two.reasons, one, two)
    assert one.tokens["a"][-6:] == continuation(prompt(2), 6)
    assert two.tokens["c"] == continuation(prompt(3), 4)
    assert not bench.engine.core.has_work and not bench.server.clients.owner

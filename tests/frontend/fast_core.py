"""A core without a model in a separate process: it uses the wire protocol and generates tokens at full
speed.
"""

import os
import time
from collections.abc import Callable

import zmq

from quire.data.stats import StepStats
from quire.data.step_plan import FinishReason, FirstRun, StepOutput
from quire.data.wire import (
    Abort,
    Add,
    ControlCall,
    FromCore,
    Heartbeat,
    Hello,
    Missing,
    Ready,
    Reply,
    StepDone,
    ToCore,
    decode_to_core,
    encode,
)
from quire.frontend.engine import AsyncEngine
from quire.frontend.engine_facts import EngineFacts
from quire.frontend.fleet_link import Fleet
from quire.frontend.inputs import InputProcessor
from quire.metrics.engine import EngineMetrics
from quire.metrics.pages import MetricsLayout, MetricsPages
from quire.sched.mm_receiver_cache import ReceiverCache
from quire.system.shared_arena import ArenaReader
from quire.text.tokenizer import Tokenizer

BEAT_S = 0.05


class FastCore:
    """Gives every request its max_tokens, one equal token per step, once it has had `num_first` requests."""

    def __init__(self, address: str, *, token_id: int, max_model_len: int, num_first: int = 1) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, 1000)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending blocks when the queue is full
        self.socket.bind(address)
        self.token_id = token_id
        self.max_model_len = max_model_len
        self.borrower = ArenaReader()
        self.receiver_cache = ReceiverCache(1 << 20, self.borrower.take)
        self.clients: set[bytes] = set()
        self.owners: dict[str, bytes] = {}
        self.ends: dict[str, int] = {}
        """Last step of each sequence."""
        self.new: dict[str, FirstRun] = {}
        self.num_missing = num_first
        self.num_steps = 0
        self.usual: list[tuple[bytes, bytes]] | None = None
        """Messages of a step without arrivals and ends, encoded once."""
        self.next_beat = 0.0

    def send(self, client: bytes, message: FromCore) -> None:
        self.socket.send_multipart([client, encode(message)])

    def listen(self) -> None:
        if not self.owners or self.num_missing > 0:
            self.socket.poll(int(BEAT_S * 1000))
        while self.socket.poll(0):
            client, data = self.socket.recv_multipart()
            self.handle(client, decode_to_core(data))
        self.borrower.settle()

    def handle(self, client: bytes, message: ToCore) -> None:
        match message:
            case Hello():
                self.clients.add(client)
                self.send(client, Ready(os.getpid(), self.max_model_len, 1000, 999 * 16))
            case Add() if not self.receiver_cache.fill(message.requests[0].media):
                self.send(client, Missing(message.requests[0].id))
            case Add():
                now = time.monotonic()
                for request in message.all():
                    self.num_missing -= 1
                    self.owners[request.id] = client
                    self.ends[request.id] = self.num_steps + request.limit - len(request.tokens)
                    self.usual = None
                    if not request.has_run:
                        self.new[request.id] = FirstRun(0, now, now)
            case Abort(request_ids):
                for id in request_ids:
                    self.remove(id)
            case ControlCall(number, method):
                if method == "reset_mm_cache":
                    self.receiver_cache.clear()
                self.send(client, Reply(number, None))

    def remove(self, id: str) -> None:
        if self.owners.pop(id, None) is not None:
            del self.ends[id]
            self.new.pop(id, None)
            self.usual = None

    def step(self) -> None:
        if not self.owners or self.num_missing > 0:
            return
        self.num_steps += 1
        ended = self.num_steps >= min(self.ends.values())
        if self.usual is None or self.new or ended:
            self.usual = [(client, encode(StepDone(output))) for client, output in self.outputs().items()]
        for message in self.usual:
            self.socket.send_multipart(message)
        if self.new or ended:
            self.usual = None
            self.new.clear()
            for id in [id for id, end in self.ends.items() if self.num_steps >= end]:
                self.remove(id)

    def outputs(self) -> dict[bytes, StepOutput]:
        actual: dict[bytes, StepOutput] = {}
        for id, client in self.owners.items():
            output = actual.setdefault(client, StepOutput([], [], at=time.monotonic()))
            output.request_ids.append(id)
            output.token_ids.append(self.token_id)
            if id in self.new:
                output.admitted[id] = self.new[id]
            if self.num_steps >= self.ends[id]:
                output.finished[id] = FinishReason("length")
        return actual

    def beat(self) -> None:
        if time.monotonic() >= self.next_beat:
            self.next_beat = time.monotonic() + BEAT_S
            for client in self.clients:
                self.send(client, Heartbeat(StepStats(num_running=len(self.owners))))


def run_fast_core(address: str, token_id: int, max_model_len: int, num_first: int = 1) -> None:
    core = FastCore(address, token_id=token_id, max_model_len=max_model_len, num_first=num_first)
    while True:
        core.listen()
        core.step()
        core.beat()


def engine_over(
    *addresses: str,
    vocab: int,
    max_model_len: int,
    tokenizer: Tokenizer | None = None,
    health_timeout_s: float = 30.0,
    clock: Callable[[], float] = time.monotonic,
    resumes: bool = True,
    fleet: Fleet | None = None,
) -> AsyncEngine:
    """Open an API process's engine with cores at `addresses`, or with those of a fleet."""
    facts = EngineFacts(
        model_names=("m",),
        root="m",
        max_model_len=max_model_len,
        vocab=vocab,
        max_logprobs=20,
        max_num_seqs=256,
        block_size=16,
        default_sampling={},
        chat_template=None,
        version="0",
        start_time=time.time(),
    )
    inputs = InputProcessor(
        tokenizer=tokenizer, vocab=vocab, max_model_len=max_model_len, eos_ids=[2], max_logprobs=20, seed=0
    )
    pages = MetricsPages(MetricsLayout(max_model_len), num_engines=len(addresses))
    return AsyncEngine(
        facts=facts,
        inputs=inputs,
        metrics=EngineMetrics(pages, model_name="m", cache_info={}),
        addresses=dict(enumerate(addresses)),
        token="",
        health_timeout_s=health_timeout_s,
        clock=clock,
        resumes=resumes,
        fleet=fleet,
    )

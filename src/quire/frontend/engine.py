"""AsyncEngine: an API process's way to the core and back, one async iterator per request."""

import asyncio
import functools
import itertools
import os
import time
import uuid
from dataclasses import dataclass
from typing import Any

import zmq

from quire.data.outputs import RequestOutput
from quire.data.params import SamplingParams
from quire.data.plan import Finish, StepOutput
from quire.data.pooled_outputs import PoolingOutput, PoolingRequestOutput
from quire.data.pooling import PoolingParams
from quire.data.request import Request
from quire.data.wire import (
    Abort,
    Add,
    Beat,
    Call,
    Hello,
    Ready,
    Reply,
    Stepped,
    ToCore,
    decode_from_core,
    encode,
)
from quire.errors import EngineDead, EngineError
from quire.frontend.answer import Answer
from quire.frontend.inputs import InputProcessor, Prompt
from quire.frontend.live import LiveView
from quire.frontend.outputs import OutputProcessor
from quire.logs import get_logger
from quire.metrics import FINISH_REASONS, EngineMetrics
from quire.metrics.http import Exchange
from quire.text.tokenizer import Tokenizer

log = get_logger(__name__)

HELLO_INTERVAL_S = 0.1
CALL_TIMEOUT_S = 30.0
MAX_BEHIND = 1000
"""Messages that wait on this side; more wait in the core, which knows what to do about it."""
TURN_S = 0.004
"""How long the core's messages are read before what they brought is handed out."""
REST = 4
"""Rounds of the event loop that belong to everybody else between two turns: so many steps of his own a new
request makes while the core is faster than this process."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an API process knows of its engine before the core is up."""

    model_names: tuple[str, ...]
    """The first is the one that is reported."""
    root: str
    """The model as the user named it."""
    max_model_len: int
    vocab: int
    max_logprobs: int
    max_num_seqs: int
    block_size: int
    default_sampling: dict[str, Any]
    chat_template: str | None
    version: str
    start_time: float


class AsyncEngine:
    """The engine as an API process has it: requests in, answers out, and whether the core makes progress."""

    def __init__(
        self,
        *,
        facts: EngineFacts,
        inputs: InputProcessor,
        metrics: EngineMetrics,
        address: str,
        health_timeout_s: float,
        stream_interval: int = 1,
    ) -> None:
        self.facts = facts
        self.inputs = inputs
        self.metrics = metrics
        self._address = address
        self._health_timeout_s = health_timeout_s
        self._outputs = OutputProcessor(inputs.tokenizer, stream_interval=stream_interval)
        self._answers: dict[str, Answer[Any]] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._tag = uuid.uuid4().hex[:8]
        """Makes ids this process's own: users may give the same one twice, and to several processes."""
        self._core: Ready | None = None
        self._why_down = "the engine is starting"
        self._heard_at = time.monotonic()
        self._stalled_s = 0.0
        """How long the core had work and finished no step, when it was last heard of."""
        self._resting = False
        """Whether a turn is to come by itself."""
        self._ready = asyncio.Event()
        self._live = LiveView()
        self._socket: zmq.Socket[bytes]
        self._tasks: list[asyncio.Task[None]] = []

    # ---- life

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.inputs.tokenizer

    @property
    def num_in_flight(self) -> int:
        return len(self._answers)

    def start(self) -> None:
        """Connect, from inside the running loop."""
        self._connect()
        self._tasks = [asyncio.create_task(self._greet()), asyncio.create_task(self._watch())]

    async def ready(self) -> None:
        await self._ready.wait()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._disconnect()

    def check(self) -> None:
        """Raise unless the core is up and, if it has work, has finished a step within the health timeout."""
        if self._core is None:
            raise EngineDead(self._why_down)
        standstill = self._stalled_s + time.monotonic() - self._heard_at
        if standstill > self._health_timeout_s:
            raise EngineDead(
                f"the engine has made no progress for {standstill:.1f} s; "
                f"the limit is {self._health_timeout_s:g} s"
            )

    def _connect(self) -> None:
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        for option, value in ((zmq.LINGER, 0), (zmq.SNDHWM, 0), (zmq.RCVHWM, MAX_BEHIND)):
            self._socket.setsockopt(option, value)
        self._socket.connect(self._address)
        asyncio.get_running_loop().add_reader(self._socket.FD, self._arrived)

    def _disconnect(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket.FD)
        self._socket.close()

    async def _greet(self) -> None:
        """Say Hello until the core answers; again after it died."""
        while True:
            if self._core is None:
                self._send(Hello())
            await asyncio.sleep(HELLO_INTERVAL_S)

    async def _watch(self) -> None:
        """Notice within a moment that the core's process is gone."""
        while True:
            if self._core is not None and not _is_alive(self._core.pid):
                self._core_died()
            await asyncio.sleep(HELLO_INTERVAL_S)

    def _core_died(self) -> None:
        assert self._core is not None
        self._why_down = f"the engine process (pid {self._core.pid}) died and is being restarted"
        log.error("%s; %d requests are lost", self._why_down, len(self._answers))
        self._core = None
        self._ready.clear()
        lost = EngineDead("the engine process died while it worked on this request; please send it again")
        for answer in list(self._answers.values()):
            answer.fail(lost)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(lost)
        self._abandon()
        # What is still queued for the dead core must not reach the next one.
        self._disconnect()
        self._connect()

    def _abandon(self) -> None:
        """Count what was lost, and forget it: those who waited know already."""
        ids = self._outputs.sequences_of(list(self._answers))
        self._answers.clear()
        self._forget(ids, "error")

    def _forget(self, ids: list[str], reason: str) -> None:
        """Sequences that nobody waits for any more. Others may have outputs on their way, and keep them."""
        self._outputs.take(StepOutput([], [], finished={id: Finish(reason) for id in ids}))
        self._hand_out()

    # ---- requests

    def generate(
        self, prompt: Prompt, params: SamplingParams, request_id: str, *, priority: int = 0
    ) -> Answer[RequestOutput]:
        """The outputs of a request as they come. What is wrong with it is raised here, at once."""
        self.check()
        internal_id = f"{request_id}-{self._tag}{next(self._numbers):x}"
        requests = self.inputs.requests(internal_id, prompt, params, priority=priority)
        return Answer(internal_id, functools.partial(self._begin, prompt, requests), self._abort)

    def encode(
        self, prompt: Prompt, params: PoolingParams, request_id: str, *, priority: int = 0
    ) -> Answer[PoolingRequestOutput[PoolingOutput]]:
        """The one output of a request to a pooling model. What is wrong with it is raised here, at once."""
        self.check()
        internal_id = f"{request_id}-{self._tag}{next(self._numbers):x}"
        request = self.inputs.pooling_request(internal_id, prompt, params, priority=priority)
        return Answer(internal_id, functools.partial(self._begin, prompt, [request]), self._abort)

    def _begin(self, prompt: Prompt, requests: list[Request], answer: Answer[Any]) -> None:
        self.check()
        self._answers[answer.request_id] = answer
        put_text = answer.put_text if answer.takes_text else None
        self._outputs.add(answer.request_id, prompt, requests, put_text)
        self._send(Add.of(requests))

    def _abort(self, request_id: str) -> None:
        if self._answers.pop(request_id, None) is None:
            return
        ids = self._outputs.sequences_of([request_id])
        if ids and self._core is not None:
            self._send(Abort(ids))
        self._forget(ids, "abort")

    async def reset_prefix_cache(self) -> bool:
        return bool(await self._call("reset_prefix_cache"))

    async def _call(self, method: str) -> Any:
        self.check()
        number = next(self._numbers)
        self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(Call(number, method))
            return await asyncio.wait_for(self._calls[number], CALL_TIMEOUT_S)
        finally:
            del self._calls[number]

    # ---- the socket

    def _send(self, message: ToCore) -> None:
        self._socket.send(encode(message), zmq.NOBLOCK)
        # Sending may swallow the edge that says that something arrived.
        asyncio.get_running_loop().call_soon(self._arrived)

    def _arrived(self) -> None:
        """The socket's descriptor tells only once, however much is there."""
        if not self._resting:
            self._turn()

    def _turn(self) -> None:
        """Read for a moment, then hand out what came: a stream gets one piece however many steps that were.
        With more to read, others get theirs first."""
        self._resting = not self._receive()
        self._hand_out()
        if self._resting:
            self._rest(REST)

    def _rest(self, rounds: int) -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(self._rest, rounds - 1) if rounds else loop.call_soon(self._turn)

    def _receive(self) -> bool:
        """Messages of the core, for a bounded time; whether that was all."""
        deadline = time.monotonic() + TURN_S
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return True
            self._handle(decode_from_core(data))
            self._heard_at = time.monotonic()
            if self._heard_at > deadline:
                return False

    def _handle(self, message: Ready | Stepped | Beat | Reply) -> None:
        match message:
            case Stepped(output):
                self._stalled_s = 0.0
                self._outputs.take(output)
            case Beat():
                self._stalled_s = message.stalled_s
            case Reply(number, value):
                if (call := self._calls.get(number)) is not None and not call.done():
                    call.set_result(value)
            case Ready():
                self._core = message
                self.inputs.max_model_len = message.max_model_len
                self.metrics.cache_info |= {
                    "num_gpu_blocks": message.num_blocks,
                    "kv_cache_size_tokens": message.num_tokens,
                }
                self._ready.set()

    def _hand_out(self) -> None:
        """Everything that came since the last time, to those who wait for it."""
        processed = self._outputs.flush()
        if processed.stopped:
            self._send(Abort(processed.stopped))
        self.metrics.pages.observe_front(processed.stats)
        self._live.add(processed.stats.first_token_s, processed.stats.between_tokens_s)
        answers = self._answers
        for output in processed.outputs:
            if (answer := answers.get(output.request_id)) is None:
                continue
            if output.request_id in processed.failed:
                answer.fail(EngineError("the engine failed on this request; others are not affected"))
                continue
            if output.finished:
                del answers[output.request_id]
            answer.put(output)

    # ---- what is going on

    def metrics_text(self) -> str:
        return self.metrics.text()

    def count_exchange(self, exchange: Exchange) -> None:
        self.metrics.pages.observe_http(exchange)

    def snapshot(self) -> dict[str, Any]:
        """Live numbers. The block map is the one of the call before."""
        try:
            self.check()
            healthy = True
            asyncio.get_running_loop().create_task(self._live.fetch_map(self._call))
        except EngineDead:
            healthy = False
        facts, pages = self.facts, self.metrics.pages
        queries = pages.value("prefix_cache_queries")
        ended = sum(pages.value(f"request_success:{reason}") for reason in FINISH_REASONS)
        return {
            "model": facts.model_names[0],
            "version": facts.version,
            "uptime_s": time.time() - facts.start_time,
            "healthy": healthy,
            "running": int(pages.value("num_requests_running")),
            "waiting": int(pages.value("num_requests_waiting")),
            "max_num_seqs": facts.max_num_seqs,
            "kv_usage": pages.value("kv_cache_usage_perc"),
            "num_blocks": self._core.num_blocks - 1 if self._core else 0,
            "block_size": facts.block_size,
            "prefix_hit_rate": pages.value("prefix_cache_hits") / queries if queries else 0.0,
            "preemptions": int(pages.value("num_preemptions")),
            "requests_finished": int(ended),
            "max_model_len": self.inputs.max_model_len,
        } | self._live.view(pages.value("prompt_tokens"), pages.value("generation_tokens"))


def _is_alive(pid: int) -> bool:
    """A process that has ended but is not yet reaped counts as dead."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except FileNotFoundError:
        pass
    if os.path.isdir("/proc/self"):
        return False
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True

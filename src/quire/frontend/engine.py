"""AsyncEngine: an API process's way to the core and back, one async iterator per request."""

import asyncio
import itertools
import os
import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import zmq

from quire.data.outputs import CompletionOutput, RequestOutput
from quire.data.params import SamplingParams
from quire.data.plan import Finish, StepOutput
from quire.data.request import Request
from quire.data.stats import StepStats
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
from quire.frontend.inputs import InputProcessor, Prompt
from quire.frontend.live import LiveView
from quire.frontend.outputs import OutputProcessor
from quire.logs import get_logger
from quire.metrics import FINISH_REASONS, EngineMetrics
from quire.text.tokenizer import Tokenizer

log = get_logger(__name__)

HELLO_INTERVAL_S = 0.1
CALL_TIMEOUT_S = 30.0


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


class Mailbox:
    """Outputs of one request on their way to its reader. What piles up while the reader is away is merged."""

    __slots__ = ("_items", "_waiter")

    def __init__(self) -> None:
        self._items: list[RequestOutput | EngineError] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: RequestOutput | EngineError) -> None:
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> RequestOutput:
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        items, self._items = self._items, []
        if isinstance(items[-1], EngineError):
            raise items[-1]
        merged: RequestOutput = items[0]  # type: ignore[assignment]
        for later in items[1:]:
            merged = merge(merged, later)  # type: ignore[arg-type]
        return merged


def merge(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Two deltas of a request as one."""
    by_index = {completion.index: completion for completion in first.outputs}
    for new in second.outputs:
        old = by_index.get(new.index)
        by_index[new.index] = new if old is None else _append(old, new)
    second.outputs = [by_index[index] for index in sorted(by_index)]
    return second


def _append(old: CompletionOutput, new: CompletionOutput) -> CompletionOutput:
    new.text = old.text + new.text
    new.token_ids = [*old.token_ids, *new.token_ids]
    if old.logprobs is not None and new.logprobs is not None:
        old.logprobs.extend(new.logprobs)  # type: ignore[arg-type]
        new.logprobs = old.logprobs
    return new


class AsyncEngine:
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
        self._mailboxes: dict[str, Mailbox] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._core: Ready | None = None
        self._why_down = "the engine is starting"
        self._heard_at = time.monotonic()
        self._stats = StepStats()
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
        return len(self._mailboxes)

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
        """Raise unless the core is up and has been heard of within the health timeout."""
        if self._core is None:
            raise EngineDead(self._why_down)
        silence = time.monotonic() - self._heard_at
        if silence > self._health_timeout_s:
            raise EngineDead(
                f"the engine has made no progress for {silence:.1f} s; "
                f"the limit is {self._health_timeout_s:g} s"
            )

    def _connect(self) -> None:
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        for option in (zmq.LINGER, zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(option, 0)
        self._socket.connect(self._address)
        asyncio.get_running_loop().add_reader(self._socket.FD, self._receive)

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
        log.error("%s; %d requests are lost", self._why_down, len(self._mailboxes))
        self._core = None
        self._ready.clear()
        lost = EngineDead("the engine process died while it worked on this request; please send it again")
        for mailbox in self._mailboxes.values():
            mailbox.put(lost)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(lost)
        self._abandon()
        # What is still queued for the dead core must not reach the next one.
        self._disconnect()
        self._connect()

    def _abandon(self) -> None:
        """Count what was lost, and forget it."""
        ids = self._outputs.sequences_of(list(self._mailboxes))
        finished = {id: Finish("error") for id in ids}
        self.metrics.pages.observe_front(self._outputs.process(StepOutput([], [], finished=finished)).stats)

    # ---- requests

    def generate(
        self, prompt: Prompt, params: SamplingParams, request_id: str, *, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of a request as they come. What is wrong with it is raised here, at once."""
        self.check()
        internal_id = f"{request_id}-{uuid.uuid4().hex[:8]}"
        requests = self.inputs.requests(internal_id, prompt, params, priority=priority)
        return self._stream(internal_id, prompt, requests)

    async def _stream(
        self, request_id: str, prompt: Prompt, requests: list[Request]
    ) -> AsyncGenerator[RequestOutput, None]:
        self.check()
        mailbox = self._mailboxes[request_id] = Mailbox()
        self._outputs.add(request_id, prompt, requests)
        finished = False
        try:
            self._send(Add(requests))
            while not finished:
                output = await mailbox.get()
                finished = output.finished
                yield output
        finally:
            del self._mailboxes[request_id]
            if not finished:
                self._abort(request_id)

    def _abort(self, request_id: str) -> None:
        ids = self._outputs.sequences_of([request_id])
        if ids and self._core is not None:
            self._send(Abort(ids))
        aborted = StepOutput([], [], finished={id: Finish("abort") for id in ids})
        self.metrics.pages.observe_front(self._outputs.process(aborted).stats)

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
        asyncio.get_running_loop().call_soon(self._receive)

    def _receive(self) -> None:
        """Everything that has arrived. The socket's descriptor tells only once."""
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._heard_at = time.monotonic()
            self._handle(decode_from_core(data))

    def _handle(self, message: Ready | Stepped | Beat | Reply) -> None:
        match message:
            case Stepped(output):
                self._deliver(output)
            case Beat(stats):
                self._stats = stats
            case Reply(number, value):
                if (call := self._calls.get(number)) is not None and not call.done():
                    call.set_result(value)
            case Ready():
                self._core = message
                self.inputs.max_model_len = message.max_model_len
                num_tokens = (message.num_blocks - 1) * self.facts.block_size
                self.metrics.cache_info |= {
                    "num_gpu_blocks": message.num_blocks,
                    "kv_cache_size_tokens": num_tokens,
                }
                self._ready.set()

    def _deliver(self, step: StepOutput) -> None:
        self._stats = step.stats
        processed = self._outputs.process(step)
        if processed.stopped:
            self._send(Abort(processed.stopped))
        self.metrics.pages.observe_front(processed.stats)
        self._live.add(processed.stats.first_token_s, processed.stats.between_tokens_s)
        for output in processed.outputs:
            if (mailbox := self._mailboxes.get(output.request_id)) is None:
                continue
            failed = output.outputs[0].finish_reason == "error"
            mailbox.put(
                EngineError("the engine failed on this request; others are not affected")
                if failed
                else output
            )

    # ---- what is going on

    def metrics_text(self) -> str:
        return self.metrics.text()

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

"""AsyncEngine: the client of an API process to the engine cores, one async iterator per request."""

import asyncio
import itertools
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.data.latency_target import LatencyTarget
from quire.data.lora import LoRARequest
from quire.data.outputs import RequestOutput
from quire.data.params import RequestOutputKind, SamplingParams
from quire.data.pooling import PoolingParams
from quire.data.pooling_outputs import PoolingOutput, PoolingRequestOutput
from quire.data.step_plan import FinishReason, StepOutput
from quire.data.wire import Abort
from quire.errors import EngineDead, EngineError, QuireError, RequestError, TooMany
from quire.frontend.checked_params import CheckedParams
from quire.frontend.control import CoreControl
from quire.frontend.core_calls import CoreCalls
from quire.frontend.core_links import open_links
from quire.frontend.engine_facts import EngineFacts
from quire.frontend.engine_link import EngineLink
from quire.frontend.expected_wait import check_expected_wait
from quire.frontend.fleet_link import Fleet
from quire.frontend.in_flight import (
    RequestInFlight,
    affinity,
    failure,
    next_to_send,
    prefix_tokens,
    running_requests,
)
from quire.frontend.inputs import InputProcessor, Prompt
from quire.frontend.live_stats import LiveView
from quire.frontend.output_stream import OutputStream
from quire.frontend.prefix_map import PrefixMap
from quire.frontend.request_state import RequestState
from quire.frontend.router import Router
from quire.frontend.stat_loggers import Observer
from quire.frontend.tracing import Tracer
from quire.logs import get_logger
from quire.metrics.api_keys import KeyAccount
from quire.metrics.engine import EngineMetrics
from quire.metrics.http import Exchange
from quire.system.event_loop_turns import TurnBudget, TurnQueue
from quire.text.tokenizer import Tokenizer

log = get_logger(__name__)

LOOK_S = 0.1
MAX_WAITING = 2
"""Limit of the requests in flight while requests wait for a restart, as a multiple of max_num_seqs."""
SILENT_S = 2.0
"""Seconds without a message after which a core gets no new requests, if other cores are available."""


class AsyncEngine:
    """The engine of an API process: sends requests to the cores, streams outputs and checks health."""

    _task: asyncio.Task[None] | None = None

    def __init__(
        self,
        *,
        facts: EngineFacts,
        inputs: InputProcessor,
        metrics: EngineMetrics,
        addresses: Mapping[int, str | Path],
        token: str,
        health_timeout_s: float,
        fleet: Fleet | None = None,
        stream_interval: int = 1,
        routing: str = "affinity",
        prefixes: PrefixMap | None = None,
        first: int = 0,
        cores_return: bool = True,
        resumes: bool = True,
        settings: Mapping[str, Any] | None = None,
        tracer: Tracer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the client; `connect` opens its connections to the `addresses` of the cores with the secret
        `token`, or to the Ray Serve replicas of a `fleet`. The router knows from `prefixes` which core has
        cached a prefix; its rotation begins at core `first`. With `cores_return`, requests wait for the
        restart of a dead core; with `resumes`, those with output continue after the death of their core."""
        self.facts = facts
        self.inputs = inputs
        self.metrics = metrics
        self._clock = clock
        self._health_timeout_s = health_timeout_s
        self._resumes = resumes
        self._links = open_links(
            self, facts, inputs, addresses, token, fleet, routing, stream_interval, clock
        )
        self._router = Router(
            len(self._links),
            block_size=facts.block_size,
            max_num_seqs=facts.max_num_seqs // len(self._links),
            policy=routing,
            prefixes=prefixes,
            first=first % len(self._links),
        )
        self._pages = [metrics.pages.of_engine(place) for place in range(len(self._links))]
        self._flights: dict[str, RequestInFlight] = {}
        self._sending, self._is_sending = TurnBudget(), False
        """Time budget for sending in one turn of the event loop, and whether the next turn sends requests."""
        self._abandoned = TurnQueue[tuple[str, RequestInFlight]](self._end_abandoned)
        self._numbers = itertools.count()
        self._tag = uuid.uuid4().hex[:8]
        """Makes internal ids unique: clients may reuse a request id, also in several processes."""
        self._ready = asyncio.Event()
        self._live = LiveView()
        self._tracer = tracer
        self._calls = CoreCalls(self._links, health_timeout_s, cores_return=cores_return)
        self.operation = CoreControl(
            self._calls.call_all,
            settings=settings or {},
            forget_prefixes=self._router.forget_prefixes,
            clear_media=self.on_reset,
        )
        self.observers: list[Observer] = []

    # ---- life

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.inputs.tokenizer

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    def start(self) -> None:
        self.connect()
        self._task = asyncio.create_task(self._watch_waiting())

    def connect(self) -> None:
        """Connect to the cores, also to new ones after `disconnect`."""
        for link in self._links:
            link.start()

    def disconnect(self) -> None:
        """Disconnect from the cores, which are about to be stopped. No request may be in flight."""
        self._ready.clear()
        self._abandoned.flush()
        for link in self._links:
            link.close()

    async def ready(self) -> None:
        """Wait until every core has been ready since the last `connect`."""
        await self._ready.wait()

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self.disconnect()
        if self._tracer is not None:
            self._tracer.close()

    def check(self) -> None:
        """Raise EngineDead if no core is available, or if a core has not started yet, hangs in a step, or
        died longer ago than the health timeout."""
        self._calls.check_any()
        for link in self._links:
            problem = link.problem(self._health_timeout_s)
            back_soon = link.core is None and link.was_up and link.down_s <= self._health_timeout_s
            if problem is not None and not back_soon:
                raise EngineDead(problem)

    def _check_any(self, rank: int | None = None) -> None:
        """Raise EngineDead unless some core is available, or a new request may wait for the restart of one;
        with a `rank`, unless that core has been ready."""
        may_wait = self._resumes and len(self._flights) < MAX_WAITING * self.facts.max_num_seqs
        if not (may_wait and self._calls.is_restarting()):
            self._calls.check_any()
        for link in self._links:
            if link.rank == rank and not link.was_up:
                raise EngineDead(str(link.problem(self._health_timeout_s)))

    # ---- requests

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | CheckedParams,
        request_id: str,
        *,
        priority: int = 0,
        rank: int | None = None,
        max_logprobs: int | None = None,
        timed: bool = False,
        account: KeyAccount | None = None,
        lora: LoRARequest | None = None,
        target: LatencyTarget | None = None,
    ) -> OutputStream[RequestOutput]:
        """Stream the outputs of a request. This call raises a RequestError for an invalid request, or TooMany
        if the first token would come far too late for its target. With a `rank`, the request goes only to
        that core; with `timed`, its share of the step times is measured."""
        self._check_any(rank)
        id = self._internal_id(request_id, rank)
        requests = self.inputs.requests(
            id, prompt, params, priority=priority, max_logprobs=max_logprobs, timed=timed, lora=lora
        )
        is_delta = requests[0].params.output_kind is RequestOutputKind.DELTA
        flight = RequestInFlight(prompt, requests, rank, account)
        return self._stream(id, flight, is_delta=is_delta, target=target)

    def encode(
        self,
        prompt: Prompt,
        params: PoolingParams,
        request_id: str,
        *,
        priority: int = 0,
        rank: int | None = None,
        account: KeyAccount | None = None,
        lora: LoRARequest | None = None,
        target: LatencyTarget | None = None,
    ) -> OutputStream[PoolingRequestOutput[PoolingOutput]]:
        """Stream the single output of a pooling request; an invalid request raises at once."""
        self._check_any(rank)
        id = self._internal_id(request_id, rank)
        request = self.inputs.pooling_request(id, prompt, params, priority=priority, lora=lora)
        return self._stream(id, RequestInFlight(prompt, [request], rank, account), target=target)

    def _internal_id(self, request_id: str, rank: int | None) -> str:
        ranks = [link.rank for link in self._links]
        if rank is not None and rank not in ranks:
            known = f"is only rank {ranks[0]}" if len(ranks) == 1 else f"are ranks {ranks[0]} to {ranks[-1]}"
            raise RequestError(f"data_parallel_rank {rank} is out of range: there {known}")
        return f"{request_id}-{self._tag}{next(self._numbers):x}"

    def _stream(
        self, id: str, flight: RequestInFlight, *, is_delta: bool = False, target: LatencyTarget | None = None
    ) -> OutputStream[Any]:
        for request in flight.requests:
            request.target = request.target if target is None else target
            if flight.account is not None:
                request.tenant, request.weight = flight.account.tenant, flight.account.weight
        try:
            check_expected_wait(flight.requests[0], self._links, self.facts.slo_max_wait)
        except TooMany:
            self._pages[0].count_refused()
            raise

        def begin(stream: OutputStream[Any]) -> None:
            self._check_any()
            flight.stream = stream
            self._flights[id] = flight
            if self._sending.is_spent:
                flight.lost_at = self._clock()
                self._send_soon()
            else:
                self._send_request(id, flight)

        return OutputStream(id, begin, self._abandon, is_delta=is_delta)

    def _send_request(self, id: str, flight: RequestInFlight) -> None:
        """Send a request to the best core; the request waits if no core is available."""
        among = self._available(flight.rank)
        first, processor_cache = flight.requests[0], self.inputs.media.processor_cache
        lacks_media = first.media is not None and processor_cache.lacks(first.media)
        if not among or lacks_media:
            flight.link = None
            flight.lost_at = flight.lost_at or self._clock()
            if among:
                flight.media_task = flight.media_task or asyncio.create_task(self._restore_media(id, flight))
            return
        place = self._router.place(
            id, prefix_tokens(first), among=among, num_sequences=len(flight.requests), **affinity(first)
        )
        link = flight.link = self._links[place]
        if self._expect(id, flight, link).has_tokens and flight.lost_at:
            self._pages[place].count_resumed()
        flight.num_sent += 1
        flight.num_before, flight.lost_at = flight.num_tokens, 0.0
        link.num_unreported += len(first.tokens)
        link.send(flight.outgoing(processor_cache))

    def _expect(self, id: str, flight: RequestInFlight, link: EngineLink) -> RequestState:
        """Register a request with the output processor of a core's connection, and return its state."""
        if flight.state is not None:
            link.outputs.attach(flight.state)
            return flight.state
        stream = flight.stream
        put_text = stream.put_text if stream is not None and stream.takes_text else None
        flight.state = link.outputs.add(id, flight.prompt, flight.requests, put_text, flight.account)
        return flight.state

    async def _restore_media(self, id: str, flight: RequestInFlight) -> None:
        """Process media again whose arrays are no longer cached anywhere, then send the request."""
        media = flight.requests[0].media
        assert media is not None
        try:
            await self.inputs.media.restore_arrays(media, flight.prompt.prepared)
            if self.inputs.media.processor_cache.lacks(media):
                raise EngineError("a media item of this request is no longer available; please send it again")
        except Exception as error:  # raised in the reader of the stream
            if self._pop(id) is not None and flight.stream is not None:
                flight.stream.fail(error if isinstance(error, QuireError) else EngineError(str(error)))
                self._close([(id, flight)], "error")
            return
        finally:
            flight.media_task = None
        if id in self._flights and flight.link is None:
            self._send_request(id, flight)

    def _available(self, rank: int | None) -> list[int]:
        """Return the indices of the cores for a request: cores with recent messages, else all ready cores."""
        up = [
            (place, link.silent_s)
            for place, link in enumerate(self._links)
            if link.core is not None and rank in (None, link.rank)
        ]
        return [place for place, silent_s in up if silent_s < SILENT_S] or [place for place, _ in up]

    def _abandon(self, request_id: str) -> None:
        """End a request whose stream was closed. One API call may have a thousand requests, so they are ended
        in batches."""
        if (flight := self._pop(request_id)) is not None:
            self._abandoned.add((request_id, flight))

    def _end_abandoned(self, ended: Sequence[tuple[str, RequestInFlight]]) -> None:
        for link in self._links:
            request_ids = [id for id, flight in ended if flight.link is link]
            if link.core is not None and (ids := link.outputs.sequences_of(request_ids)):
                link.send(Abort(ids))
        self._close(ended, "abort")

    def _pop(self, request_id: str) -> RequestInFlight | None:
        self._router.end(request_id)
        return self._flights.pop(request_id, None)

    def _close(self, ended: Sequence[tuple[str, RequestInFlight]], reason: str) -> None:
        """End requests that are no longer read, and count them as ended for `reason`; requests without a core
        count for the first core. Outputs of other requests are still delivered."""
        by_link: dict[EngineLink, list[str]] = {}
        for request_id, flight in ended:
            link = flight.link or self._links[0]
            if flight.link is None:
                self._expect(request_id, flight, link)
            by_link.setdefault(link, []).append(request_id)
        for link, request_ids in by_link.items():
            ids = link.outputs.sequences_of(request_ids)
            link.outputs.add_step(StepOutput([], [], finished={id: FinishReason(reason) for id in ids}))
            self.on_outputs(link)

    # ---- callbacks of the connections

    def on_ready(self, link: EngineLink) -> None:
        core = link.core
        assert core is not None
        cores = [other.core for other in self._links if other.core is not None]
        self.inputs.max_model_len = min(ready.max_model_len for ready in cores)
        self.metrics.cache_info[link.place] |= {
            "num_gpu_blocks": core.num_blocks,
            "kv_cache_size_tokens": core.num_tokens,
        }
        if all(other.was_up for other in self._links):
            self._ready.set()
        self._send_waiting()

    def on_stats(self, link: EngineLink, page: bytes | None) -> None:
        stats, link.num_unreported = link.stats, 0
        self._router.update_load(
            link.place, num_running=stats.num_running, num_waiting=stats.num_waiting, kv_usage=stats.kv_usage
        )
        self.operation.weight_version = stats.weight_version
        self.metrics.note_stats(link.place, stats, page)
        for observe in self.observers:
            observe(link.rank, stats, None)

    def on_reset(self) -> None:
        self.inputs.media.processor_cache.clear()

    def on_missing(self, request_id: str) -> None:
        """Send a request again with the arrays of all its media items, because its core lacks some of
        them."""
        self.inputs.media.processor_cache.clear_core_keys()
        for id, flight in list(self._flights.items()):
            if flight.link is not None and any(request.id == request_id for request in flight.requests):
                flight.link.outputs.detach([id])
                self._router.end(id)
                flight.link, flight.sends_all_arrays = None, True
                self._send_request(id, flight)

    def on_outputs(self, link: EngineLink) -> None:
        """Deliver all new outputs to their streams."""
        processed = link.outputs.flush()
        if processed.stopped and link.core is not None:
            link.send(Abort(processed.stopped))
        self._pages[link.place].observe_front(processed.stats)
        self._live.add(processed.stats.first_token_s, processed.stats.between_tokens_s)
        for observe in self.observers:
            observe(link.rank, None, processed.stats)
        for output in processed.outputs:
            flight = self._flights.get(output.request_id)
            if flight is None or (stream := flight.stream) is None:
                continue
            if (finish := processed.failed.get(output.request_id)) is not None:
                stream.fail(failure(finish))
                if output.finished:
                    self._pop(output.request_id)
                continue
            if output.finished:
                self._pop(output.request_id)
                self._live.ended(output)
                if self._tracer is not None:
                    self._tracer.ended(output, flight.requests[0].params, flight.parent)
            stream.put(output)

    def on_death(self, link: EngineLink) -> None:
        """Send the requests of a dead core to another core, or let them wait for the restart. Requests that
        must not be sent again fail."""
        self.on_outputs(link)
        flights = running_requests(link, self._flights)
        self._router.lose(link.place)
        self.metrics.note_adapters(link.place, [], [])
        self._send_again(link, flights, str(link.problem(0.0)))

    def on_lost(self, link: EngineLink, sequence_ids: Collection[str], reason: str) -> None:
        """Send the requests of a dead fleet replica to another replica, by the rules of `on_death`."""
        self.on_outputs(link)
        flights = running_requests(link, self._flights, sequence_ids)
        for id in flights:
            self._router.end(id)
        self._send_again(link, flights, reason)

    def _send_again(self, link: EngineLink, flights: Mapping[str, RequestInFlight], reason: str) -> None:
        terms = {"is_alone": len(flights) == 1, "resumes": self._resumes}
        again = {id: flight for id, flight in flights.items() if flight.may_resend(**terms)}
        self.inputs.media.processor_cache.reset_core()
        link.outputs.detach(again)
        for flight in again.values():
            flight.link, flight.lost_at = None, self._clock()
            flight.state = flight.state if self._resumes else None
        for id in flights.keys() - again.keys():
            self._fail(id, "died while it worked on this request; please send it again")
        num_failed = len(flights) - len(again)
        log.error("%s; %d requests failed, %d are sent again", reason, num_failed, len(again))
        self._send_waiting()

    def _fail(self, request_id: str, reason: str) -> None:
        flight = self._pop(request_id)
        assert flight is not None and flight.stream is not None
        flight.stream.fail(EngineDead(f"the engine process {reason}"))
        self._close([(request_id, flight)], "error")

    async def _watch_waiting(self) -> None:
        while True:
            self._send_waiting()
            await asyncio.sleep(LOOK_S)

    def _send_waiting(self) -> None:
        """Send waiting requests, some in each turn of the event loop; fail those that waited too long."""
        now, self._is_sending = self._clock(), False
        for id, flight in next_to_send(self._flights):
            if self._available(flight.rank):
                self._send_request(id, flight)
                if self._sending.is_spent:
                    return self._send_soon()
            elif now - flight.lost_at > self._calls.patience_s:
                self._fail(id, "died and was not restarted in time; please send the request again")

    def _send_soon(self) -> None:
        if not self._is_sending:
            asyncio.get_running_loop().call_soon(self._send_waiting)
        self._is_sending = True

    # ---- control and statistics

    async def _block_map(self) -> bytes:
        return b"".join(await self._calls.call_all("block_map", {}, if_ready=True))

    def metrics_text(self) -> str:
        return self.metrics.text()

    def observe_exchange(self, exchange: Exchange) -> None:
        self.metrics.pages.observe_http(exchange)

    def snapshot(self) -> dict[str, Any]:
        """Return live statistics of all cores together. The map of KV cache blocks in them is as old as the
        previous call, since this call only starts to fetch a new map."""
        try:
            self.check()
            healthy = True
            asyncio.get_running_loop().create_task(self._live.fetch_map(self._block_map))
        except EngineDead:
            healthy = False
        return self._live.view(self.facts, self.metrics.pages) | {
            "healthy": healthy,
            "num_blocks": sum(link.core.num_blocks - 1 for link in self._links if link.core),
            "max_model_len": self.inputs.max_model_len,
            "modalities": self.inputs.media.modalities,
        }

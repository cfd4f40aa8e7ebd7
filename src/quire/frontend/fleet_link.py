"""FleetLink: the connection of an API process to the replicas of a fleet, which run one engine core each."""

import asyncio
import contextvars
import time
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Sequence
from typing import Any, Protocol

from quire.data.control import DEFAULT_VERSION
from quire.data.step_plan import StepOutput
from quire.data.wire import Abort, Add, Missing, Ready, StepDone, ToCore, decode_from_core, encode
from quire.errors import EngineDead
from quire.frontend.cached_prefixes import PrefixChanges
from quire.frontend.engine_link import EngineLink, Owner
from quire.frontend.fleet_routes import FleetRoutes, Route
from quire.frontend.outputs import OutputProcessor
from quire.logs import get_logger

log = get_logger(__name__)

PING_INTERVAL_S = 1.0
PING_TIMEOUT_S = 10.0
_FORGETTING = frozenset({"reset_prefix_cache", "reset_running", "pause", "sleep", "commit_weights"})
"""Control methods after which the prefixes of earlier prompts may not be cached any more."""


class ReplicaLost(EngineDead):
    """A replica or its core died, and all requests that it ran are lost."""


class Fleet(Protocol):
    """The replicas of an engine behind a load balancer, which chooses a replica for each call."""

    async def ready(self) -> Ready:
        """Wait for a replica, and return the first message of its core."""

    async def ping(self) -> None:
        """Wait until some healthy replica has answered a health check."""

    def stream(self, route: Route, data: bytes) -> AsyncGenerator[str | Sequence[bytes]]:
        """Run the request of an encoded `Add` message. The first item is the name of the replica, the others
        are messages of its core. After an exception the replica does not run the request any more;
        ReplicaLost means that all requests of the replica are lost. Closing the generator aborts the
        request."""

    async def cached_prefixes(self, route: Route, number: int) -> PrefixChanges | None:
        """Return which prefixes have entered and left the cache of a replica since the first `number`
        changes; None if the replica does not report them."""

    async def abort(self, route: Route, sequence_ids: list[str]) -> None:
        """End some of the sequences of a request at its replica."""

    async def call_all(self, method: str, args: dict[str, Any], timeout_s: float | None) -> list[Any]:
        """Call a control method of all cores; return their answers."""


class FleetOwner(Owner, Protocol):
    """Owner of a connection to a fleet, which also handles the loss of single requests."""

    def on_lost(self, link: EngineLink, sequence_ids: Collection[str], reason: str) -> None:
        """Handle that some requests lost their core, while other requests of the connection go on."""


class _Run:
    """A request that was sent to a replica, and its sequences that have not ended."""

    def __init__(self, route: Route, sequence_ids: list[str]) -> None:
        self.route = route
        self.sequence_ids = sequence_ids
        self.open = set(sequence_ids)
        """Sequences that have neither ended nor been aborted."""
        self.replica = ""
        """Name of the replica; empty until it is known."""
        self.task: asyncio.Task[None] | None = None


class FleetLink(EngineLink):
    """Sends each request to the engine replica of a Ray Serve deployment that Ray's request router chooses by
    the request's session, prefix and adapter. If a replica is lost, its unfinished requests are returned to
    the engine client, which sends them to another replica."""

    def __init__(
        self,
        fleet: Fleet,
        routes: FleetRoutes,
        *,
        outputs: OutputProcessor,
        owner: FleetOwner,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(0, 0, name="the fleet", outputs=outputs, owner=owner, clock=clock)
        self.routes = routes
        self._fleet = fleet
        self._fleet_owner = owner
        self._runs: dict[str, _Run] = {}
        """Runs by sequence id."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._weight_version = DEFAULT_VERSION
        self._num_changes: dict[str, int] = {}
        """Number of changes of its cache that each replica has reported, by name."""
        self._is_delivery_due = False

    def start(self) -> None:
        self._spawn(self._watch())

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self.core, self.was_up = None, False
        self.down_since, self._down_reason = self._clock(), f"{self.name} is not connected"

    def problem(self, health_timeout_s: float) -> str | None:
        if self.core is None:
            return self._down_reason
        if self.silent_s <= max(health_timeout_s, PING_INTERVAL_S + PING_TIMEOUT_S):
            return None
        return f"no replica has answered for {self.silent_s:.1f} s; the limit is {health_timeout_s:g} s"

    async def _watch(self) -> None:
        """Wait for the first replica, then check regularly that some replica answers."""
        while True:
            try:
                if self.core is None:
                    self.core, self.was_up = await self._fleet.ready(), True
                    self._heard_at = self._clock()
                    self._owner.on_ready(self)
                async with asyncio.timeout(PING_TIMEOUT_S):
                    await self._fleet.ping()
                self._heard_at = self._clock()
                async with asyncio.timeout(PING_TIMEOUT_S):
                    await asyncio.gather(*map(self._read_cache, self.routes.replicas))
                self.stats = self.routes.total_load(self._weight_version)
                self._owner.on_stats(self, None)
            except Exception as error:
                log.warning("No replica of the fleet answers: %s; retrying", last_line(error))
            await asyncio.sleep(PING_INTERVAL_S)

    async def _read_cache(self, replica: str) -> None:
        """Note in the routes which prefixes a replica has cached, also for requests of other ingresses."""
        number = self._num_changes.get(replica, 0)
        try:
            route = Route(replica=replica, routes=self.routes)
            changes = await self._fleet.cached_prefixes(route, number)
        except Exception as error:  # the replica may have ended
            log.debug("The cached prefixes of replica %s are not known: %s", replica, last_line(error))
            return
        if changes is not None:
            self.routes.note_cached(replica, changes)
            self._num_changes[replica] = changes.number

    async def call_all(self, method: str, args: dict[str, Any], timeout_s: float | None) -> list[Any]:
        if method in _FORGETTING:
            self.routes.forget_prefixes()
        return await self._fleet.call_all(method, args, timeout_s)

    # ---- requests

    def send(self, message: ToCore) -> None:
        match message:
            case Add():
                self._begin(message)
            case Abort(request_ids):
                self._abort(request_ids)
            case _:
                raise TypeError(f"{type(message).__name__} is not a message to a fleet")

    def _begin(self, add: Add) -> None:
        requests = add.all()
        ids = [request.id for request in requests]
        run = _Run(self.routes.route_of(requests), ids)
        self._runs |= dict.fromkeys(ids, run)
        run.task = self._spawn(self._follow(run, encode(add)))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        # In a context of its own: Ray Serve gives two calls in the context of one HTTP request the same id.
        task = asyncio.create_task(work, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _follow(self, run: _Run, data: bytes) -> None:
        """Send the encoded Add message `data` to a replica, and handle the messages of the replica until all
        sequences of the request have ended."""
        stream = self._fleet.stream(run.route, data)
        try:
            async for item in stream:
                if isinstance(item, str):
                    run.replica = item
                    continue
                for message in item:
                    self._handle(run, message)
                if not run.open:
                    break
            if run.open:
                self._lose({run}, run.replica, "it ended the stream too early")
        except ReplicaLost as error:
            ran_there = {other for other in self._runs.values() if run.replica == other.replica != ""}
            self.routes.lose(run.replica)
            self._lose({run} | ran_there, run.replica, last_line(error))
        except Exception as error:
            self._lose({run}, run.replica, last_line(error))
        finally:
            self._end(run)
            await stream.aclose()

    def _handle(self, run: _Run, data: bytes) -> None:
        self._heard_at = self._clock()
        message = decode_from_core(data)
        if isinstance(message, Missing):
            run.open.clear()
            self._end(run)
            self._owner.on_missing(message.request_id)
        elif isinstance(message, StepDone):
            output = message.output
            self._shift_times(output)
            stats = output.stats
            self.routes.update_load(
                run.replica,
                num_running=stats.num_running,
                num_waiting=stats.num_waiting,
                kv_usage=stats.kv_usage,
            )
            run.open -= output.finished.keys()
            self._weight_version = stats.weight_version or self._weight_version
            self.outputs.add_step(output)
            self._schedule_delivery()

    def _shift_times(self, output: StepOutput) -> None:
        """Convert the times in an output from the clock of the replica to the clock of this process, as if
        the step had ended just now."""
        now = self._clock()
        for run in output.admitted.values():
            run.queued_at += now - output.at
            run.scheduled_at += now - output.at
        output.at = now

    def _schedule_delivery(self) -> None:
        """Schedule one delivery for all outputs that have arrived, of all streams."""
        if not self._is_delivery_due:
            self._is_delivery_due = True
            asyncio.get_running_loop().call_soon(self._deliver)

    def _deliver(self) -> None:
        self._is_delivery_due = False
        self._owner.on_outputs(self)

    def _abort(self, sequence_ids: list[str]) -> None:
        """End requests, or some of the sequences of a request."""
        for run in {self._runs[id] for id in sequence_ids if id in self._runs}:
            aborted = [id for id in sequence_ids if id in run.open]
            run.open.difference_update(aborted)
            if not run.open:
                self._end(run)
                if run.task is not None:
                    run.task.cancel()
            elif run.replica:
                self._spawn(self._abort_some(run, aborted))

    async def _abort_some(self, run: _Run, sequence_ids: list[str]) -> None:
        try:
            await self._fleet.abort(Route(replica=run.replica, routes=self.routes), sequence_ids)
        except Exception as error:  # the replica computes tokens that are not read
            log.debug("Aborting %s failed: %s", sequence_ids, last_line(error))

    def _end(self, run: _Run) -> bool:
        """Stop tracking a request; return whether it was still tracked."""
        if not any(self._runs.get(id) is run for id in run.sequence_ids):
            return False
        self.routes.end(run.route.request_id)
        for id in run.sequence_ids:
            del self._runs[id]
        return True

    def _lose(self, runs: set[_Run], replica: str, reason: str) -> None:
        """Give requests of a replica back to the owner, which sends them again."""
        lost = [run for run in runs if self._end(run)]
        for run in lost:
            if run.task is not None and run.task is not asyncio.current_task():
                run.task.cancel()
        if ids := {id for run in lost for id in run.open}:
            self._fleet_owner.on_lost(self, ids, f"replica {replica or '(none chosen yet)'} failed: {reason}")


def last_line(error: Exception) -> str:
    """Return the last line of an error; errors of other processes begin with their stack."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__

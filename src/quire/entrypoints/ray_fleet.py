"""The replicas of a Ray Serve deployment as a fleet, and the request router that chooses among them."""

import random
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.request_router import RequestRouter

from quire.config.engine import EngineConfig
from quire.data.wire import Ready
from quire.errors import EngineDead, EngineError, QuireError
from quire.frontend.cached_prefixes import PrefixChanges
from quire.frontend.fleet_link import ReplicaLost
from quire.frontend.fleet_routes import Route


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Request router of Ray Serve. It prefers the replica of the request's session, then the replica with the
    longest known prefix of the prompt, then the least busy replica."""

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        """Return lists of one replica each, the best replica first. A call for a replica that is gone fails:
        Ray would wait for it."""
        if pending_request is not None:  # Ray waits between two attempts
            pending_request.routing_context.should_backoff = True
        route = _route_of(pending_request)
        if route is None or route.routes is None:
            return [random.sample(candidate_replicas, len(candidate_replicas))]
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        route.routes.update(
            {
                name: (replica.multiplexed_model_ids, replica.routing_stats)
                for name, replica in by_name.items()
            }
        )
        if route.replica and route.replica not in by_name:
            if not pending_request.future.done():
                pending_request.future.set_exception(ReplicaLost(f"replica {route.replica} is gone"))
            return [candidate_replicas]  # Ray looks at the future before it chooses among them
        return [[by_name[name]] for name in route.routes.rank(route, by_name)]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        route = _route_of(pending_request)
        if route is not None and route.routes is not None and route.request_id:
            route.routes.assign(route, replica_id.unique_id)


def _route_of(pending_request: Any) -> Route | None:
    """Return the properties of a request by which its replica is chosen; they are the first argument of calls
    of `EngineReplica`. Return None if the request has none."""
    args = () if pending_request is None else pending_request.args
    return args[0] if args and isinstance(args[0], Route) else None


class RayFleet:
    """Client of the replicas of a Ray Serve deployment of `EngineReplica`, which calls them through the
    deployment's handle."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._streams = handle.options(method_name="stream", stream=True)

    async def describe(self) -> tuple[EngineConfig, Ready]:
        """Wait for a replica; return its resolved configuration and the properties of its core."""
        config, ready = await self._handle.describe.remote()
        return config, ready

    async def ready(self) -> Ready:
        return (await self.describe())[1]

    async def ping(self) -> None:
        await self._handle.ping.remote()

    async def stream(self, route: Route, data: bytes) -> AsyncGenerator[str | Sequence[bytes]]:
        response = self._streams.remote(route, data)
        try:
            async for item in response:
                yield item
        except (RayActorError, EngineDead) as error:
            raise ReplicaLost(str(error)) from None
        finally:
            response.cancel()

    async def cached_prefixes(self, route: Route, number: int) -> PrefixChanges | None:
        changes: PrefixChanges | None = await self._handle.cached_prefixes.remote(route, number)
        return changes

    async def abort(self, route: Route, sequence_ids: list[str]) -> None:
        await self._handle.abort.remote(route, sequence_ids)

    async def call_all(self, method: str, args: dict[str, Any], timeout_s: float | None) -> list[Any]:
        response = self._handle.broadcast("control", method, args, timeout_s)
        try:
            answers: list[Any] = await response.results_async()
        except QuireError as error:  # Ray adds the stack of the replica to the message
            cause = getattr(error, "cause", None)
            raise (cause if isinstance(cause, BaseException) else error) from None
        except RayActorError as error:
            raise EngineError(f"a replica ended during {method}: {error}") from None
        if not answers:
            raise EngineDead("no replica is running")
        return answers

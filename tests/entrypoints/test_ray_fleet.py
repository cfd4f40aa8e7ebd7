"""Tests of the request router with Ray Serve's own loop that assigns calls to replicas, without a cluster."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from quire.frontend.fleet_link import ReplicaLost
from quire.frontend.fleet_routes import FleetRoutes, Route

pytest.importorskip("ray.serve", exc_type=ImportError)


class Replica:
    """A running replica without calls."""

    multiplexed_model_ids = ()
    routing_stats: dict[str, float] = {}
    max_ongoing_requests = 10
    availability_zone = None
    node_id = "node"

    def __init__(self, name: str) -> None:
        from ray.serve._private.common import DeploymentID, ReplicaID

        self.replica_id = ReplicaID(name, DeploymentID("Engine"))
        self.actor_id = SimpleNamespace(hex=lambda: name)

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 0


def test_a_call_for_a_replica_that_is_gone_fails_at_once() -> None:
    from ray.serve._private.common import DeploymentHandleSource, DeploymentID, RequestMetadata
    from ray.serve.request_router import PendingRequest

    from quire.entrypoints.ray_fleet import PrefixRouter

    async def check() -> None:
        router: Any = PrefixRouter(DeploymentID("Engine"), DeploymentHandleSource.REPLICA)
        router.update_replicas([Replica("a"), Replica("b")])
        routes = FleetRoutes(block_size=16, max_num_seqs=8)

        async def choose(name: str) -> str:
            metadata = RequestMetadata(request_id=name, internal_request_id=name)
            call = PendingRequest([Route(replica=name, routes=routes)], {}, metadata)
            replica = await asyncio.wait_for(router._choose_replica_for_request(call), 10)
            return str(replica.replica_id.unique_id)

        assert await choose("a") == "a"
        router.on_replica_actor_died(Replica("b").replica_id)
        with pytest.raises(ReplicaLost, match="replica b is gone"):
            await choose("b")
        assert await choose("a") == "a" and routes.replicas == ["a"]
        await asyncio.sleep(0)
        assert not router.curr_num_routing_tasks

    asyncio.run(check())

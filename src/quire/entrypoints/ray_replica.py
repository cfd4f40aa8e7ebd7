"""EngineReplica: a Ray Serve deployment; each of its replicas runs one engine core."""

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.experimental import internal_kv

from quire.config.engine import EngineConfig
from quire.config.env import Env
from quire.configure import configure
from quire.data.wire import Ready
from quire.entrypoints.child_cores import ChildCores
from quire.entrypoints.ray_args import FleetModel
from quire.frontend.cached_prefixes import CachedPrefixes, PrefixChanges, follow_events
from quire.frontend.fleet_routes import Route
from quire.logs import get_logger
from quire.server.settings import make_settings
from quire.system.cluster_token import VARIABLE, new_token
from quire.system.scratch import Scratch

log = get_logger(__name__)


class EngineReplica:
    """A Ray Serve replica of a model. It runs one engine core as a child process, and passes requests of the
    HTTP ingresses to it."""

    async def __init__(self, model: FleetModel) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        """Start the core, and return when it is ready."""
        settings = make_settings(model.server, env=Env.read(os.environ))
        if model.shares_prefixes:
            _prepare_transfers()
        self._scratch = Scratch()
        events = f"ipc://{self._scratch.path}/kv_events"
        self.config = configure(model.engine, usage="server")
        core_config = _with_events(self.config, events)
        if model.uses_ray_ranks:
            context = ray.get_runtime_context()
            os.environ["RAY_ADDRESS"] = context.gcs_address
            core_config = replace(core_config, ray_group=ray.util.get_current_placement_group().id.hex())
        self._cores = ChildCores(
            core_config, self._scratch.path, health_timeout_s=settings.http.health_timeout
        )
        self._relay = self._cores.relay(on_end=self._end)
        self._cores.start()
        await self._cores.wait_until_up()
        self._relay.start()
        self._prefixes = CachedPrefixes(self.config.cache.block_size)
        self._events = asyncio.create_task(follow_events(events, self._prefixes))
        await self._cores.wait_until_ready(self._relay)
        self._name = serve.get_replica_context().replica_tag
        lora = self.config.lora
        self._use_adapter = serve.multiplexed(max_num_models_per_replica=lora.max_cpu_loras)(_same_name)

    def _end(self) -> None:
        """End the replica after its core has died: Ray Serve starts another replica instead."""
        log.error("The engine core has died; this replica ends")
        os._exit(1)

    def __del__(self) -> None:
        """End the core when Ray Serve removes the drained replica."""
        if hasattr(self, "_relay"):
            self._relay.close()
            self._events.cancel()
            self._cores.end()
            self._scratch.remove()

    # ---- for ingresses

    async def describe(self) -> tuple[EngineConfig, Ready]:
        """Wait until the core is ready; return the resolved configuration and the properties of the core."""
        return self.config, await self._relay.ready()

    async def stream(self, route: Route, data: bytes) -> AsyncIterator[str | list[bytes]]:
        """Run a request, encoded as `data`, on the engine core. Yield the name of this replica, then the
        core's encoded outputs. `route` has the request's LoRA adapter."""
        if route.adapter:
            await self._use_adapter(route.adapter)
        yield self._name
        async for messages in self._relay.run(data):
            yield messages

    async def abort(self, route: Route, sequence_ids: list[str]) -> None:
        self._relay.abort(sequence_ids)

    async def cached_prefixes(self, route: Route, number: int) -> PrefixChanges:
        """Return which prefixes have entered and left the cache since the first `number` changes."""
        return self._prefixes.since(number)

    async def ping(self) -> None:
        self._relay.check()

    async def control(self, method: str, args: dict[str, Any], timeout_s: float | None) -> Any:
        """Call a control method of the engine core, such as `sleep`, and return its result."""
        return await self._relay.link.call(method, args, timeout_s)

    # ---- for Ray Serve

    def check_health(self) -> None:
        self._relay.check()

    def record_routing_stats(self) -> dict[str, float]:
        stats = self._relay.link.stats
        return {
            "num_running": stats.num_running,
            "num_waiting": stats.num_waiting,
            "kv_usage": stats.kv_usage,
        }

    def record_autoscaling_stats(self) -> dict[str, float]:
        return self.record_routing_stats() | {"max_num_seqs": self.config.scheduler.max_num_seqs}


def _with_events(config: EngineConfig, endpoint: str) -> EngineConfig:
    """Return the configuration of a core that publishes KV events for this replica, unless it publishes them
    for others or has no prefix cache."""
    if config.observability.kv_events_config or not config.cache.enable_prefix_caching:
        return config
    events = {"enable_kv_cache_events": True, "endpoint": endpoint}
    return replace(config, observability=replace(config.observability, kv_events_config=events))


def _prepare_transfers() -> None:
    """Set the environment of an engine core that exchanges prefixes with other replicas: its address, a free
    port, and a secret that all replicas of the Ray cluster share."""
    os.environ.setdefault("VLLM_NIXL_SIDE_CHANNEL_HOST", ray.util.get_node_ip_address())
    os.environ.setdefault("VLLM_NIXL_SIDE_CHANNEL_PORT", "0")
    if not os.environ.get(VARIABLE):
        name = VARIABLE.encode()
        internal_kv._internal_kv_put(name, new_token().encode(), overwrite=False)
        os.environ[VARIABLE] = internal_kv._internal_kv_get(name).decode()


async def _same_name(name: str) -> str:
    """Return an adapter's name, so that Ray Serve counts it as loaded here. The core loads it on demand."""
    return name

"""Ranks as Ray actors: Ray places and starts them; plans use separate TCP connections."""

import contextlib
import os
import queue
import socket
import threading
import time
from dataclasses import replace
from typing import Any

from quire.config.engine import EngineConfig
from quire.errors import ConfigError
from quire.executor.messages import FromRank, Order, decode_order
from quire.executor.multiprocess import RankedExecutor
from quire.executor.tcp import (
    LONGEST,
    HeadEnd,
    Join,
    Node,
    OrderMessage,
    PlanMessage,
    RankMessage,
    RemoteRanks,
    StepAnswer,
    Welcome,
    configure_socket,
    decode_from_head,
    interface_to,
)
from quire.executor.worker_group import WorkerGroup
from quire.executor.worker_process import Port, RankAddress, local_ranks, serve
from quire.logs import get_logger, name_process
from quire.system.cluster_token import new_token
from quire.system.node_registry import free_address

log = get_logger(__name__)

_LAST_S = 1.0
"""Seconds for the last messages to be sent before the process ends."""


class RayExecutor(RankedExecutor):
    """Runs each rank as an actor of a Ray cluster."""

    def start_ranks(self) -> WorkerGroup:
        return RayWorkerGroup(self.config, self._start_s)


class RayWorkerGroup(RemoteRanks):
    """Ranks as Ray actors, each in a bundle of a placement group; consecutive ranks share a machine."""

    def __init__(self, config: EngineConfig, timeout_s: float) -> None:
        self._ray = _ray()
        self._owns_ray = not self._ray.is_initialized()
        self._group: Any = None
        self._owns_group = not config.ray_group
        self._actors: list[Any] = []
        deadline, places = time.monotonic() + timeout_s, local_ranks(config, 0, "")
        if self._owns_ray:
            self._ray.init(logging_level="WARNING", log_to_driver=True)
        token, address = new_token(), self._ray.util.get_node_ip_address()
        listener = socket.create_server((address, 0), backlog=len(places))
        super().__init__(listener, range(len(places)), 1, token=token)
        self.names = [place.name for place in places]
        try:
            self._create_actors(config, places, timeout_s, deadline)
            where = address, listener.getsockname()[1]
            for place, actor in zip(places, self._actors, strict=True):
                actor.begin.remote(replace(place, local=0), *where, token)
            if not self.await_all(deadline, self._check_actors):
                missing = ", ".join(self.names[rank] for rank in self.missing)
                raise ConfigError(f"no word from {missing} within {timeout_s:g} s")
            self.welcome(self._ray.get(self._actors[0].init_method.remote()))
        except BaseException as error:
            self.end_reason = str(error)
            self.end()
            raise

    def _create_actors(
        self, config: EngineConfig, places: list[RankAddress], timeout_s: float, deadline: float
    ) -> None:
        """Create the actors, in the order of ranks."""
        ray, kind = self._ray, "GPU" if config.machine.device == "cuda" else "CPU"
        total = ray.cluster_resources().get(kind, 0)
        if total < len(places):
            raise ConfigError(
                f"{len(places)} ranks need as many {kind}s, and the Ray cluster has {total:g}: add machines"
                " with `ray start --address`, or lower the parallel sizes"
            )
        self._group = self._open_group(config, [{kind: 1.0, "CPU": 1.0}] * len(places))
        if not self._group.wait(max(deadline - time.monotonic(), 0)):
            raise ConfigError(
                f"the Ray cluster had no {len(places)} free {kind}s within {timeout_s:g} s"
                f" (VLLM_ENGINE_READY_TIMEOUT_S); free ones: {ray.available_resources().get(kind, 0):g}"
            )
        actor_class = ray.remote(RayRank)
        actors = [
            actor_class.options(
                num_cpus=1,
                num_gpus=1 if kind == "GPU" else 0,
                scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=index + (not self._owns_group)
                ),
            ).remote()
            for index in range(len(places))
        ]
        self._actors = actors
        here = ray.get_runtime_context().get_node_id()
        left_s = max(deadline - time.monotonic(), 1)
        nodes = ray.get([actor.node.remote() for actor in actors], timeout=left_s)
        order = sorted(range(len(actors)), key=lambda index: (nodes[index] != here, nodes[index], index))
        self._actors = [actors[index] for index in order]

    def _open_group(self, config: EngineConfig, bundles: list[dict[str, float]]) -> Any:
        """Return a new placement group, or the one that the configuration names."""
        if self._owns_group:
            return self._ray.util.placement_group(bundles, strategy="PACK")
        from ray.util.placement_group import PlacementGroup, PlacementGroupID

        return PlacementGroup(PlacementGroupID(bytes.fromhex(config.ray_group)))

    def _check_actors(self) -> None:
        """Raise if an actor has died before it could connect."""
        ready, _ = self._ray.wait([actor.node.remote() for actor in self._actors], timeout=0)
        try:
            self._ray.get(ready)
        except self._ray.exceptions.RayError as error:
            raise ConfigError(
                f"a Ray actor ended while it was starting: {' '.join(str(error).split())}"
            ) from None

    def end(self) -> None:
        super().end()
        if not self._ray.is_initialized():  # any call would start a cluster
            return
        for actor in self._actors:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.kill(actor)
        if self._group is not None and self._owns_group:
            self._ray.util.remove_placement_group(self._group)
        if self._owns_ray:
            self._ray.shutdown()


def _ray() -> Any:
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ConfigError(
            "distributed_executor_backend='ray' needs Ray on every machine: pip install 'quire[ray]'"
        ) from error
    return ray


class RayRank:
    """Ray actor that runs a rank in a thread of its process."""

    def node(self) -> str:
        return str(_ray().get_runtime_context().get_node_id())

    def init_method(self) -> str:
        """Return the rendezvous URL of all ranks, on the machine of the first one."""
        return free_address(_ray().util.get_node_ip_address())

    def begin(self, place: RankAddress, host: str, port: int, token: str) -> None:
        """Start the rank in a thread, which connects to the executor at `host` and `port`; return at once."""
        name_process(place.name)
        threading.Thread(target=_run, args=(place, host, port, token), daemon=True).start()


def _run(place: RankAddress, host: str, port: int, token: str) -> None:
    """Serve the connection of a rank to its executor; end the process when the connection ends."""
    try:
        index = replace(place.rank, dp=0).index(place.config.parallel)
        node = Node(index, host, configure_socket(socket.create_connection((host, port))))
        node.send(Join(index, {}, token))
        rank = NodePort(node)
        while True:
            match decode_from_head(node.pipe.recv_bytes(LONGEST)):
                case Welcome(init_method):
                    placed = replace(place, init_method=init_method, interface=interface_to(host))
                    threading.Thread(target=_serve, args=(placed, rank), daemon=True).start()
                case OrderMessage(data):
                    rank.orders.put(decode_order(data))
                case PlanMessage(data):
                    rank.plans.put(data)
                case HeadEnd():
                    break
    except (EOFError, OSError) as error:
        log.debug("The connection to the engine is lost: %r", error)
    finally:
        os._exit(0)


def _serve(place: RankAddress, port: Port) -> None:
    try:
        serve(place, port)
    finally:
        time.sleep(_LAST_S)
        os._exit(1)


class NodePort:
    """The connection of a rank to its executor over TCP."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self.plans: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def order(self) -> Order:
        return self.orders.get()

    def report(self, message: FromRank) -> None:
        self._node.send(RankMessage(0, message))

    def plan(self) -> bytes:
        return self.plans.get()

    def answer(self, outcome: bytes) -> None:
        self._node.send(StepAnswer(outcome))

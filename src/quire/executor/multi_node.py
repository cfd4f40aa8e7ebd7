"""An engine on several machines: the worker group of the first machine, and the agent of the others."""

import contextlib
import hashlib
import os
import queue
import signal
import socket
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from quire.config.engine import EngineConfig
from quire.config.env import Env
from quire.errors import ConfigError
from quire.executor.tcp import (
    JOIN_TIMEOUT_S,
    LONGEST,
    LOOK_S,
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
from quire.executor.worker_group import LocalRanks
from quire.executor.worker_process import local_ranks, world_size
from quire.logs import get_logger
from quire.system.cluster_token import cluster_token
from quire.system.node_registry import free_address
from quire.version import __version__

log = get_logger(__name__)

RETRY_S = 0.5


def shared_settings(config: EngineConfig) -> dict[str, str]:
    """Return the settings that must be the same on every machine, as text."""
    parallel = {
        name: getattr(config.parallel, name)
        for name in ("nnodes", "tensor_parallel_size", "pipeline_parallel_size", "pp_layer_partition")
    }
    model = {
        name: getattr(config.model, name)
        for name in ("dtype", "quantization", "max_model_len", "seed", "logprobs_mode", "enforce_eager")
    }
    facts = hashlib.sha256(repr(config.checkpoint.facts).encode()).hexdigest()[:12]
    named = {
        "version": __version__,
        "model": f"{config.checkpoint.facts.architecture} ({facts})",
        "device": config.machine.device,
        "block_size": config.cache.block_size,
        "kv_cache_dtype": config.cache.kv_cache_dtype,
        "max_num_seqs": config.scheduler.max_num_seqs,
        "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
        "lora": config.lora,
    }
    return {name: str(value) for name, value in (named | model | parallel).items()}


# ---- the first machine


class MultiNodeRanks(RemoteRanks):
    """Runs the local ranks as child processes, and the ranks of other machines through their agents."""

    def __init__(self, config: EngineConfig, timeout_s: float) -> None:
        parallel = config.parallel
        self._settings = shared_settings(config)
        self._local: LocalRanks | None = None
        count, others = world_size(parallel) // parallel.nnodes, range(1, parallel.nnodes)
        where = parallel.master_addr, parallel.master_port
        token = cluster_token(Env.read(os.environ), parallel.master_addr)
        super().__init__(_listen(*where), others, count, token=token, check=self._check_settings)
        log.info("Waiting for %d other nodes, which connect to %s:%d", len(others), *where)
        try:
            if not self.await_all(time.monotonic() + timeout_s):
                raise ConfigError(
                    f"no word from node {', '.join(map(str, self.missing))} of {parallel.nnodes} within "
                    f"{timeout_s:g} s (VLLM_ENGINE_READY_TIMEOUT_S): start it with --node-rank and the same "
                    f"--nnodes, --master-addr and --master-port{self.refusals}"
                )
        except BaseException as error:
            self.end_reason = str(error)
            self.end()
            raise
        init_method, interface = free_address(parallel.master_addr), interface_to(parallel.master_addr)
        places = [local_ranks(config, rank, init_method, interface) for rank in range(parallel.nnodes)]
        self.names = [place.name for node in places for place in node]
        self._local_sends_results = any(place.sends_results for place in places[0])
        self.welcome(init_method)
        self._local = LocalRanks(places[0], self.messages)

    def _check_settings(self, join: Join) -> str | None:
        local, remote = self._settings, join.settings
        differ = [name for name in local | remote if local.get(name) != remote.get(name)]
        if not differ:
            return None if join.node_rank in self._awaited else f"is not one of 1 to {len(self._awaited)}"
        name = min(differ, key=lambda name: (name != "version", name != "nnodes", name))
        return (
            f"was started with {name}={remote.get(name)}, and the first with {name}={local.get(name)}: start"
            " all with the same"
        )

    def send_order(self, order: bytes) -> None:
        super().send_order(order)
        assert self._local is not None
        self._local.send_order(order)

    def send(self, plan: bytes, timeout_s: float) -> None:
        super().send(plan, timeout_s)
        assert self._local is not None
        self._local.send(plan, timeout_s)

    def receive(self, timeout_s: float) -> bytes | None:
        if self._local_sends_results and self._local is not None:
            return self._local.receive(timeout_s)
        return super().receive(timeout_s)

    def end(self) -> None:
        super().end()
        if self._local is not None:
            self._local.end()


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=128)
    except OSError as error:
        raise ConfigError(
            f"the engine cannot listen for other machines on {host}:{port} ({os.strerror(error.errno or 0)}):"
            " give a free --master-port, and this machine's own address as --master-addr"
        ) from error


# ---- the other machines


class NodeAgent:
    """Runs this machine's ranks for the engine on the first machine; reconnects if the engine restarts."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        env = Env.read(os.environ)
        self.timeout_s = env.timeouts.engine_ready_timeout_s
        self._token = cluster_token(env, config.parallel.master_addr)
        self.was_up = False
        self.stopping = False
        self._worker_group: LocalRanks | None = None

    def run(self) -> int:
        """Run until the engine ends, or a signal arrives; return the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        try:
            while (end := self._serve(self._connect())) is None or self._may_reconnect(end):
                log.error("The engine on the first machine ended%s", f": {end.problem}" if end else "")
                time.sleep(RETRY_S)
            if end.problem:
                raise ConfigError(end.problem)
            return 0
        except KeyboardInterrupt:
            return 0
        finally:
            self._end_ranks()

    def _may_reconnect(self, end: HeadEnd) -> bool:
        """Whether the engine ended after it had started completely, so that it may be restarted and this
        machine should connect again."""
        return bool(end.problem) and self.was_up and not end.is_final

    def _on_signal(self, *_: object) -> None:
        raise KeyboardInterrupt

    def _connect(self) -> Connection:
        """Connect to the first machine, and retry until the deadline."""
        parallel, deadline = self.config.parallel, time.monotonic() + self.timeout_s
        where = parallel.master_addr, parallel.master_port
        log.info("Node %d connects to the engine at %s:%d", parallel.node_rank, *where)
        while time.monotonic() < deadline:
            try:
                return configure_socket(socket.create_connection(where, timeout=JOIN_TIMEOUT_S))
            except OSError:
                time.sleep(RETRY_S)
        raise ConfigError(
            f"no engine at {where[0]}:{where[1]} within {self.timeout_s:g} s (VLLM_ENGINE_READY_TIMEOUT_S):"
            " start the first machine with --node-rank 0, or correct --master-addr and --master-port"
        )

    def _serve(self, head: Connection) -> HeadEnd | None:
        """Handle the engine's messages until it ends; return the last one, or None if the connection is
        lost."""
        send = Node(0, self.config.parallel.master_addr, head).send
        try:
            send(Join(self.config.parallel.node_rank, shared_settings(self.config), self._token))
            while True:
                match decode_from_head(head.recv_bytes(LONGEST)):
                    case Welcome(init_method):
                        self._start_ranks(init_method, send)
                    case OrderMessage(data):
                        self._ranks.send_order(data)
                    case PlanMessage(data):
                        self.was_up = True
                        self._ranks.send(data, self.timeout_s)
                    case HeadEnd() as end:
                        return end
        except (EOFError, OSError) as error:  # also after the TCP timeout of a machine without power
            log.debug("The connection to the first machine closed: %r", error)
            return None
        finally:
            self._end_ranks()
            head.close()

    @property
    def _ranks(self) -> LocalRanks:
        assert self._worker_group is not None, "Welcome comes first"
        return self._worker_group

    def _start_ranks(self, init_method: str, send: Any) -> None:
        parallel = self.config.parallel
        places = local_ranks(self.config, parallel.node_rank, init_method, interface_to(parallel.master_addr))
        worker_group = self._worker_group = LocalRanks(places)

        def relay_messages() -> None:
            while self._worker_group is worker_group:
                with contextlib.suppress(queue.Empty):
                    send(RankMessage(*worker_group.messages.get(timeout=LOOK_S)))

        def relay_answers() -> None:
            while self._worker_group is worker_group:
                if (data := worker_group.receive(LOOK_S)) is not None:
                    send(StepAnswer(data))

        threading.Thread(target=relay_messages, daemon=True).start()
        if any(place.sends_results for place in places):
            threading.Thread(target=relay_answers, daemon=True).start()

    def _end_ranks(self) -> None:
        worker_group, self._worker_group = self._worker_group, None
        if worker_group is not None:
            worker_group.end()


def run_node(config: EngineConfig) -> int:
    """Run `quire serve --headless` on a machine that is not the first."""
    return NodeAgent(config).run()

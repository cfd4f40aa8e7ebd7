"""The supervisor: binds the port, starts core and API processes, restarts those that die, and shuts down.

It imports neither the engine nor the web server: only the processes that it starts do. Modules that only some
servers need (for several machines, API keys or LoRA adapters) are imported where they are used. This saves
memory, and time before the processes start.
"""

import functools
import multiprocessing
import os
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.config.data_parallel import Topology, lay_out
from quire.config.engine import EngineConfig
from quire.config.env import Env
from quire.config.expert_parallel import steps_together
from quire.config.mm_caches import cache_kind, engine_holds_values, max_bytes
from quire.core.child import KILL_AFTER_S, clear_gauges, core_child
from quire.core.facts import CoreFacts
from quire.errors import ConfigError
from quire.frontend.prefix_map import PrefixMap
from quire.logs import get_logger
from quire.metrics.pages import MetricsLayout, MetricsPages
from quire.server.api_keys import key_names
from quire.server.http.accept import ConnectionDealer
from quire.server.http.sockets import bind
from quire.server.lora.modules import LoRAModule
from quire.server.lora.registry import LoRARegistry
from quire.server.settings import ServerSettings
from quire.system.child import Child
from quire.system.cluster_token import cluster_token, new_token
from quire.system.platform import hardware_threads, thread_advice
from quire.system.process import imports_frozen, raise_file_limit
from quire.system.scratch import Scratch
from quire.system.shared_cache import create_shared_memory
from quire.system.waiting_process import WaitingProcess

if TYPE_CHECKING:
    from quire.system.node_registry import Announcer, NodeRegistry

log = get_logger(__name__)


class Supervisor:
    """Starts the processes of engine cores and API servers, and restarts those that die, until the server is
    stopped."""

    def __init__(
        self,
        config: EngineConfig,
        settings: ServerSettings,
        topology: Topology,
        folder: Path,
        early: WaitingProcess | None = None,
    ) -> None:
        self.config = config
        self.settings = replace(settings, http=replace(settings.http, api_server_count=topology.num_api))
        self.topology = topology
        self.folder = folder
        """Folder of sockets and shared files."""
        self._metrics_file, self._prefix_file = folder / "metrics", folder / "prefixes"
        self._key_file, self._adapters_file = folder / "keys", folder / "adapters"
        self._media_fd = self._create_media_memory()
        """File descriptor of the media cache that all API processes share; None if they share none."""
        self.ready_timeout_s = Env.read(os.environ).timeouts.engine_ready_timeout_s
        self.listener = bind(settings.http) if topology.num_api else None
        if self.listener is not None and not settings.http.uds:
            bound_http = replace(self.settings.http, port=self.listener.getsockname()[1])
            self.settings = replace(self.settings, http=bound_http)
        self.dealer: ConnectionDealer | None = None
        if self.listener is not None and topology.num_api > 1:
            self.dealer = ConnectionDealer(self.listener, self.folder / "closed", topology.num_api)
        self.context = multiprocessing.get_context("spawn")
        self.token = self._choose_token()
        self.addresses = self._local_addresses()
        self.registry = self._open_registry()
        self.announcer = self._open_announcer()
        self.cores = {
            rank: core_child(config, rank, self._core_facts(rank), topology.size, early)
            for rank in topology.local
        }
        self.apis = [
            Child(f"API server {index}", functools.partial(self._make_api, index))
            for index in range(topology.num_api)
        ]
        self.stopping = False

    def _create_media_memory(self) -> int | None:
        section, num_engines = self.config.multimodal, len(self.topology.served)
        num_api = self.topology.num_api
        kind = cache_kind(section, self.config.parallel, num_api=num_api, num_engines=num_engines)
        if kind != "shared" or self.config.checkpoint.facts.media is None:
            return None
        return create_shared_memory(max_bytes(section))

    def _choose_token(self) -> str:
        """Return the token that the cores expect of clients. If API processes use cores on other machines, it
        is the cluster token, which all machines share. Otherwise a new token is generated."""
        topology, parallel = self.topology, self.config.parallel
        is_spread = len(topology.local) < topology.size
        if is_spread and (topology.remote or not topology.num_api or steps_together(parallel)):
            return cluster_token(Env.read(os.environ), parallel.data_parallel_address)
        return new_token()

    def _local_addresses(self) -> dict[int, str]:
        """Return the addresses of the local cores: IPC sockets, or TCP ports for a headless server, since its
        cores are used from another machine."""
        if self.topology.num_api:
            return {rank: f"ipc://{self.folder}/core{rank}" for rank in self.topology.local}
        from quire.system.node_registry import free_address, own_address

        host = own_address(self.config.parallel.data_parallel_address, Env.read(os.environ).host_ip)
        return {rank: free_address(host) for rank in self.topology.local}

    def _address_of(self, rank: int) -> str | Path:
        """Return the address of a core on this machine; for a core on another machine, the file in which the
        node registry stores its address."""
        if self.registry is None or rank in self.addresses:
            return self.addresses[rank]
        return self.registry.file_of(self.folder, rank)

    def _open_registry(self) -> "NodeRegistry | None":
        if not self.topology.remote:
            return None
        from quire.system.node_registry import NodeRegistry

        parallel = self.config.parallel
        return NodeRegistry(
            parallel.data_parallel_address,
            parallel.data_parallel_rpc_port,
            size=self.topology.size,
            awaited=self.topology.remote,
            folder=self.folder,
            token=self.token,
        )

    def _open_announcer(self) -> "Announcer | None":
        if self.topology.num_api:
            return None
        from quire.system.node_registry import Announcer

        parallel = self.config.parallel
        return Announcer(
            parallel.data_parallel_address,
            parallel.data_parallel_rpc_port,
            size=self.topology.size,
            addresses=self.addresses,
            token=self.token,
        )

    @property
    def _children(self) -> list[Child]:
        return [*self.cores.values(), *self.apis]

    def _core_facts(self, rank: int) -> CoreFacts:
        engines = self.topology.served or self.topology.local
        return CoreFacts(
            address=self.addresses[rank],
            metrics_file=self._metrics_file,
            token=self.token,
            page=rank - engines.start,
            num_pages=len(engines),
            index=rank - self.topology.local.start,
            num_local=len(self.topology.local),
            keeps_media=engine_holds_values(
                self.config.multimodal,
                self.config.parallel,
                num_api=self.topology.num_api,
                num_engines=len(engines),
            ),
        )

    def _make_api(self, index: int, parent: connection.Connection) -> BaseProcess:
        connections = self.listener if self.dealer is None else self.dealer.open(index)
        addresses = {rank: self._address_of(rank) for rank in self.topology.served}
        files = (self._metrics_file, self._prefix_file, self._key_file, self._adapters_file)
        media = "" if self._media_fd is None else f"/proc/{os.getpid()}/fd/{self._media_fd}"
        args = (index, self.config, self.settings, connections, addresses, self.token, *files, media, parent)
        return self.context.Process(target=_run_api, args=args, name=f"APIServer{index}")

    def run(self) -> int:
        """Start all processes and supervise them until a signal or an error; return the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self._warn_about_threads()
        engines = self.topology.served or self.topology.local
        layout = MetricsLayout.of(self.config)
        MetricsPages.create(self._metrics_file, layout, num_api=len(self.apis), num_engines=len(engines))
        PrefixMap.create(self._prefix_file)
        if names := key_names(self.settings.keys):
            from quire.metrics.api_keys import KeyPages

            KeyPages.create(self._key_file, len(names), num_api=len(self.apis))
        LoRARegistry.create(self._adapters_file, _locate_modules(self.settings))
        problem = ""
        try:
            for child in self._children:
                child.start()
            # Wait longer than the cores: their time limit began later, and their error names the late ranks.
            deadline = time.monotonic() + self.ready_timeout_s + KILL_AFTER_S
            while not self.stopping:
                self._handle_events()
                if time.monotonic() > deadline:
                    self._check_all_were_up()
            return self._drain()
        except ConfigError as error:
            problem = str(error)
            raise
        finally:
            for child in reversed(self._children):
                child.end(signal.SIGKILL, KILL_AFTER_S)
            self._close_listener()
            if self._media_fd is not None:
                os.close(self._media_fd)
            if self.registry is not None:
                self.registry.close(problem)
            if self.announcer is not None:
                self.announcer.close(problem)
            if self.settings.http.uds:
                Path(self.settings.http.uds).unlink(missing_ok=True)

    def _warn_about_threads(self) -> None:
        parallel = self.config.parallel
        advice = thread_advice(
            self.config.machine.device,
            num_threads=hardware_threads(),
            num_api=len(self.apis),
            num_engines=len(self.topology.local),
            num_workers=parallel.tensor_parallel_size
            * parallel.pipeline_parallel_size
            * len(self.topology.local),
        )
        if advice is not None:
            log.warning(advice)

    def _check_all_were_up(self) -> None:
        for child in self.cores.values():
            if not child.was_up:
                raise ConfigError(f"{child.name} was not up within {self.ready_timeout_s:g} s")
        if self.registry is not None and not self.registry.was_complete:
            raise ConfigError(self.registry.overdue(self.ready_timeout_s))

    def _close_listener(self) -> None:
        if self.listener is not None:
            self.listener.close()
        if self.dealer is not None:
            self.dealer.close()

    def _on_signal(self, *_: object) -> None:
        if self.stopping:  # second signal: stop at once
            raise KeyboardInterrupt
        self.stopping = True

    def _handle_events(self) -> None:
        """Wait at most 0.1 s for an event of the child processes or a new connection, and handle it."""
        children = self._children
        events: list[Any] = [child.process.sentinel for child in children if child.process is not None]
        events += [child.says for child in children if child.says is not None]
        events += self.dealer.readable_sockets if self.dealer is not None else ()
        connection.wait(events, timeout=0.1)
        self._restart(children)
        if self.dealer is not None:
            self._deal_connections(self.dealer)
        if self.registry is not None:
            self.registry.listen()
        if self.announcer is not None:
            is_up = all(child.was_up for child in self.cores.values())
            self.announcer.tick(is_up=is_up, timeout_s=self.ready_timeout_s)
            self.stopping = self.stopping or self.announcer.ends

    def _restart(self, children: Sequence[Child]) -> None:
        """Detect child processes that have ended, and restart those whose backoff has passed."""
        for child in children:
            child.listen()  # read startup errors before the exits they cause
        if any(not child.is_alive for child in children) and not self.folder.exists():
            raise ConfigError(
                f"{self.folder} was deleted, so that no process of the server can be restarted: start the "
                "server again, and exclude this folder from clean-ups (TMPDIR selects another place)"
            )
        for child in children:
            if child.look() and child not in self.apis:
                (rank,) = (rank for rank, core in self.cores.items() if core is child)
                clear_gauges(MetricsLayout.of(self.config), self._core_facts(rank))
            if child.restart_at is not None and time.monotonic() >= child.restart_at:
                child.start()

    def _deal_connections(self, dealer: ConnectionDealer) -> None:
        """Distribute connections to the API processes that are serving."""
        for index, child in enumerate(self.apis):
            if child.is_up:
                dealer.admit(index)
            elif child.process is None:
                dealer.drop(index)
        dealer.deal()

    def _drain(self) -> int:
        """Let API servers finish their requests for at most `shutdown_timeout` seconds, then stop the cores;
        return the exit code 0. The API servers free the port at once. A core that dies meanwhile is
        restarted, since requests may wait for it."""
        self._close_listener()
        if all(child.was_up for child in self._children):
            log.info("Shutting down; running requests get %g s", self.settings.http.shutdown_timeout)
        else:
            log.info("Shutting down before the server was ready, on a signal or after the error above")
        deadline = time.monotonic() + self.settings.http.shutdown_timeout + KILL_AFTER_S
        _terminate(self.apis)
        while time.monotonic() < deadline and any(child.is_alive for child in self.apis):
            alive = [child.process for child in self._children if child.is_alive]
            connection.wait([process.sentinel for process in alive if process is not None], timeout=0.1)
            self._restart([core for core in self.cores.values() if core.was_up])
        for child in self.apis:
            child.end(signal.SIGTERM, max(deadline - time.monotonic(), 0.1))
        _terminate(self.cores.values())
        for child in self.cores.values():
            child.end(signal.SIGTERM, KILL_AFTER_S)
        return 0


def _run_api(*args: Any) -> None:
    with imports_frozen():
        from quire.entrypoints.api_process import run_api

    run_api(*args)


def _locate_modules(settings: ServerSettings) -> list[LoRAModule]:
    if not settings.modules:
        return []
    from quire.server.lora.service import locate_modules

    return locate_modules(settings)


def _terminate(children: Iterable[Child]) -> None:
    for child in children:
        if child.process is not None and child.is_alive:
            os.kill(child.process.pid or 0, signal.SIGTERM)


def launch(config: EngineConfig, settings: ServerSettings, early: WaitingProcess | None = None) -> int:
    """Serve a model until the server is stopped; return the exit code. `early` is a process that was
    started before to run the only engine core; None: start one."""
    http = settings.http
    if config.parallel.nnodes > 1 and http.headless != (config.parallel.node_rank > 0):
        raise ConfigError(
            "with several nodes the first (--node-rank 0) serves the API, all others need --headless"
        )
    if config.parallel.node_rank > 0:
        from quire.executor.multi_node import run_node

        return run_node(config)
    topology = lay_out(config.parallel, headless=http.headless, api_server_count=http.api_server_count)
    if settings.responses is not None and topology.num_api > 1:
        raise ConfigError(
            "the store of responses (VLLM_ENABLE_RESPONSES_API_STORE) is in the memory of one API process, "
            f"but there are {topology.num_api} of them: use --api-server-count 1, or disable the store"
        )
    raise_file_limit()
    with Scratch() as scratch:
        return Supervisor(config, settings, topology, scratch.path, early).run()

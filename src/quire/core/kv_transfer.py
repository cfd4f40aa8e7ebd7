"""A server, in a thread, from which other engines read the KV cache entries of prefixes."""

import contextlib
import os
import threading
import time
import uuid
from typing import Any

import msgspec
import zmq

from quire.config.engine import EngineConfig
from quire.config.env import Env
from quire.config.kv_identity import layout_digest, transfer_layout
from quire.config.kv_transfer import LAST_PORT, TransferSettings
from quire.data.kv_tiers import BlockRead
from quire.data.kv_transfer import EntriesRead, ReadEntries
from quire.errors import ConfigError
from quire.executor import Executor
from quire.logs import FirstWarning, get_logger
from quire.sched.kv_manager import KVManager
from quire.sched.kv_offers import KVOffers, OfferAddress
from quire.system.cluster_token import VARIABLE, cluster_token, is_same
from quire.system.kv_channel import KnownEngine, token_host, zmq_address
from quire.system.socket_security import secure

log = get_logger(__name__)

MAX_BYTES = 1 << 20
"""Size limit in bytes of a message from another engine; ZMQ closes connections that send a larger message."""
WAIT_S = 0.001
"""Seconds between two checks for entries that ranks in other processes read."""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ReadEntries).decode


class OfferServer:
    """A thread that answers requests of other engines to read KV cache entries, one at a time, while steps
    run."""

    def __init__(self, layout: dict[str, str], token: str, *, host: str, port: int) -> None:
        """Open the port; 0 stands for any free port. `layout` describes the model and its cache, and must be
        the same in the engines that read; `token` is their shared secret."""
        self._layout, self._digest, self._token = layout, layout_digest(layout), token
        self._warn = FirstWarning(log, "At the port for engines that read prefixes")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._thread: threading.Thread | None = None
        try:
            address, is_v6 = zmq_address(host, port or "*")
            self._socket.setsockopt(zmq.IPV6, is_v6)
            self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
            self._socket.setsockopt(zmq.LINGER, 0)
            secure(self._socket, token, listens=True)
            self._socket.bind(address)
        except (OSError, zmq.ZMQError) as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"kv_transfer_config: port {port} at {host} cannot be opened ({error.strerror or error}): set"
                " VLLM_NIXL_SIDE_CHANNEL_HOST to an address of this machine and VLLM_NIXL_SIDE_CHANNEL_PORT"
                " to a free port"
            ) from error
        self.port = int(self._socket.getsockopt(zmq.LAST_ENDPOINT).rpartition(b":")[2].rstrip(b"\0"))  # type: ignore[union-attr]

    def start(self, offers: KVOffers, executor: Executor) -> None:
        self._thread = threading.Thread(
            target=self._run, args=(offers, executor), name="quire-kv-offers", daemon=True
        )
        self._thread.start()

    def _run(self, offers: KVOffers, executor: Executor) -> None:
        with contextlib.suppress(zmq.ContextTerminated), contextlib.closing(self._socket):
            while True:
                client, *frames = self._socket.recv_multipart()
                try:
                    message = _decode(b"".join(frames))
                except msgspec.MsgspecError as error:
                    self._warn(f"ignored a message that is none of this version: {str(error)!r:.200}")
                    continue
                if not is_same(message.token, self._token):
                    self._warn(f"ignored an engine whose {VARIABLE} differs")
                    continue
                try:
                    answer, data = self._answer(message, offers, executor)
                except Exception as error:  # the other engine computes the prefix itself
                    log.exception("A prefix could not be read for another engine, which computes it itself")
                    answer, data = EntriesRead(problem=f"an error there: {error!r:.200}"), None
                self._socket.send_multipart([client, _encode(answer), *([] if data is None else [data])])

    def _answer(
        self, message: ReadEntries, offers: KVOffers, executor: Executor
    ) -> tuple[EntriesRead, Any | None]:
        """Return the answer to a message, and the bytes of the entries; None if these were written to memory
        shared with the other engine, or if none was found."""
        if message.layout != self._digest:
            return EntriesRead(layout=self._layout), None

        def copy(ids: list[int], are_states: bool) -> Any:
            read = executor.read(BlockRead(message.rank, ids, are_states, message.target))
            while not read.done():
                executor.watch()
                time.sleep(WAIT_S)
            return read.result()

        places, data = offers.read(message.request_id, message.keys, copy)
        if message.ends:
            offers.end(message.request_id, message.rank)
        in_memory = data is not None and not len(data)
        return EntriesRead(places, in_memory), None if in_memory else data

    def close(self) -> None:
        if self._thread is None:
            self._context.destroy(linger=0)
            return
        self._context.term()  # ends the thread, which closes the socket
        self._thread.join()


class Producer:
    """The part of an engine that keeps prefixes for other engines: the offered prefixes, their server, and
    the file by which engines on this machine find the server."""

    def __init__(
        self, config: EngineConfig, settings: TransferSettings, kv: KVManager, executor: Executor
    ) -> None:
        env, rank = Env.read(os.environ), config.parallel.data_parallel_rank or 0
        host, port = env.kv.nixl_side_channel_host, env.kv.nixl_side_channel_port
        port += rank if port else 0
        if not 0 <= port <= LAST_PORT:
            raise ConfigError(f"VLLM_NIXL_SIDE_CHANNEL_PORT: {port} is not a port; use one up to {LAST_PORT}")
        engine_id = settings.engine_id or uuid.uuid4().hex
        if config.parallel.data_parallel_size > 1:
            engine_id += f"_dp{rank}"
        token = cluster_token(env, token_host(settings, host))
        self._server = OfferServer(transfer_layout(config), token, host=host, port=port)
        self._known: KnownEngine | None = None
        try:
            self._known = KnownEngine(env.cache_root, engine_id, host, self._server.port)
        except OSError as error:
            log.warning(
                "Other engines on this machine cannot find this engine: %s cannot be written; add %s:%d to"
                " their peers",
                *(error.filename, host, self._server.port),
            )
        address = OfferAddress(engine_id, host, self._server.port)
        parallel = config.parallel
        self.offers = KVOffers(
            kv,
            address,
            seconds=env.kv.nixl_abort_request_timeout,
            tp_size=parallel.tensor_parallel_size,
            num_ranks=parallel.tensor_parallel_size * parallel.pipeline_parallel_size,
        )
        self.offers.on_close = self._close
        self._server.start(self.offers, executor)
        log.info(
            "Engine %s keeps prefixes for others, which read them at %s:%d", engine_id, host, address.port
        )

    def _close(self) -> None:
        if self._known is not None:
            self._known.forget()
        self._server.close()

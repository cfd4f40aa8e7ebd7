"""The API server processes on the core's socket: their messages, and the queued messages to them."""

import time
from collections import deque
from collections.abc import Callable

import msgspec
import zmq

from quire.data.step_plan import FinishReason, StepOutput
from quire.data.wire import FromCore, StepDone, ToCore, decode_hello, decode_to_core, encode
from quire.logs import FirstWarning, get_logger
from quire.system.cluster_token import is_same
from quire.system.socket_security import secure

log = get_logger(__name__)

HIGH_WATER = 256
"""Messages that ZMQ buffers for a client. A step of a thousand rows is one message of 50 KB."""
MAX_QUEUED_BYTES = 32 << 20
"""Maximum bytes queued for a client in addition to the messages that ZMQ buffers."""


class Queue:
    """Messages to one client that ZMQ could not send yet, in order. Each is stored with the ids of the
    requests that end with it."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._messages: deque[tuple[bytes, list[str]]] = deque()

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def first(self) -> bytes:
        return self._messages[0][0]

    @property
    def ended(self) -> list[str]:
        return [request_id for _, ended in self._messages for request_id in ended]

    def push(self, data: bytes, ended: list[str]) -> None:
        self._messages.append((data, ended))
        self.num_bytes += len(data)

    def pop(self) -> None:
        self.num_bytes -= len(self._messages.popleft()[0])


class Clients:
    """The clients (API server processes) by ZMQ identity, and the client of each request.

    Sending never blocks. Messages that a client does not read are queued up to a limit. Beyond the limit, all
    requests of the client are aborted, and its next message ends them with an error.
    """

    def __init__(
        self,
        address: str,
        give_up: Callable[[list[str]], None],
        *,
        token: str,
        high_water: int = HIGH_WATER,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
    ) -> None:
        self._address, self._token = address, token
        self._ignore = FirstWarning(log, f"Ignored at {self._address}")
        self._give_up = give_up
        self._max_queued_bytes = max_queued_bytes
        self.known: set[bytes] = set()
        """Clients that sent a Hello and are still connected."""
        self.owner: dict[str, bytes] = {}
        """Client of each request, by request id."""
        self.queues: dict[bytes, Queue] = {}
        """Queues of messages to clients that read too slowly; an empty queue is removed."""
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, high_water)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        if address.startswith("tcp:"):
            secure(self._socket, token, listens=True)
        self._socket.bind(address)

    def close(self) -> None:
        self._socket.close()

    def wait(self, timeout_s: float, also: "zmq.Socket[bytes] | None" = None) -> None:
        """Wait at most `timeout_s` seconds for a message on this socket or on the socket `also`."""
        try:
            zmq.select([self._socket, *([] if also is None else [also])], [], [], timeout_s)
        except zmq.ZMQError as error:
            log.debug("Waiting for messages was interrupted: %s", error)

    def receive(self) -> tuple[bytes, ToCore] | None:
        """Return the client and the message that arrived next, or None if no message has arrived.

        Any host that reaches the address may send anything: from unknown peers only a Hello with the token is
        read, and invalid messages are skipped.
        """
        while True:
            try:
                client, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            data = b"".join(parts)
            try:
                if client in self.known:
                    return client, decode_to_core(data)
                hello = decode_hello(data)
            except msgspec.MsgspecError as error:
                self._ignore(f"a message that is none of this version: {str(error)!r:.200}")
                continue
            if is_same(hello.token, self._token):
                self.known.add(client)
                return client, hello
            self._ignore("a Hello with another token")

    def send(self, client: bytes, message: FromCore) -> None:
        """Send a message to a client, or queue it if earlier messages are queued or ZMQ's buffer is full. If
        the queue exceeds its limit, all requests of the client are aborted. Never blocks."""
        data = encode(message)
        if client not in self.queues and self._offer(client, data):
            return
        queue = self.queues.setdefault(client, Queue())
        queue.push(data, list(message.output.finished) if isinstance(message, StepDone) else [])
        if queue.num_bytes > self._max_queued_bytes:
            self._overflow(client, queue)

    def flush(self) -> None:
        """Send queued messages until ZMQ accepts no more."""
        for client, queue in list(self.queues.items()):
            while client in self.queues and self._offer(client, queue.first):
                queue.pop()
                if not queue:
                    self.queues.pop(client, None)

    def _offer(self, client: bytes, data: bytes) -> bool:
        """Send without blocking; return False if ZMQ's buffer for the client is full."""
        try:
            self._socket.send_multipart([client, data], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError:
            self._forget(client)
        return True

    def _overflow(self, client: bytes, queue: Queue) -> None:
        """Replace a full queue by one message, which ends all requests of the client with an error."""
        owned = self._owned(client)
        log.error(
            "An API process does not read the outputs of this core: %d messages (%d bytes) are queued. "
            "Its %d requests are aborted",
            len(queue),
            queue.num_bytes,
            len(owned),
        )
        lost = {request_id: FinishReason("error") for request_id in [*queue.ended, *owned]}
        queue = self.queues[client] = Queue()
        queue.push(encode(StepDone(StepOutput([], [], finished=lost, at=time.monotonic()))), list(lost))
        self._give_up(owned)

    def _forget(self, client: bytes) -> None:
        """Drop a client that is gone, and abort its requests."""
        self.known.discard(client)
        self.queues.pop(client, None)
        self._give_up(self._owned(client))

    def _owned(self, client: bytes) -> list[str]:
        return [request_id for request_id, owner in self.owner.items() if owner == client]

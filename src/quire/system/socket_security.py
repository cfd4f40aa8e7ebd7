"""Encryption of TCP sockets by the cluster token, and the outcomes of their handshakes."""

import hashlib

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from quire.errors import ConfigError

FAILURES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
MISMATCHES = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
MAX_FAILURES = 3
"""Failed handshakes in a row after which the token counts as wrong; one may fail because the peer ends."""


def secure(sock: "zmq.Socket[bytes]", token: str, *, listens: bool) -> None:
    """Configure encryption of a TCP socket (CURVE), so that only peers with the same token can connect.

    The listener's key pair is derived from the token. A handshake needs its public key, which is never sent,
    so that only processes with the token can complete a handshake. Must be called before `bind` or `connect`.
    """
    if not token:
        return
    if not zmq.has("curve"):
        raise ConfigError(
            "this build of libzmq has no CURVE, so connections with a cluster token would not be encrypted: "
            "install pyzmq from its wheels, or unset QUIRE_CLUSTER_TOKEN"
        )
    secret = z85.encode(hashlib.sha256(b"quire-curve:" + token.encode()).digest())
    public = zmq.curve_public(secret)
    if listens:
        sock.setsockopt(zmq.CURVE_SERVER, 1)
        sock.setsockopt(zmq.CURVE_SECRETKEY, secret)
        sock.setsockopt(zmq.CURVE_PUBLICKEY, public)
        return
    sock.setsockopt(zmq.CURVE_SERVERKEY, public)
    for option, key in zip((zmq.CURVE_PUBLICKEY, zmq.CURVE_SECRETKEY), zmq.curve_keypair(), strict=True):
        sock.setsockopt(option, key)


class Handshakes:
    """The outcomes of a connecting socket's encryption handshakes: whether the socket is connected, or its
    token is refused."""

    def __init__(self) -> None:
        self.num_failed = 0
        self.is_connected = False

    @property
    def is_refused(self) -> bool:
        return self.num_failed >= MAX_FAILURES

    def note(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.num_failed, self.is_connected = 0, True
        elif event == zmq.EVENT_DISCONNECTED:
            self.is_connected = False
        elif event & FAILURES:
            self.num_failed += 1
        elif event & MISMATCHES:  # ZMQ does not try again
            self.num_failed = MAX_FAILURES


def events_of(monitor: "zmq.Socket[bytes]") -> list[tuple[int, int]]:
    """Return the ZMQ socket events (event, value) that a monitor socket has reported since the last call;
    does not wait."""
    events = []
    while monitor.poll(0):
        message = recv_monitor_message(monitor)
        events.append((int(message["event"]), int(message["value"])))
    return events

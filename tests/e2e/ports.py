"""Free ports for servers in tests."""

import itertools
import os
import socket

_FIRST, _SPAN, _WORKERS = 11_000, 1_250, 16
"""Port numbers below those that systems assign to connections (from 32,768 on Linux), so that none is taken
before the server starts. Each worker of pytest has a range of its own."""
_numbers = itertools.count(os.getpid() * 7)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port without a listener that no other call returns soon."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _WORKERS
    for number in itertools.islice(_numbers, _SPAN):
        port = _FIRST + worker * _SPAN + 5 * number % _SPAN
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
        return port
    raise OSError("no port is free")

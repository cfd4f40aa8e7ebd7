"""Ports for servers of tests."""

import itertools
import os
import socket

_FIRST, _SPAN, _WORKERS = 11_000, 1_250, 16
"""Below the ports that systems give to connections (32,768 on Linux): none of them takes a port between its
choice and the start of the server. Each worker of pytest has ports of its own."""
_numbers = itertools.count(os.getpid() * 7)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port without a listener, which no other call returns soon."""
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

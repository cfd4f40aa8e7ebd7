"""Tests of several API processes behind one port: each gets its share of the connections."""

import resource
import socket
from collections import Counter

import psutil
import pytest
from serve_process import PATIENCE_S, ServeProcess, Start, eventually

NUM_API = 4
ASK = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"


def open_by_process(server: ServeProcess) -> Counter[int]:
    """Return the number of connections of each API process."""
    return Counter(
        {
            pid: sum(
                connection.status == psutil.CONN_ESTABLISHED and connection.laddr.port == server.port
                for connection in psutil.Process(pid).net_connections(kind="tcp")
            )
            for pid in server.with_role("APIServer")
        }
    )


def connect(server: ServeProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)


def check_even(server: ServeProcess, expected: int) -> None:
    """Check that no process has most of the connections, and that each has some. The shares are not equal on
    a busy machine, where a process may get less CPU than another."""
    eventually("all connections are accepted", lambda: open_by_process(server).total() == expected)
    result = open_by_process(server)
    assert len(result) == NUM_API and min(result.values()) > 0, result
    assert max(result.values()) <= 0.6 * expected, result


def test_connections_are_spread_evenly(start: Start) -> None:
    """Catches the first process to wake up that accepts all waiting connections. Requests are completed after
    the check, since the server closes idle connections."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    server = start("--api-server-count", str(NUM_API), "--request-header-timeout", "600")
    server.until_healthy(num_api=NUM_API)
    server.client.close()
    for count in (64, 256, 1024):
        eventually("no client is connected", lambda: open_by_process(server).total() == 0)
        clients = [connect(server) for _ in range(count)]
        check_even(server, count)
        for client in clients:
            client.sendall(ASK)
        assert all(client.recv(12) == b"HTTP/1.1 200" for client in clients)
        for client in clients:
            client.close()
    eventually("no client is connected", lambda: open_by_process(server).total() == 0)
    trickle = []
    for number in range(48):
        trickle.append(connect(server))
        eventually("it is accepted", lambda: open_by_process(server).total() == len(trickle))
        if number % 3 == 2:  # some disconnect early
            trickle.pop(0).close()
            eventually("it is closed", lambda: open_by_process(server).total() == len(trickle))
    check_even(server, len(trickle))
    for client in trickle:
        client.close()
    server.end_cleanly()


@pytest.mark.parametrize("num_api", [2])
def test_unix_socket_is_shared(start: Start, tmp_path_factory: pytest.TempPathFactory, num_api: int) -> None:
    path = tmp_path_factory.mktemp("u") / "s"
    server = start("--uds", str(path), "--api-server-count", "2")
    eventually("both processes serve", lambda: server.text().count("Started server process") == 2)
    for _ in range(4):
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(PATIENCE_S)
            client.connect(str(path))
            client.sendall(ASK)
            assert client.recv(12) == b"HTTP/1.1 200"
    server.end_cleanly()
    assert not path.exists()

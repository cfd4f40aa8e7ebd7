"""Tests that CPU time is attributed to the process that used it."""

import os
import subprocess
import sys

import pytest
from fake_openai import FakeServer

from quire.bench.cpu import CpuUsage, CpuWatch, check_pid, listening_pids, report
from quire.errors import ConfigError

CHILD = """
import sys, time
sys.stdin.readline()
end = time.process_time() + 0.3
while time.process_time() < end:
    pass
print("spent", flush=True)
sys.stdin.readline()
"""


def test_children_are_counted_and_idle_processes_are_not() -> None:
    """Check a child that uses 0.3 s of CPU time."""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        watch = CpuWatch([os.getpid()])
        child.stdin.write("\n")
        child.stdin.flush()
        child.stdout.readline()
        spent = {item.pid: item for item in watch.spent()}
        child.stdin.close()
    burnt = spent[child.pid].user_s + spent[child.pid].system_s
    assert burnt > 0.25
    assert spent[os.getpid()].user_s < burnt and spent[os.getpid()].role == "client (this process)"


def test_ended_process_is_omitted() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    watch = CpuWatch([os.getpid()])
    child.wait()
    pids = {item.pid for item in watch.spent()}  # possibly with children of other tests
    assert os.getpid() in pids and child.pid not in pids
    assert CpuWatch([child.pid]).spent() == []


def test_listener_of_a_port() -> None:
    with FakeServer() as server:
        assert listening_pids(server.port) == [os.getpid()]
    assert listening_pids(server.port) == []


def test_oldest_listener_of_a_shared_socket_is_found() -> None:
    """Check a supervisor whose socket is inherited by API processes; the engine is a child of the
    supervisor.
    """
    code = "import os, socket, sys\ns = socket.create_server(('127.0.0.1', 0))\n"
    code += "if os.fork(): print(s.getsockname()[1], flush=True)\nsys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        assert listening_pids(int(parent.stdout.readline())) == [parent.pid]
        parent.stdin.close()


def test_shares_are_of_one_core() -> None:
    title, line = report([CpuUsage(7, "quire:core", 1.5, 0.5)], seconds=4.0, num_tokens=50_000)
    assert line.split() == ["quire:core", "7", "1.50", "0.50", "50.0%", "40.0"] and "of one core" in title


def test_invalid_pid_is_rejected() -> None:
    with pytest.raises(ConfigError, match="--server-pid 99999999"):
        check_pid(99999999)

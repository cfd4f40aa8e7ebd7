"""Messages between processes are never pickles: data from a socket cannot run code.

Guards against the classes of CVE-2024-11041, CVE-2024-9052, CVE-2024-9053, CVE-2025-29783, CVE-2025-30165,
CVE-2025-32444 and CVE-2025-47277."""

import ast
import os
import pickle
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.core.dp_sync import _called, _from_engine, _hello
from quire.data.codec import decode_masks, decode_outcome, decode_plan
from quire.data.wire import decode_from_core, decode_hello, decode_to_core
from quire.executor.messages import decode_call, decode_from_rank, decode_order
from quire.executor.tcp import RemoteRanks, configure_socket, decode_from_head, decode_from_node, decode_join
from quire.system.node_registry import JoinNode, NodeJoined

SOURCE = Path(__file__).parents[2] / "src" / "quire"
LOADERS = {("pickle", "loads"), ("pickle", "load"), ("pickle", "Unpickler"), ("marshal", "loads")}
ALLOWED = {
    "executor/worker_process.py": 1,
    "kernels/triton/compile_server.py": 1,
    "system/pickled_calls.py": 2,
    "worker/weight_transfer.py": 1,
}
"""Number of allowed uses of pickle by file. Ranks and a process that compiles kernels read from their parent
over an inherited socket pair. All other uses need VLLM_ALLOW_INSECURE_SERIALIZATION=1."""
DECODERS: dict[str, Callable[[bytes], Any]] = {
    "to core": decode_to_core,
    "from core": decode_from_core,
    "hello": decode_hello,
    "to the hub": _from_engine,
    "hello to the hub": _hello,
    "from the hub": _called,
    "enlist": lambda data: msgspec.msgpack.decode(data, type=JoinNode),
    "noted": lambda data: msgspec.msgpack.decode(data, type=NodeJoined),
    "join": decode_join,
    "from node": decode_from_node,
    "from head": decode_from_head,
    "order": decode_order,
    "from rank": decode_from_rank,
    "call": lambda data: decode_call(b"\xc1" + data),
    "plan": decode_plan,
    "masks": decode_masks,
    "outcome": decode_outcome,
}


class Mark:
    """Object with a pickle that makes a directory when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def pickles(path: Path) -> list[bytes]:
    return [pickle.dumps(Mark(path), protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]


@pytest.mark.parametrize("name", DECODERS)
def test_pickle_is_not_a_valid_message(name: str, tmp_path: Path) -> None:
    for data in pickles(tmp_path / "ran"):
        with pytest.raises((msgspec.MsgspecError, ValueError)):
            DECODERS[name](data)
    assert not (tmp_path / "ran").exists()


def test_pickles_sent_to_the_node_port_are_not_loaded(tmp_path: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    worker_group = RemoteRanks(listener, range(1, 2), 1, token="")
    for data in pickles(tmp_path / "ran"):
        pipe = configure_socket(socket.create_connection(listener.getsockname()))
        pipe.send_bytes(data)
        with pytest.raises((EOFError, OSError)):
            pipe.recv_bytes()
        pipe.close()
    worker_group.end()
    assert not (tmp_path / "ran").exists() and not worker_group.nodes


def test_no_other_code_loads_pickles() -> None:
    """Finds uses of pickle by name, and of `Connection.recv` for data from a network."""
    counts: dict[str, int] = {}
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        if not any(f"{module}.{name}" in text for module, name in LOADERS):
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
                continue
            if (node.value.id, node.attr) in LOADERS:
                name = str(path.relative_to(SOURCE))
                counts[name] = counts.get(name, 0) + 1
    assert counts == ALLOWED
    network = ast.parse((SOURCE / "executor" / "tcp.py").read_text())
    read = {node.attr for node in ast.walk(network) if isinstance(node, ast.Attribute)}
    assert "recv_pyobj" not in read and "recv_bytes" in read

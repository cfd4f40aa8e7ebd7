"""Compilation of Triton kernels in the processes of `kernels/compile_processes.py`, without a GPU.

The compiled kernels are stored in Triton's cache directory."""

import contextlib
import gc
import importlib
import io
import os
import pickle
import sys
from multiprocessing.connection import Connection
from typing import Any

import triton
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from quire.errors import one_line
from quire.kernels.triton.launcher_lock import lock_launchers

_PRELOADED = ("ops", "attention_launch", "sampling", "masks", "matmul", "qkv")
"""Modules of the kernels of most models, imported once for all processes."""


class _Pickler(pickle.Pickler):
    """Pickles kernels and other jitted functions by name, with their hash. Triton's hash of a function
    depends on which functions were hashed before it, and is a part of the kernel's key in the cache."""

    def persistent_id(self, item: Any) -> Any:
        if not isinstance(item, JITFunction):
            return None
        return item.fn.__module__, item.fn.__qualname__, item.cache_key


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, name: Any) -> Any:
        module, qualname, cache_key = name
        function = getattr(importlib.import_module(module), qualname)
        function.hash = cache_key
        return function


def encode_job(source: ASTSource, target: Any, options: dict[str, Any]) -> bytes:
    """Return the message that describes the compilation of a kernel. Raise an error if another process cannot
    import the kernel."""
    buffer = io.BytesIO()
    parts = source.fn, source.signature, source.constants, source.attrs, target, options
    _Pickler(buffer).dump(parts)
    return buffer.getvalue()


def compile_job(job: bytes) -> None:
    """Compile the kernel that a message of `encode_job` describes, and build its launcher."""
    # Trusted: the parent created the connection.
    kernel, signature, constants, attrs, target, options = _Unpickler(io.BytesIO(job)).load()
    compiled = triton.compile(ASTSource(kernel, signature, constants, attrs), target=target, options=options)
    build_launcher(compiled)


def build_launcher(compiled: Any) -> None:
    """Build the launcher of a compiled kernel: a C extension that starts it, in versions of Triton that have
    one."""
    with contextlib.suppress(Exception):  # the parent process then builds the launcher
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(compiled.src, compiled.metadata)


def serve(connection: Connection) -> None:
    """Compile the kernel of each job that is received, until the connection is closed. Answer each job with
    an empty message on success, otherwise with the error."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            job, reason = connection.recv_bytes(), ""
            try:
                compile_job(job)
            except Exception as error:
                reason = one_line(error) or type(error).__name__
            connection.send_bytes(reason.encode())


def main() -> None:
    """Fork a process for each file descriptor among the arguments, and wait until all these processes end."""
    connections = [Connection(int(fd)) for fd in sys.argv[1:]]
    lock_launchers()
    for name in _PRELOADED:
        importlib.import_module(f"quire.kernels.triton.{name}")
    gc.freeze()  # so that collections in the forks do not copy pages
    for connection in connections:
        if os.fork() == 0:
            for other in connections:
                if other is not connection:
                    other.close()
            serve(connection)
            os._exit(0)
    for connection in connections:
        connection.close()
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()

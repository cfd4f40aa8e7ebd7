"""One builder for each launcher: the C extension with which some versions of Triton start a kernel.

Processes and threads that build the same launcher replace each other's file in Triton's cache. Python opens
the file of an extension and remembers its inode, and then loads what is at the path. If the file is replaced
in between, the inode is free, and the next launcher may get it. Python then takes the first launcher for that
one: the kernel fails, or reads its arguments wrongly."""

import contextlib
import functools
import hashlib
import os
from collections.abc import Callable
from typing import Any

import triton
from filelock import FileLock
from triton.backends.nvidia import driver


def lock_launchers() -> None:
    """Make Triton find, build and load a launcher under a lock that all processes share. Versions without
    launchers to build stay as they are."""
    build = getattr(driver, "compile_module_from_src", None)
    if build is not None and not hasattr(build, "__wrapped__"):
        driver.compile_module_from_src = locked(build)


def locked(build: Callable[..., Any]) -> Callable[..., Any]:
    """Return `build`, which makes an extension of the C source `src`, with a lock for each source."""

    @functools.wraps(build)
    def build_once(src: str, *args: Any, **options: Any) -> Any:
        digest = hashlib.sha256(src.encode()).hexdigest()
        path = os.path.join(triton.knobs.cache.dir, f"launcher-{digest}.lock")
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError, NotImplementedError):  # a file system without locks
                os.makedirs(triton.knobs.cache.dir, exist_ok=True)
                stack.enter_context(FileLock(path))
            return build(src, *args, **options)

    return build_once

"""One builder for each launcher: the C extension with which some versions of Triton start a kernel.

Two races of threads and processes would give a kernel the launcher of another: it fails, or reads its
arguments wrongly.

- Processes that build the same launcher replace each other's file in Triton's cache. Python opens the file of
  an extension and remembers its inode, and then loads what is at the path. If the file is replaced in
  between, the inode is free, and the next launcher may get it. Python takes the first launcher for that one.
- Launchers all have the same module name. If a process loads one a second time, Python copies its functions
  into the module that has this name at that time. Another thread may copy others before they are read."""

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
    """Make Triton find, build and load a launcher under a lock that all processes share, and only once in a
    process. Versions without launchers to build stay as they are."""
    build = getattr(driver, "compile_module_from_src", None)
    if build is not None and not hasattr(build, "__wrapped__"):
        driver.compile_module_from_src = locked(build)


def locked(build: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `build`, which makes an extension of the C source `src`, under a lock for
    this source. Its result for a source is cached."""
    loaded: dict[str, Any] = {}

    @functools.wraps(build)
    def build_once(src: str, *args: Any, **options: Any) -> Any:
        digest = hashlib.sha256(src.encode()).hexdigest()
        path = os.path.join(triton.knobs.cache.dir, f"launcher-{digest}.lock")
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError, NotImplementedError):  # a file system without locks
                os.makedirs(triton.knobs.cache.dir, exist_ok=True)
                stack.enter_context(FileLock(path))
            if digest not in loaded:
                loaded[digest] = build(src, *args, **options)
            return loaded[digest]

    return build_once

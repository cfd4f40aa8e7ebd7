"""Tiny models are built once in a test run: on disk for all pytest workers, and in the memory of each."""

import copy
import hashlib
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock

_in_memory: dict[str, Any] = {}


@cache
def run_folder() -> Path:
    """Return the folder that all workers of this test run share."""
    shared = os.environ.get("QUIRE_TEST_TINY_MODELS")
    return Path(shared) if shared else Path(tempfile.mkdtemp(prefix="quire-tiny-"))


def built_once(description: object, folder: Path, build: Callable[[Path], Any]) -> Any:
    """Copy the files that `build` writes into its folder to `folder`, and return a copy of its result.

    `description` holds everything that the result depends on. The first worker that needs it builds it, and
    the others wait for the file lock. Callers may modify their files and their copy.
    """
    key = hashlib.sha256(repr(description).encode()).hexdigest()[:24]
    place = run_folder() / key
    files, pickled = place / "files", place / "result.pickle"
    if key not in _in_memory:
        with FileLock(place.with_suffix(".lock")):
            if pickled.exists():
                _in_memory[key] = pickle.loads(pickled.read_bytes())
            else:
                shutil.rmtree(place, ignore_errors=True)
                files.mkdir(parents=True)
                _in_memory[key] = build(files)
                _store(pickled, _in_memory[key])
    shutil.copytree(files, folder, dirs_exist_ok=True)
    return copy.deepcopy(_in_memory[key])


def _store(path: Path, result: Any) -> None:
    """Write `result` for the other workers; one that cannot be pickled is built again by each of them."""
    try:
        path.write_bytes(pickle.dumps(result))
    except (pickle.PicklingError, AttributeError, TypeError):
        path.unlink(missing_ok=True)

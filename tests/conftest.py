"""Settings that every test shares. Two pytest workers on two cores: one thread each. Processes of tests read
what the first of them has compiled, and clients share what is known of certificates. Without a GPU the Triton
kernels run in Triton's interpreter, which must be asked for before its import."""

import os
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
if not Path("/proc/driver/nvidia").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest  # noqa: E402
from httpx._transports import default as transport  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

transport.create_ssl_context = cache(transport.create_ssl_context)
settings.register_profile(
    "quire", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("quire")


def pytest_configure(config: pytest.Config) -> None:
    """Name a folder for the tiny models of this run, before the workers start and inherit the variable."""
    if not hasattr(config, "workerinput"):
        os.environ["QUIRE_TEST_TINY_MODELS"] = tempfile.mkdtemp(prefix="quire-tiny-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop("QUIRE_TEST_TINY_MODELS"), ignore_errors=True)


class Kept:
    """Of Triton's language made one that Python runs, by the interpreter: it stays so."""

    def restore(self) -> None: ...


def pytest_collection_finish() -> None:
    """Triton's interpreter looks through its whole language at every call of every function, which is most of
    what kernels take in it: here it does so once for each module of kernels."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or not hasattr(interpreter, "_patch_lang"):
        return
    patch, seen = interpreter._patch_lang, set[int]()

    def once(fn: Any) -> Kept:
        if id(fn.__globals__) not in seen:
            seen.add(id(fn.__globals__))
            patch(fn)
        return Kept()

    interpreter._patch_lang = once

"""Settings that every test shares. Workers of pytest have one thread each. Test processes share compiled
files, and clients share loaded certificates. Without a GPU the Triton kernels run in Triton's interpreter,
which must be enabled before its import.

A test gets the same random numbers alone, after others and in any order: they are reseeded for every fixture
and every test, Hypothesis generates the same examples in every run, and one-time warnings are reset for each
test."""

import asyncio
import atexit
import gc
import inspect
import itertools
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

gc.disable()  # until all tests are collected: nearly everything that is imported stays
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for commands in the background
HAS_GPU = Path("/proc/driver/nvidia").exists()
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest  # noqa: E402
from _pytest.assertion import rewrite  # noqa: E402
from httpx._config import DEFAULT_TIMEOUT_CONFIG  # noqa: E402
from httpx._transports import default as transport  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402
from hypothesis.internal.conjecture import providers  # noqa: E402
from preloaded import Preloaded, engines_forked, engines_spawned  # noqa: E402
from shared_fields import share_fields  # noqa: E402

from quire.logs import warn_once  # noqa: E402

MODULES_PER_FREEZE = 16
PATIENCE_S = 60.0
"""Default time limit of clients: only a hanging server takes so long."""

share_fields()
transport.create_ssl_context = cache(transport.create_ssl_context)
for phase in ("connect", "read", "write", "pool"):
    setattr(DEFAULT_TIMEOUT_CONFIG, phase, PATIENCE_S)
# Otherwise Hypothesis parses all imported files for constants, and its examples depend on which these are.
providers._get_local_constants = lambda: providers._local_constants
EXAMPLES: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("quire", derandomize=True, **EXAMPLES)
settings.register_profile("explore", print_blob=True, **EXAMPLES)
settings.load_profile("quire")


def pytest_configure(config: pytest.Config) -> None:
    """Name a folder for the tiny models of this run, before the workers start and inherit the variable."""
    if not hasattr(config, "workerinput"):
        os.environ["QUIRE_TEST_TINY_MODELS"] = tempfile.mkdtemp(prefix="quire-tiny-")
    else:
        rewrite_a_share(config, config.workerinput["workerid"], config.workerinput["workercount"])
    config.option.randomly_reset_seed = False  # pytest-randomly only chooses the order


def rewrite_a_share(config: pytest.Config, worker: str, num_workers: int) -> None:
    """Rewrite the assertions of test modules that have no compiled file yet. Each worker begins with another
    module, so that in a fresh checkout each module is rewritten once and not by every worker."""
    roots = [config.invocation_params.dir / argument.partition("::")[0] for argument in config.args]
    modules = sorted({module for root in roots for module in root.rglob("test_*.py")})
    first = int(worker.removeprefix("gw")) * len(modules) // num_workers
    for module in modules[first:] + modules[:first]:
        compiled = rewrite.get_cache_dir(module) / (module.stem + rewrite.PYC_TAIL)
        if not compiled.exists() and rewrite.try_makedirs(compiled.parent):
            source_hash, code = rewrite._rewrite_test(module, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source_hash, compiled)


def pytest_unconfigure(config: pytest.Config) -> None:
    # Triton's library complains at exit about objects that are never collected. Earlier, pytest would examine
    # all of them several times.
    atexit.register(gc.unfreeze)
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop("QUIRE_TEST_TINY_MODELS"), ignore_errors=True)


def seed_from(name: str) -> None:
    """Reseed the random numbers of every imported library from `name`."""
    seed = zlib.crc32(name.encode())
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> None:
    """Reseed for a fixture: it must not matter which test needs it first."""
    seed_from(fixturedef.argname)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    warn_once.cache_clear()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    seed_from("test")


def pytest_collection_finish() -> None:
    """Exclude imported objects from later garbage collections, and prepare Triton's interpreter."""
    gc.collect()
    gc.freeze()
    gc.enable()
    forget_loggers()
    if "triton" in sys.modules:
        from interpreter import quicken

        quicken()


def forget_loggers() -> None:
    """Remove loggers of other packages from the table that pytest examines six times per test."""
    loggers = logging.root.manager.loggerDict
    for name in [name for name in loggers if "." in name and not name.startswith("quire.")]:
        if getattr(loggers[name], "propagate", True):
            del loggers[name]


_num_modules = itertools.count(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """After some modules, exclude what they imported from later collections, too: tests of freed memory
    collect all objects, which would take a good part of a second."""
    yield
    is_last = nextitem is not None and nextitem.path != item.path
    if is_last and next(_num_modules) % MODULES_PER_FREEZE == 0:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def start_preloaded() -> Iterator[Callable[[], Preloaded]]:
    """Yield a function that returns the process that others are forked from; the first call starts it."""
    with ExitStack() as stack:
        yield cache(lambda: stack.enter_context(Preloaded()))


@pytest.fixture(scope="session")
def preloaded(start_preloaded: Callable[[], Preloaded]) -> Preloaded:
    return start_preloaded()


@pytest.fixture(scope="session", autouse=True)
def forked_engines(start_preloaded: Callable[[], Preloaded]) -> Iterator[None]:
    """Fork the cores and ranks of engines in the process of the tests, except on machines with a GPU."""
    with ExitStack() as stack:
        if not HAS_GPU:
            stack.enter_context(engines_forked(start_preloaded))
        yield


@pytest.fixture
def spawned_engines() -> Iterator[None]:
    """Spawn the cores and ranks of engines in the process of the test: they import their modules."""
    with engines_spawned():
        yield

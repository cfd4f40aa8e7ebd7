"""`TRITON_INTERPRET=0 python -m pytest -p compile_only tests/kernels/triton` compiles kernels for an H200,
which need not be present, where tests would run them. A test fails only if a kernel does not compile.

Code that runs in Triton's interpreter need not compile: the interpreter ignores types and uses Python's
semantics."""

import types
from collections.abc import Generator
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.errors import CompilationError
from triton.runtime import driver
from triton.runtime.errors import PTXASError

from quire.kernels.triton import launch

SHARED_BYTES, MOST_THREADS = 232_448, 1024
FAULTS = CompilationError, PTXASError


class AbsentDriver:
    """Driver of an absent GPU."""

    utils = types.SimpleNamespace(
        load_binary=lambda *item: (None, None, 0, 0, MOST_THREADS),
        get_device_properties=lambda device: {"max_shared_mem": SHARED_BYTES, "warpSize": 32},
    )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def launcher_cls(self, *values: Any) -> Any:
        return lambda *args: None


def pytest_configure() -> None:
    assert not triton.knobs.runtime.interpret, "TRITON_INTERPRET=0 is missing"
    driver.set_active(AbsentDriver())
    launch._can_overlap = lambda: True  # type: ignore[assignment]


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    try:
        with launch.compiling():
            return (yield)
    except Exception as error:
        if _is_fault(error):
            raise
    return True


def _is_fault(error: BaseException | None) -> bool:
    return error is not None and (
        isinstance(error, FAULTS) or _is_fault(error.__cause__ or error.__context__)
    )

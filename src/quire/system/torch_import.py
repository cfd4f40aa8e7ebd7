"""Importing torch without its kernels for meta tensors in Python, which traced computations need."""

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_META_KERNELS = "torch._meta_registrations"


class _Deferred(ModuleType):
    """Stands for the module of the meta kernels while torch is imported. A version of torch that uses the
    module meanwhile gets it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        complete_torch()
        return getattr(sys.modules[_META_KERNELS], name)


class _Completer:
    """Import hook that completes torch before any further module of torch is imported, since some of them
    expect the meta kernels. It is also the loader of a module that was imported by this."""

    def __init__(self) -> None:
        self._spec: ModuleSpec | None = None
        """Specification of the module that is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        if not name.startswith("torch."):
            return None
        complete_torch()
        module = sys.modules.get(name)
        if module is None:
            return None
        self._spec, module.__spec__ = module.__spec__, ModuleSpec(name, self)  # type: ignore[arg-type]
        return module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


_completer = _Completer()


def import_torch() -> None:
    """Import torch without the Python code of its meta kernels, which takes a quarter of the time and 18 MB.
    The code is imported when another module of torch is, such as those of `torch.compile`; for tensors on
    the device `meta`, call `complete_torch` before."""
    if "torch" in sys.modules:
        return
    sys.modules[_META_KERNELS] = _Deferred(_META_KERNELS)
    importlib.import_module("torch")
    if isinstance(sys.modules[_META_KERNELS], _Deferred):
        del sys.modules[_META_KERNELS]
        sys.meta_path.insert(0, _completer)


def complete_torch() -> None:
    """Import what `import_torch` left out."""
    if _completer in sys.meta_path:
        sys.meta_path.remove(_completer)
    if isinstance(sys.modules.get(_META_KERNELS), _Deferred):
        del sys.modules[_META_KERNELS]
    importlib.import_module(_META_KERNELS)

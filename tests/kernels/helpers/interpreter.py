"""Triton's interpreter, which runs the kernels without a CUDA device: selected cases, and a speed-up.

A small matmul takes it a tenth of a second or more. `make test` therefore runs each branch of a kernel once,
on small inputs; other shapes are for a CUDA device and for `make slow`.
"""

import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

CUDA = torch.cuda.is_available()


def more(*values: Any) -> list[Any]:
    """Mark parameters that repeat a branch with other numbers.

    A CUDA device runs all of them, the interpreter only with `-m slow`. A tuple is one set of parameters.
    """
    marks = [] if CUDA else [pytest.mark.slow]
    return [pytest.param(*value if isinstance(value, tuple) else (value,), marks=marks) for value in values]


class Patched:
    """Replaces Triton's patch scope, which the interpreter would undo after each call."""

    def restore(self) -> None: ...


def quicken() -> None:
    """Skip work that the interpreter repeats at every operation with an equal result.

    The language is patched once per module of kernels instead of at every call. Overflow checks, whose
    assertions are omitted without `debug` anyway, are skipped. Block types, tensor shapes and numpy dtypes
    are cached.
    """
    triton, interpreter = sys.modules.get("triton"), sys.modules.get("triton.runtime.interpreter")
    if triton is None or interpreter is None or not triton.knobs.runtime.interpret:
        return
    patch, patched_modules = interpreter._patch_lang, set[int]()
    if patch.__module__ != interpreter.__name__:
        return

    def patch_once(fn: Any) -> Patched:
        if id(fn.__globals__) not in patched_modules:
            patched_modules.add(id(fn.__globals__))
            patch(fn)
            triton.language.core.tensor.__index__ = _index
        return Patched()

    interpreter._patch_lang = patch_once
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)
    _look_up_shapes(triton.language.core)
    _keep_named_tuples(triton.language.core)


def _keep_named_tuples(core: Any) -> None:
    """Pass named tuples to constexpr functions as such: Triton 3.6 makes plain tuples of them."""
    unwrap = core._unwrap_if_constexpr

    def unwrap_named(value: Any) -> Any:
        is_named = isinstance(value, tuple) and hasattr(value, "_fields")
        return type(value)(*map(unwrap, value)) if is_named else unwrap(value)

    core._unwrap_if_constexpr = unwrap_named


def _index(tensor: Any) -> int:
    """Return the number of a tensor with one element: numpy 2.4 does not convert it as Triton 3.6 expects."""
    return int(tensor.handle.data.item())


def _by_name(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Cache `convert` by the type's name, since block and pointer types have no hash."""
    results: dict[str, Any] = {}

    def look_up(dtype: Any) -> Any:
        if dtype.name not in results:
            results[dtype.name] = convert(dtype)
        return results[dtype.name]

    return look_up


def _look_up_shapes(core: Any) -> None:
    constexpr = core.constexpr

    @functools.cache
    def block_of(sizes: tuple[int, ...]) -> tuple[Any, int]:
        return core.tuple(sizes), core.validate_block_shape(sizes)

    @functools.cache
    def name_of(sizes: tuple[int, ...], element: str) -> str:
        return f"<{core.tuple(sizes)}, {element}>"

    @functools.cache
    def shape_of(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return constexpr(math.prod(sizes)), core.tuple([constexpr(size) for size in sizes])

    def make_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(size.value if isinstance(size, constexpr) else size for size in shape)
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        self.element_ty, (self.shape, self.numel) = element_ty, block_of(sizes)
        self.name = name_of(sizes, element_ty.name)

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shape_of(tuple(type.shape) if type.is_block() else ())

    core.block_type.__init__ = make_block_type
    core.tensor.__init__ = make_tensor

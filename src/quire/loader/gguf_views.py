"""The tensors of a model as rows of the tensors of a GGUF file, or as values computed from them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.checkpoint.facts import ArchFacts, StateFacts
from quire.checkpoint.gguf import GGUFFile, GGUFTensor
from quire.loader.gguf_names import LARGE_FALCON, hf_name, row_order

Dequantize = Callable[[GGUFTensor], NDArray[np.float32]]


class View(NamedTuple):
    """A tensor of the model, as rows of a tensor of a GGUF file or as values computed from the file."""

    tensor: GGUFTensor
    """The stored tensor, with the shape that the model gives it."""
    rows: NDArray[np.intp] | None = None
    """Indices of the stored rows in the model's order, with all leading axes as one; None: as stored."""
    values: Callable[[Dequantize], NDArray[np.float32]] | None = None
    """Computes the values; None if the values of the stored tensor are used."""


def views_of(file: GGUFFile, facts: ArchFacts) -> dict[str, View]:
    """Map the Hugging Face name of each tensor of the model to its view of the file."""
    is_large = facts.architecture == "FalconForCausalLM" and facts.parallel_norms == 2
    architecture = LARGE_FALCON if is_large else facts.architecture
    views: dict[str, View] = {}
    for name, tensor in file.tensors.items():
        views |= _split(hf_name(name, architecture), tensor, facts)
    for name in [name for name in views if name.endswith(".self_attn.k_b_proj.weight")]:
        keys, values = views.pop(name), views.pop(name.replace("k_b_proj", "v_b_proj"), None)
        if values is not None and len(keys.tensor.shape) == len(values.tensor.shape) == 3:
            views[name.replace("k_b_proj", "kv_b_proj")] = _join_heads(keys.tensor, values.tensor)
    return views


def _split(name: str, tensor: GGUFTensor, facts: ArchFacts) -> dict[str, View]:
    """Return the views of the model's tensors that a stored tensor holds; most often one view."""
    where, _, part = name.removesuffix(".weight").rpartition(".")
    if part == "gate_up_proj" and len(tensor.shape) == 3 and tensor.shape[1] % 2 == 0:
        experts, both, columns = tensor.shape
        shape, rows = (experts, both // 2, columns), np.arange(experts * both).reshape(experts, 2, -1)
        names = f"{where}.gate_proj.weight", f"{where}.up_proj.weight"
        return dict(zip(names, (_rows_of(tensor, rows[:, i], shape) for i in (0, 1)), strict=True))
    if part in ("altup_projections", "altup_unembed_projections"):
        count, *matrix = tensor.shape
        slabs = np.arange(count * matrix[0]).reshape(count, -1)
        return {f"{where}.{part}.{i}.weight": _rows_of(tensor, slabs[i], matrix) for i in range(count)}
    state = facts.state if part in ("in_proj_qkvz", "in_proj_ba") else None
    if state is not None and state.groups and tensor.shape[0] % state.groups == 0:
        names = ("in_proj_qkv", "in_proj_z") if part == "in_proj_qkvz" else ("in_proj_b", "in_proj_a")
        split = _split_groups(tensor, state, part)
        return {f"{where}.{part}.weight": view for part, view in zip(names, split, strict=True)}
    return {name: _one(name, tensor, facts)}


def _rows_of(tensor: GGUFTensor, rows: NDArray[np.intp], shape: list[int] | tuple[int, ...]) -> View:
    return View(replace(tensor, shape=tuple(shape)), rows.reshape(-1))


def _split_groups(tensor: GGUFTensor, state: StateFacts, part: str) -> Iterator[View]:
    """Split a projection of Qwen3-Next that is grouped by key head: qkv and z, or b and a."""
    rows, ratio = np.arange(tensor.shape[0]).reshape(state.groups, -1), state.heads // state.groups
    values = ratio * state.head_dim
    sizes = (state.state, state.state, values, values) if part == "in_proj_qkvz" else (ratio, ratio)
    *first, last = np.split(rows, np.cumsum(sizes)[:-1], axis=1)
    for parts in (first, [last]):
        order = np.concatenate([part.reshape(-1) for part in parts])
        yield _rows_of(tensor, order, (len(order), tensor.shape[1]))


def _one(name: str, tensor: GGUFTensor, facts: ArchFacts) -> View:
    """Return the view of a stored tensor that corresponds to one tensor of the model."""
    shape = tensor.shape
    if name.endswith(".shared_expert_gate.weight") and len(shape) == 1:
        shape = (1, *shape)  # a matrix of one row
    elif name.endswith((".conv1d.weight", ".conv.conv.weight")) and len(shape) == 2:
        shape = (shape[0], 1, shape[1])
    elif name.endswith((".A_log", ".D", ".norm.weight")):
        shape = (int(np.prod(shape)),)
    if name.endswith(".A_log"):
        stored = replace(tensor, shape=shape, type="F32")
        return View(stored, values=lambda read: np.log(-read(tensor)).reshape(shape))
    rows = _repeated_keys(name, tensor, facts)
    if rows is not None:
        return View(replace(tensor, shape=(len(rows), *shape[1:])), rows)
    return View(replace(tensor, shape=shape), row_order(name, shape[0] if shape else 1, facts))


def _repeated_keys(name: str, tensor: GGUFTensor, facts: ArchFacts) -> NDArray[np.intp] | None:
    """Return the indices of the stored rows of Qwen3.5's query, key and value projection or convolution, with
    a query and a key for each value head; None: the rows are used as stored.

    With k key heads and r value heads per key head, value head i belongs to key head i % k in these files,
    but to key head i // r in checkpoints. Value heads cannot be moved: columns of the output projection share
    quantization blocks."""
    if not name.endswith((".in_proj_qkv.weight", ".linear_attn.conv1d.weight")) or facts.state is None:
        return None
    state = facts.state
    num_values = state.heads * state.head_dim
    num_keys = (tensor.shape[0] - num_values) // 2
    if not num_keys or num_keys == state.groups * state.state:
        return None
    first = np.arange(2 * num_keys).reshape(2, num_keys)
    repeated = np.tile(first, (1, state.heads * state.state // num_keys))
    return np.concatenate((repeated.reshape(-1), np.arange(2 * num_keys, tensor.shape[0])))


def _join_heads(keys: GGUFTensor, values: GGUFTensor) -> View:
    """Return the up projection of KV latents from its two halves; the key half is stored transposed."""
    heads, rank, nope_dim = keys.shape
    shape = (heads * (nope_dim + values.shape[1]), rank)

    def join(read: Dequantize) -> NDArray[np.float32]:
        both = read(keys).reshape(keys.shape).swapaxes(1, 2), read(values).reshape(values.shape)
        return np.concatenate(both, axis=1).reshape(shape)

    return View(replace(keys, shape=shape, type="F32"), values=join)

"""Tensor layouts of grouped weights in files: AWQ, GPTQ and compressed-tensors."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from quire.checkpoint.quant.schemes import Grouped
from quire.errors import ConfigError
from quire.kernels.cpu.linear import BLOCK
from quire.kernels.reference.int4 import Int4Codes
from quire.quant.sharding import Shard

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Index of the output in each field of a word of 8 codes, from the lowest bits on."""


class Int4Size(NamedTuple):
    """A tensor of the file: its axes along outputs and inputs (None: it has no such axis), and the numbers of
    outputs and inputs that share an element (8 codes in an int32, a group of 128 with one scale)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    outputs: int | None
    inputs: int | None
    per_output: int = 1
    per_input: int = 1
    of_groups: bool = False
    """Whether the tensor describes groups of inputs: scales, zeros, group indices."""


Sizes = dict[str, Int4Size]
"""Sizes of tensors by the suffix of their names."""


class Int4Layout(NamedTuple):
    """Functions that describe and read the stored tensors of a weight."""

    sizes: Callable[[Grouped, int, int, int], Sizes]
    """Function of (scheme, outputs, inputs, groups) that returns the tensors of the file."""
    read: Callable[[Grouped, dict[str, Tensor]], tuple[Tensor, Tensor, Tensor]]
    """Function of (scheme, loaded tensors) that returns codes [outputs, inputs] as uint8, scales and zeros
    [outputs, groups]."""
    order: str
    """Suffix of the tensor with the group of each input, which exists if groups are not contiguous."""


def fields(words: Tensor, bits: int, axis: int) -> Tensor:
    """Unpack the bit fields of int32 words along `axis`, from the lowest on, as uint8."""
    parts = [(words >> shift & (1 << bits) - 1).to(torch.uint8) for shift in range(0, 32, bits)]
    return torch.stack(parts, axis + 1).flatten(axis, axis + 1)


def _awq_sizes(scheme: Grouped, outputs: int, inputs: int, groups: int) -> Sizes:
    per, group = 32 // scheme.bits, inputs // groups
    words = outputs // per
    return {
        "qweight": Int4Size((inputs, words), torch.int32, 1, 0, per),
        "qzeros": Int4Size((groups, words), torch.int32, 1, 0, per, group, of_groups=True),
        "scales": Int4Size((groups, outputs), torch.float32, 1, 0, 1, group, of_groups=True),
    }


def _read_awq(scheme: Grouped, stored: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    codes, zeros = (_awq_fields(stored[name], scheme.bits) for name in ("qweight", "qzeros"))
    return codes.t(), stored["scales"].t(), zeros.t()


def _awq_fields(words: Tensor, bits: int) -> Tensor:
    places = torch.tensor(_AWQ_ORDER, device=words.device).argsort()
    return fields(words, bits, 1).view(len(words), -1, len(places))[..., places].flatten(1)


def _gptq_sizes(scheme: Grouped, outputs: int, inputs: int, groups: int) -> Sizes:
    per, group = 32 // scheme.bits, inputs // groups
    sizes: Sizes = {
        "qweight": Int4Size((inputs // per, outputs), torch.int32, 1, 0, 1, per),
        "qzeros": Int4Size((groups, outputs // per), torch.int32, 1, 0, per, group, of_groups=True),
        "scales": Int4Size((groups, outputs), torch.float32, 1, 0, 1, group, of_groups=True),
    }
    return sizes | (
        {"g_idx": Int4Size((inputs,), torch.int32, None, 0, of_groups=True)} if scheme.act_order else {}
    )


def _read_gptq(scheme: Grouped, stored: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Read GPTQ tensors. In the first version of the format, zero points are stored minus one."""
    codes = fields(stored["qweight"], scheme.bits, 0)
    zeros = fields(stored["qzeros"], scheme.bits, 1).to(torch.int32) + (scheme.layout == "gptq")
    return codes.t(), stored["scales"].t(), zeros.t()


def _compressed_sizes(scheme: Grouped, outputs: int, inputs: int, groups: int) -> Sizes:
    per, group = 32 // scheme.bits, inputs // groups
    sizes: Sizes = {
        "weight_packed": Int4Size((outputs, -(-inputs // per)), torch.int32, 0, 1, 1, per),
        "weight_scale": Int4Size((outputs, groups), torch.float32, 0, 1, 1, group, of_groups=True),
    }
    if not scheme.symmetric:
        words = -(-outputs // per), groups
        sizes["weight_zero_point"] = Int4Size(words, torch.int32, 0, 1, per, group, of_groups=True)
    return sizes | (
        {"weight_g_idx": Int4Size((inputs,), torch.int32, None, 0, of_groups=True)}
        if scheme.act_order
        else {}
    )


def _read_compressed(scheme: Grouped, stored: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Read packed tensors of compressed-tensors. Half of the range is added to stored codes and zero
    points."""
    scales = stored["weight_scale"]
    codes = fields(stored["weight_packed"], scheme.bits, 1)
    if scheme.symmetric:
        return codes, scales, torch.full_like(scales, 1 << scheme.bits - 1, dtype=torch.int32)
    return codes, scales, fields(stored["weight_zero_point"], scheme.bits, 0)[: len(scales)]


def _torchao_sizes(scheme: Grouped, outputs: int, inputs: int, groups: int) -> Sizes:
    group = inputs // groups
    sizes: Sizes = {
        "weight": Int4Size((outputs, inputs), torch.int8, 0, 1),
        "weight_scale": Int4Size((outputs, groups), torch.float32, 0, 1, 1, group, of_groups=True),
    }
    if not scheme.symmetric:
        zeros = Int4Size((outputs, groups), torch.int8, 0, 1, 1, group, of_groups=True)
        sizes["weight_zero_point"] = zeros
    return sizes


def _read_torchao(scheme: Grouped, stored: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Read signed codes and zeros, each in a byte."""
    half, scales = 1 << scheme.bits - 1, stored["weight_scale"]
    codes = (stored["weight"].to(torch.int32) + half).to(torch.uint8)
    if scheme.symmetric:
        return codes, scales, torch.full_like(scales, half, dtype=torch.int32)
    return codes, scales, stored["weight_zero_point"].to(torch.int32) + half


def _torchao_pair_sizes(scheme: Grouped, outputs: int, inputs: int, groups: int) -> Sizes:
    by_group = Int4Size((groups, outputs), torch.float32, 1, 0, 1, inputs // groups, of_groups=True)
    return {
        "weight": Int4Size((outputs, inputs // 2), torch.int8, 0, 1, 1, 2),
        "weight_scale": by_group,
        "weight_zero_point": by_group,
    }


def _read_torchao_pairs(scheme: Grouped, stored: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Read bytes of two signed codes, the first in the lower half. The stored zero point is the value that
    the signed code 0 stands for."""
    words = stored["weight"].view(torch.uint8)
    codes = torch.stack((words & 15, words >> 4), 2).flatten(1) ^ 8
    scales = stored["weight_scale"].t()
    return codes, scales, _code_of_zero(scales, stored["weight_zero_point"].t())


_TILE_INPUTS, _TILE_OUTPUTS = 16, 8
"""Inputs and outputs of a tile of the tensor cores, in weights that torchao has packed for them."""
TILED_INPUTS = 1024
"""The inputs of weights that torchao has packed in tiles are padded to a multiple of this number."""
_TILE_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Index of the input in each field of a word of 8 codes, from the lowest bits on."""


def _torchao_tile_sizes(scheme: Grouped, outputs: int, inputs: int, groups: int) -> Sizes:
    group = inputs // groups
    padded = -(-inputs // TILED_INPUTS) * TILED_INPUTS
    tiles = outputs // _TILE_OUTPUTS, padded // (8 * _TILE_INPUTS), 32, 4
    num_groups = padded // group if scheme.group > 0 else 1
    return {
        "weight": Int4Size(tiles, torch.int32, 0, 1, _TILE_OUTPUTS, 8 * _TILE_INPUTS),
        "weight_scale_and_zero": Int4Size(
            (num_groups, outputs, 2), torch.float32, 1, 0, 1, group, of_groups=True
        ),
    }


def _read_torchao_tiles(scheme: Grouped, stored: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Read words [outputs / 8, inputs / 128, 32 lanes, 4]. A lane has codes of one output. A word has codes
    of two tiles: in each tile two neighbouring inputs, and the two inputs 8 further."""
    words = stored["weight"]
    parts = fields(words.flatten(0, 2), 4, 1).view(*words.shape, 8)
    places = torch.tensor(_TILE_ORDER, device=words.device).argsort()
    # outputs / 8, inputs / 128, output, pair, two tiles at a time, tile, 8 further, neighbour
    cut = parts[..., places].view(*words.shape[:2], 8, 4, 4, 2, 2, 2)
    codes = cut.permute(0, 2, 1, 4, 5, 6, 3, 7).reshape(words.shape[0] * 8, -1)
    scales, zeros = stored["weight_scale_and_zero"].transpose(0, 1).unbind(2)
    return codes, scales, _code_of_zero(scales, zeros)


def _code_of_zero(scales: Tensor, middles: Tensor) -> Tensor:
    """Return the fractional codes of the weight 0 in each group, where the code 8 stands for the weight
    `middles`."""
    return 8 - torch.where(scales == 0, 0, middles / scales)


LAYOUTS = {
    "awq": Int4Layout(_awq_sizes, _read_awq, ""),
    "gptq": Int4Layout(_gptq_sizes, _read_gptq, "g_idx"),
    "gptq_v2": Int4Layout(_gptq_sizes, _read_gptq, "g_idx"),
    "torchao": Int4Layout(_torchao_sizes, _read_torchao, ""),
    "torchao_pairs": Int4Layout(_torchao_pair_sizes, _read_torchao_pairs, ""),
    "torchao_tiles": Int4Layout(_torchao_tile_sizes, _read_torchao_tiles, ""),
    "compressed": Int4Layout(_compressed_sizes, _read_compressed, "weight_g_idx"),
}


def read(scheme: Grouped, stored: dict[str, Tensor], inputs: Shard) -> tuple[Int4Codes, Tensor | None]:
    """Return the codes of a weight, and for each of their columns the index of the layer's input; None: the
    columns are in the order of the inputs."""
    layout, order = LAYOUTS[scheme.layout], None
    codes, scales, zeros = layout.read(scheme, stored)
    if not zeros.is_floating_point():
        zeros = zeros.to(torch.int32)
    if scheme.layout == "torchao_tiles" and scheme.group > 0:  # groups of padding
        scales, zeros = (x[:, : inputs.size // scheme.group] for x in (scales, zeros))
    whole = Int4Codes(codes[:, : inputs.size], scales, zeros, 4 if scheme.bits <= 4 else 8)
    if scheme.act_order:
        group_of = stored[layout.order]
        order = _order(group_of, scales.shape[1])
        if not inputs.is_whole and whole.scales.shape[1] > 1:
            if order is None:
                group_of = torch.arange(inputs.all, device=group_of.device) // scheme.group
            whole, order = _shard_groups(whole, group_of.long()[inputs.start : inputs.start + inputs.size])
        elif order is not None:
            whole = whole._replace(codes=whole.codes[:, order])
    return whole.contiguous(), order


def _shard_groups(whole: Int4Codes, group_of: Tensor) -> tuple[Int4Codes, Tensor | None]:
    """Group the inputs of a shard, which has an arbitrary number of inputs of each group. Groups are padded
    to whole blocks with codes that stand for 0. The order maps padding to some input of the shard."""
    counts = torch.bincount(group_of, minlength=whole.scales.shape[1])
    padded_counts = -(-counts // BLOCK) * BLOCK
    group_of_place = torch.arange(len(padded_counts), device=padded_counts.device).repeat_interleave(
        padded_counts
    )
    if bool((whole.zeros >> whole.bits).any()):  # no code stands for 0
        return Int4Codes(whole.codes, whole.scales[:, group_of], whole.zeros[:, group_of], whole.bits), None
    sorted_inputs = group_of.argsort(stable=True)
    fillers = (padded_counts - counts).cumsum(0) - (padded_counts - counts)
    places = torch.arange(len(group_of), device=padded_counts.device) + fillers[group_of[sorted_inputs]]
    codes = whole.zeros[:, group_of_place].to(torch.uint8)
    codes[:, places] = whole.codes[:, sorted_inputs]
    order = torch.zeros_like(group_of_place).index_copy_(0, places, sorted_inputs)
    groups = group_of_place[::BLOCK]
    is_same = torch.equal(order, torch.arange(len(group_of), device=order.device))
    padded = Int4Codes(codes, whole.scales[:, groups], whole.zeros[:, groups], whole.bits)
    return padded, None if is_same else order


def _order(group_of: Tensor, groups: int) -> Tensor | None:
    """Return the indices that sort the inputs by their groups `group_of`; None if they are sorted already.
    Raise a ConfigError if the groups differ in size."""
    if not bool(group_of.any()) or bool((group_of.diff() >= 0).all()):
        return None
    sizes = torch.bincount(group_of.long(), minlength=groups)
    if len(sizes) != groups or bool((sizes != sizes[0]).any()):
        raise ConfigError("a g_idx of the checkpoint has groups of different sizes: the file is corrupt")
    return group_of.argsort(stable=True)

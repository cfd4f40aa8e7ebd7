"""Grouped 4-bit and 8-bit weights: AWQ, GPTQ and the packed format of compressed-tensors."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from quire.checkpoint.quant.schemes import Grouped
from quire.errors import ConfigError
from quire.kernels.cpu import native
from quire.kernels.cpu.gguf import interleaves, pack
from quire.kernels.cpu.linear import LinearProduct, Matrix
from quire.kernels.cpu.moe import CpuExperts
from quire.kernels.reference.int4 import Gather, Int4Codes, as_blocks, split_zeros
from quire.logs import get_logger, warn_once
from quire.quant.experts import ExpertShape, StoredExperts, are_fused
from quire.quant.format import Format
from quire.quant.int4_layouts import LAYOUTS, TILED_INPUTS, Sizes, read
from quire.quant.sharding import Runs, Shard, check_units
from quire.quant.weight import (
    LinearShape,
    Piece,
    Weight,
    bias_of,
    empty_parameter,
    frozen_parameter,
    with_bias,
)

logger = get_logger(__name__)
GROUPS = (-1, 32, 64, 128)
_BITS: dict[str, tuple[int, ...]] = {
    "awq": (4,),
    "gptq": (4, 8),
    "gptq_v2": (4, 8),
    "compressed": (4, 8),
    "torchao": (1, 2, 3, 4, 5, 6, 7, 8),
    "torchao_pairs": (4,),
    "torchao_tiles": (4,),
}
_BY_ROW = ("compressed", "torchao", "torchao_pairs")
"""Layouts in which each word contains codes of only one output."""
_EXPERTS = ("gate", "up", "down")
_UNSUPPORTED = {
    "cpu": "have zeros or scales that the CPU kernels do not support",
    "cuda": "have a dtype or a device that the packed kernels do not support",
}


class Int4Format:
    """Builds integer weights with a scale per group of inputs, which stay packed."""

    def __init__(self, scheme: Grouped, plain: Format) -> None:
        self.scheme = scheme
        self.plain = plain
        if scheme.intended_inputs is not None:
            warn_once(
                logger,
                f"The checkpoint was made for {scheme.intended_inputs} activations, but activations of "
                f"{scheme.bits}-bit weights stay in the model's dtype",
            )

    def linear(self, parts: tuple[str, ...], shape: LinearShape) -> Weight:
        for name, outputs in zip(parts, shape.output_runs, strict=True):
            _check(self.scheme, name, outputs, shape.input_shard)
        return Int4Linear(GroupedTensors(self.scheme), shape, self.plain)

    def experts(self, parts: tuple[str, ...], shape: ExpertShape) -> StoredExperts:
        if are_fused(parts):
            raise ConfigError(
                f"{parts[0]}: experts of {self.scheme.layout} are stored one by one, with gate, up and down "
                "separate, but this model has them fused"
            )
        for name, (outputs, inputs) in shape.matrices().items():
            _check(self.scheme, f"{parts[0]} ({name})", (outputs,), inputs)
        return Int4Experts(GroupedTensors(self.scheme), shape, self.plain)


def _check(scheme: Grouped, name: str, runs: Runs, inputs: Shard) -> None:
    known = _BITS[scheme.layout]
    if scheme.bits not in known:
        raise ConfigError(
            f"{name}: {scheme.layout} of {scheme.bits} bits is not supported; "
            f"{' and '.join(map(str, known))} bits are"
        )
    if scheme.group not in GROUPS:
        raise ConfigError(
            f"{name}: groups of {scheme.group} inputs are not supported; "
            f"{', '.join(map(str, GROUPS))} (all inputs in one) are"
        )
    if scheme.group > 0 and inputs.all % scheme.group:
        fitting = [group for group in GROUPS if group < 0 or inputs.all % group == 0]
        raise ConfigError(
            f"{name}: {inputs.all} inputs are not whole groups of {scheme.group}; groups of "
            f"{' or '.join(map(str, fitting))} would be (-1: all inputs in one)"
        )
    per, outputs = 32 // scheme.bits, sum(run.all for run in runs)
    if scheme.layout not in _BY_ROW and (outputs % per or inputs.all % per):
        raise ConfigError(
            f"{name}: {scheme.layout} packs {per} numbers into a word, which does not divide {outputs} "
            f"outputs and {inputs.all} inputs; leave this layer out of the quantization"
        )
    _check_shards(scheme, name, runs, inputs)


def _check_shards(scheme: Grouped, name: str, runs: Runs, inputs: Shard) -> None:
    """Raise if a shard cuts a word or a group. Outputs share words if zeros or all codes are packed; inputs
    share groups and words. With act_order, inputs are regrouped after loading."""
    per = {"torchao": 1, "torchao_pairs": 2}.get(scheme.layout, 32 // scheme.bits)
    if scheme.layout == "torchao_tiles":
        check_units(name, (inputs,), TILED_INPUTS, "tiles")
    if scheme.layout not in _BY_ROW or (scheme.layout == "compressed" and not scheme.symmetric):
        check_units(name, runs, per, "words")
    is_cut = scheme.group > 0 and not scheme.act_order
    check_units(name, (inputs,), scheme.group if is_cut else per, "groups" if is_cut else "words")


def _pieces(
    scheme: Grouped, outputs: int, inputs: Shard, device: torch.device, *front: int
) -> dict[str, Piece]:
    """Return empty tensors of one weight, or of several weights with the leading axes `front`. With
    act_order, or with one group for all inputs, a shard of inputs needs the tensors of all groups."""
    needs_all = scheme.act_order or scheme.group < 0
    sizes, whole_sizes = (_sizes(scheme, outputs, size) for size in (inputs.size, inputs.all))
    pieces = {}
    for suffix in sizes:
        size = (whole_sizes if needs_all and sizes[suffix].of_groups else sizes)[suffix]
        axes = size.outputs, None if needs_all and size.of_groups else size.inputs
        by_output, by_input = (None if axis is None else axis + len(front) for axis in axes)
        tensor = empty_parameter(*front, *size.shape, dtype=size.dtype, device=device)
        pieces[suffix] = Piece(tensor, by_output, by_input, size.per_output, size.per_input)
    return pieces


def _sizes(scheme: Grouped, outputs: int, inputs: int) -> Sizes:
    groups = 1 if scheme.group < 0 else max(1, inputs // scheme.group)
    return LAYOUTS[scheme.layout].sizes(scheme, outputs, inputs, groups)


class Int4Tensors(Protocol):
    """The tensors of a weight in one file format: how to create and read them."""

    label: str
    """Name of the format and number of bits, for log and error messages."""

    def empty(self, outputs: Runs, inputs: Shard, device: torch.device, *front: int) -> dict[str, Piece]:
        """Return empty tensors by the suffix of their names: of one weight, or of several weights with the
        leading axes `front`."""

    def read(
        self, stored: dict[str, Tensor], outputs: Runs, inputs: Shard
    ) -> tuple[Int4Codes, Tensor | None]:
        """Return the codes of a weight, and for each of their columns the index of the layer's input; None:
        the columns are in the order of the inputs."""


class GroupedTensors:
    """The checkpoint tensors of a weight in the format of AWQ, GPTQ, compressed-tensors or torchao."""

    def __init__(self, scheme: Grouped) -> None:
        self.scheme = scheme
        self.label = f"{scheme.layout} weights of {scheme.bits} bits"

    def empty(self, outputs: Runs, inputs: Shard, device: torch.device, *front: int) -> dict[str, Piece]:
        return _pieces(self.scheme, sum(run.size for run in outputs), inputs, device, *front)

    def read(
        self, stored: dict[str, Tensor], outputs: Runs, inputs: Shard
    ) -> tuple[Int4Codes, Tensor | None]:
        return read(self.scheme, stored, inputs)


class Int4Linear(Weight):
    """A grouped integer weight: it has the tensors of the checkpoint while it is loaded, and then the layout
    of the kernels."""

    def __init__(self, tensors: Int4Tensors, shape: LinearShape, plain: Format) -> None:
        super().__init__(shape)
        self.tensors = tensors
        self.plain = plain
        self.bias = bias_of(shape)
        self.stored = [tensors.empty(runs, shape.input_shard, shape.device) for runs in shape.output_runs]
        self.orders = [torch.arange(size) for size in shape.sizes_out]
        self.packed = nn.ParameterList()
        """The tensors that the kernels read."""

    def parts(self) -> list[dict[str, Piece]]:
        return with_bias([dict(part) for part in self.stored], self.bias, self.shape.sizes_out)

    def reorder(self, orders: list[Tensor]) -> None:
        """Record the order of outputs, which `finish` applies: in the file, several outputs may share a
        word."""
        self.orders = [old[new] for old, new in zip(self.orders, orders, strict=True)]
        for part, order in zip(self.parts(), orders, strict=True):
            if "bias" in part:
                bias = part["bias"].tensor
                bias.copy_(bias[order.to(bias.device)])

    def finish(self) -> None:
        runs: list[tuple[list[Int4Codes], Tensor | None]] = []
        for i, order in enumerate(self.orders):
            codes, inputs = self._read(i, order)
            if runs and _is_same_order(runs[-1][1], inputs):
                runs[-1][0].append(codes)
            else:
                runs.append(([codes], inputs))
        ends = (
            torch.tensor([0] + [sum(len(codes.codes) for codes in parts) for parts, _ in runs])
            .cumsum(0)
            .tolist()
        )
        products = [
            self._build_product(parts, inputs, None if self.bias is None else self.bias[start:end])
            for (parts, inputs), start, end in zip(runs, ends, ends[1:], strict=False)
        ]
        self.product = products[0] if len(products) == 1 else partial(_concatenate, products=products)
        if len(products) > 1:
            self.gated = None

    def _read(self, i: int, order: Tensor) -> tuple[Int4Codes, Tensor | None]:
        """Return the codes of part `i` with outputs in the order `order`, and for each column the index of
        the layer's input (None: in order); release the part's stored tensors."""
        stored = {suffix: piece.tensor for suffix, piece in self.stored[i].items()}
        codes, inputs = self.tensors.read(stored, self.shape.output_runs[i], self.shape.input_shard)
        self.stored[i] = {}
        if not torch.equal(order, torch.arange(len(order))):
            order = order.to(codes.codes.device)
            codes = codes._replace(
                **{name: getattr(codes, name)[order] for name in ("codes", "scales", "zeros")}
            )
        return codes, inputs

    def _build_product(
        self, parts: list[Int4Codes], order: Tensor | None, bias: Tensor | None
    ) -> Callable[[Tensor], Tensor]:
        """Return a function that computes x W^T + b for the concatenated parts; `order` has the layer's input
        of each column of their codes (None: in order)."""
        shape, product = self.shape, None
        gather: Callable[[Tensor], Tensor] | None = None
        if any(codes.group == 1 for codes in parts):
            return self._dequantize(parts, order, bias)
        on_gpu = shape.device.type == "cuda"
        integral = [split_zeros(codes, on_gpu=on_gpu) for codes in parts]
        whole, parts = parts, [codes for codes, _ in integral]
        offsets = _join_offsets(integral, shape.dtype if on_gpu else torch.float32)
        if on_gpu:
            product = self._on_gpu(parts, bias, may_gate=order is None and offsets is None)
            gather = None if order is None else partial(_gather, order=order)
        elif native.serves(shape.device, shape.dtype):
            product = self._on_cpu(parts, bias)
            gather = None if order is None else Gather(order)
        if product is None:
            return self._dequantize(whole, order, bias)
        if offsets is not None:
            self.packed.append(frozen_parameter(offsets))
            product = partial(_add_offsets, product=product, offsets=offsets, group=parts[0].group)
        return product if gather is None else partial(_compose, first=gather, then=product)

    def _on_gpu(
        self, parts: list[Int4Codes], bias: Tensor | None, *, may_gate: bool
    ) -> Callable[[Tensor], Tensor] | None:
        from quire.kernels.triton.int4 import gated, linear, pack

        if self.shape.dtype not in (torch.bfloat16, torch.float16):
            return None
        fields = [torch.cat(field) for field in list(zip(*parts, strict=True))[:3]]
        weight = pack(*fields, bits=parts[0].bits, dtype=self.shape.dtype)
        self.packed += [frozen_parameter(weight.codes), frozen_parameter(weight.heads)]
        if may_gate and bias is None:
            self.gated = partial(gated, weight=weight)
        return partial(linear, weight=weight, bias=bias)

    def _on_cpu(self, parts: list[Int4Codes], bias: Tensor | None) -> Callable[[Tensor], Tensor] | None:
        blocks = [as_blocks(part) for part in parts]
        matrices = [pack(*block, interleaved=interleaves()) for block in blocks if block is not None]
        if len(matrices) < len(parts):
            return None
        self.packed += [frozen_parameter(matrix.data) for matrix in matrices]
        return LinearProduct(matrices, bias)

    def _dequantize(
        self, parts: list[Int4Codes], order: Tensor | None, bias: Tensor | None
    ) -> Callable[[Tensor], Tensor]:
        """Dequantize the parts into an unquantized weight, and return the matmul of that weight."""
        _warn_dequantized(self.tensors.label, self.shape.device)
        shape = replace(self.shape, sizes_out=tuple(len(part.codes) for part in parts))
        weight = self.plain.linear(("",) * len(parts), shape)
        for stored, codes in zip(weight.parts(), parts, strict=True):
            stored["weight"].tensor.copy_(_values_in_order(codes, order, shape.size_in))
        if bias is not None:
            for piece, part_bias in zip(weight.parts(), bias.split(list(shape.sizes_out)), strict=True):
                piece["bias"].tensor.copy_(part_bias)
        weight.finish()
        self.packed += list(weight.parameters())
        return weight.product


class Int4Experts(StoredExperts):
    """Experts of a layer with grouped integer weights: they have the tensors of the checkpoint while they are
    loaded, and then the layout of the kernels."""

    def __init__(self, tensors: Int4Tensors, shape: ExpertShape, plain: Format) -> None:
        super().__init__(shape)
        self.tensors = tensors
        self.plain = plain
        self.stored = {
            name: tensors.empty((outputs,), inputs, shape.device, shape.experts)
            for name, (outputs, inputs) in shape.matrices().items()
        }
        self.packed = nn.ParameterList()

    def parts(self) -> dict[str, dict[str, Piece]]:
        return self.stored

    def finish(self) -> None:
        shape = self.shape
        if shape.device.type == "cuda":
            done = shape.dtype in (torch.bfloat16, torch.float16) and self._on_gpu()
        else:
            done = native.serves(shape.device, shape.dtype) and self._on_cpu()
        if not done:
            self._dequantize()
        self.stored = {}

    def _read(self, name: str, expert: int) -> tuple[Int4Codes, Tensor | None]:
        stored = {suffix: piece.tensor[expert] for suffix, piece in self.stored[name].items()}
        outputs, inputs = self.shape.matrices()[name]
        return self.tensors.read(stored, (outputs,), inputs)

    def _on_gpu(self) -> bool:
        from quire.kernels.triton.int4_moe import mix, pack, stack
        from quire.kernels.triton.matmul import has_room

        if not has_room() or self.shape.hidden % 8 or self.shape.intermediate % 8:
            return False
        packed = {}
        for names in (("gate", "up"), ("down",)):
            experts = []
            for expert in range(self.shape.experts):
                parts = [self._read(name, expert) for name in names]
                if any(
                    order is not None or codes.group == 1 or split_zeros(codes, on_gpu=True)[1] is not None
                    for codes, order in parts
                ):
                    return False
                fields = [
                    torch.cat(field) for field in list(zip(*(codes for codes, _ in parts), strict=True))[:3]
                ]
                experts.append(pack(*fields, bits=parts[0][0].bits, dtype=self.shape.dtype))
            packed[names] = stack(experts)
            self.packed += [frozen_parameter(packed[names].codes), frozen_parameter(packed[names].heads)]
        self.mix = partial(
            mix,
            gate_up=packed["gate", "up"],
            down=packed["down",],
            biases=(self.gate_up_bias, self.down_bias),
            activation=self.shape.activation,
        )
        self.adapts = False
        return True

    def _on_cpu(self) -> bool:
        matrices: dict[str, list[Matrix]] = {name: [] for name in _EXPERTS}
        for name, parts in matrices.items():
            for expert in range(self.shape.experts):
                codes, order = self._read(name, expert)
                blocks = as_blocks(codes) if order is None else None
                if blocks is None:
                    return False
                parts.append(pack(*blocks, interleaved=interleaves()))
        self.packed += [frozen_parameter(matrix.data) for parts in matrices.values() for matrix in parts]
        gate_up = list(zip(matrices["gate"], matrices["up"], strict=True))
        self.mix = CpuExperts(gate_up, matrices["down"], self.shape.activation, *self.biases)
        return True

    def _dequantize(self) -> None:
        _warn_dequantized(self.tensors.label, self.shape.device)
        experts = self.plain.experts(_EXPERTS, self.shape)
        for name in _EXPERTS:
            into = experts.parts()[name]["weight"].tensor
            for expert in range(self.shape.experts):
                into[expert].copy_(_values_in_order(*self._read(name, expert), into.shape[2]))
        for name, piece in self.bias_parts().items():
            experts.bias_parts()[name].tensor.copy_(piece.tensor)
        experts.finish()
        self.packed = nn.ParameterList(experts.parameters())
        self.mix = experts.mix


def _values_in_order(codes: Int4Codes, order: Tensor | None, inputs: int) -> Tensor:
    """Return the dequantized values, with inputs in the order of the layer's input. Padding refers to some
    input and has the value 0."""
    values = codes.values()
    if order is None:
        return values
    return values.new_zeros(len(values), inputs).index_add_(1, order.long(), values)


def _is_same_order(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def _join_offsets(parts: list[tuple[Int4Codes, Tensor | None]], dtype: torch.dtype) -> Tensor | None:
    """Return the zero-point offsets (see `split_zeros`) of all parts, [groups, outputs]; None if all are
    0."""
    if all(offsets is None for _, offsets in parts):
        return None
    rows = [torch.zeros_like(codes.scales) if offsets is None else offsets for codes, offsets in parts]
    return torch.cat(rows).t().to(dtype).contiguous()


def _add_offsets(x: Tensor, product: Callable[[Tensor], Tensor], offsets: Tensor, group: int) -> Tensor:
    """Return product(x) plus the zero-point correction that `product` leaves out: for each group of inputs,
    their sum times the group's `offsets` [groups, outputs]."""
    sums = x.unflatten(1, (-1, group)).sum(2, dtype=torch.float32)
    return product(x) + (sums.to(offsets.dtype) @ offsets).to(x.dtype)


def _gather(x: Tensor, order: Tensor) -> Tensor:
    return x.index_select(1, order)


def _compose(x: Tensor, first: Callable[[Tensor], Tensor], then: Callable[[Tensor], Tensor]) -> Tensor:
    return then(first(x))


def _concatenate(x: Tensor, products: list[Callable[[Tensor], Tensor]]) -> Tensor:
    return torch.cat([product(x) for product in products], 1)


def _warn_dequantized(label: str, device: torch.device) -> None:
    warn_once(
        logger,
        f"Some {label} {_UNSUPPORTED[device.type]}: they are "
        "dequantized and take as much memory as unquantized ones",
    )

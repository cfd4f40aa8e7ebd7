"""Quantization schemes: how the weight of a layer is stored."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from quire.errors import ConfigError

StoredShape = Callable[[str], tuple[int, ...] | None]
"""Function from the name of a tensor to its shape in the checkpoint; None if there is no such tensor."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the weight of a layer is stored in fewer bits than computations use."""

    marks: ClassVar[tuple[str, ...]] = ()
    """Suffixes of tensors that only layers quantized by this scheme have, not unquantized layers."""

    def as_stored(self, layer: str, mark: str, size: int, shape_of: StoredShape) -> "Scheme":
        """Return the scheme with settings that only the stored tensors of `layer` show. The layer has `size`
        weights, and a tensor with the suffix `mark` (one of `marks`)."""
        return self

    @property
    def bits_per_weight(self) -> float:
        """Return the approximate number of bits that a weight takes in memory, including its part of the
        scales."""
        return 8.02


@dataclass(frozen=True, slots=True)
class Fp8(Scheme):
    """8-bit floating-point weights (e4m3) with scales."""

    marks: ClassVar = ("weight_scale", "weight_scale_inv")
    weights: Literal["tensor", "channel", "block"] = "channel"
    """Granularity of the weight scales."""
    activations: Literal["token", "tensor", "static", "group", "none"] = "token"
    """Granularity of the input scales; `static`: stored in the checkpoint; `none`: inputs are not
    quantized."""
    block: tuple[int, int] = (128, 128)
    scale_name: str = "weight_scale"
    """Suffix of the tensor of scales."""
    stored: bool = True
    """Whether the checkpoint is quantized; otherwise weights are quantized while they are loaded."""

    def as_stored(self, layer: str, mark: str, size: int, shape_of: StoredShape) -> "Fp8":
        return replace(self, scale_name=mark)  # files use different names


@dataclass(frozen=True, slots=True)
class Int8(Scheme):
    """8-bit integer weights with scales."""

    marks: ClassVar = ("weight_scale",)
    weights: Literal["tensor", "channel"] = "channel"
    activations: Literal["token", "static", "none"] = "token"
    symmetric: bool = True
    """Whether inputs are quantized without a zero point."""
    stored: bool = True


@dataclass(frozen=True, slots=True)
class Grouped(Scheme):
    """Integer weights of few bits, with a scale and possibly a zero point per group of inputs."""

    marks: ClassVar = ("qweight", "weight_packed", "weight_scale", "weight_scale_and_zero")
    bits: int
    group: int
    """Number of inputs per group; -1: all inputs are one group."""
    symmetric: bool
    act_order: bool
    """Whether the inputs of a group are not consecutive: the checkpoint stores the group of each input."""
    layout: Literal["awq", "gptq", "gptq_v2", "compressed", "torchao", "torchao_pairs", "torchao_tiles"]
    intended_inputs: Literal["fp8", "int8"] | None = None
    """Type of quantized inputs that the checkpoint was made for; None: unquantized inputs. Quire never
    quantizes the inputs of these layers."""

    @property
    def bits_per_weight(self) -> float:
        bits = 4 if self.bits <= 4 else 8
        extra = 16 + (0 if self.symmetric else bits)
        return bits + (extra / self.group if self.group > 0 else 0.02)


@dataclass(frozen=True, slots=True)
class BitsAndBytes(Scheme):
    """Weights in the formats of the bitsandbytes package."""

    marks: ClassVar = ("weight.absmax", "SCB")
    kind: Literal["nf4", "fp4", "int8"]
    nested: bool = False
    """Whether the scales are quantized, too (double quantization)."""

    @property
    def bits_per_weight(self) -> float:
        return 8.02 if self.kind == "int8" else 4.13 if self.nested else 4.5


_HQQ_FIELDS = {8: 1, 4: 2, 2: 4, 3: 10, 1: 8}
"""Number of quantized values in a stored integer, by bits of a value."""


@dataclass(frozen=True, slots=True)
class Hqq(Scheme):
    """HQQ: integer weights with a scale and a fractional zero point per group of weights."""

    marks: ClassVar = ("W_q",)
    bits: int = 0
    """Bits of a stored value; 0: `as_stored` finds the number from the shapes of the stored tensors."""
    group: int = 0
    """Number of weights in a group; -1: all weights of an output (axis 1) or an input (axis 0); 0:
    `as_stored` finds the number from the shapes of the stored tensors."""
    axis: int = 1
    """1: the weights of a group are consecutive inputs of one output; 0: they are at equal distances, in
    several outputs."""
    layout: ClassVar = "hqq"
    fields: ClassVar = _HQQ_FIELDS

    def as_stored(self, layer: str, mark: str, size: int, shape_of: StoredShape) -> "Hqq":
        codes, scale = shape_of(f"{layer}.W_q") or (), shape_of(f"{layer}.scale")
        if scale is None:
            raise ConfigError(
                f"{layer}.scale is missing: a layer of HQQ has W_q, scale and zero. Quantized scales and "
                "zeros (scale_q, zero_scale) are not supported; quantize the model again without them"
            )
        groups = max(scale, default=1)
        axis = self.axis if groups == 1 else int(len(scale) == 2 and scale[0] == groups)
        is_vector = len(scale) == 2 and min(scale) == 1 and size % groups == 0
        rows, columns = (groups, size // groups) if axis else (size // groups, groups)
        known = [bits for bits, per in _HQQ_FIELDS.items() if codes == (-(-rows // per), columns)]
        if not is_vector or not known or self.bits and self.bits not in known:
            bits = f" of {self.bits} bits" if self.bits else ""
            raise ConfigError(
                f"{layer}: W_q of shape {codes} and scale of shape {scale} are not {size} weights{bits} as "
                "HQQ stores them; the file or its quantization_config is damaged, or the weights were stored "
                "with view_as_float"
            )
        if self.group > 0 and self.group != size // groups:
            raise ConfigError(
                f"{layer}: scale of shape {scale} has groups of {size // groups} weights, but "
                f"quantization_config says group_size {self.group}"
            )
        return Hqq(self.bits or known[0], size // groups, axis)

    @property
    def bits_per_weight(self) -> float:
        """Return the bits that a weight takes in memory, with its part of the scales. HQQ weights in groups
        along axis 0 take 16, since they are dequantized when they are loaded."""
        if self.axis == 0:
            return 16
        return (8 if self.bits > 4 else 4) + 48 / (self.group if self.group > 0 else 1024)


@dataclass(frozen=True, slots=True)
class BlockFloat(Scheme):
    """Floating-point weights of 4 bits (e2m1) or 8 bits (e4m3) with a scale per block of inputs: an e4m3
    scale per 16 inputs and one scale per tensor (`nvfp4`), or a power of two per 32 inputs (`mxfp4`,
    `mxfp8`)."""

    marks: ClassVar = ("weight_scale",)
    kind: Literal["nvfp4", "mxfp4", "mxfp8"]
    codes_name: str = "weight"
    """Suffix of the tensor of packed values."""
    tensor_scale: str = ""
    """Suffix of the scale per tensor; empty if there is none."""
    is_divisor: bool = False
    """Whether values are divided by the scale per tensor, instead of multiplied."""

    @property
    def bits_per_weight(self) -> float:
        """Return the bits per weight: `nvfp4` and `mxfp8` are FP8 weights on a GPU with FP8 kernels."""
        return 4.25 if self.kind == "mxfp4" else 8.02


@dataclass(frozen=True, slots=True)
class Mxfp4(Scheme):
    """The experts of gpt-oss: 4-bit floating-point weights (e2m1), with a power-of-two scale per 32
    weights."""

    marks: ClassVar = ("_blocks",)

    @property
    def bits_per_weight(self) -> float:
        return 4.25

"""Quantization schemes: how the weight of a layer is stored."""

from dataclasses import dataclass
from typing import ClassVar, Literal


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a layer's weight is stored in fewer bits than it is computed in."""

    marks: ClassVar[tuple[str, ...]] = ()
    """Suffixes of tensors that only layers of this scheme have."""

    @property
    def bits_per_weight(self) -> float:
        """Return the bits that a weight takes in memory, its share of the scales included."""
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
    """Suffix of the scales."""
    stored: bool = True
    """Whether the checkpoint is quantized; otherwise weights are quantized while they are loaded."""


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

    marks: ClassVar = ("qweight", "weight_packed", "weight_scale")
    bits: int
    group: int
    """Inputs per group; -1: all."""
    symmetric: bool
    act_order: bool
    """Whether groups are not consecutive inputs: the file has the group of each input."""
    layout: Literal["awq", "gptq", "gptq_v2", "compressed", "torchao"]
    intended_inputs: Literal["fp8", "int8"] | None = None
    """Type of the inputs that the checkpoint was made for. Here inputs are not quantized."""

    @property
    def bits_per_weight(self) -> float:
        extra = 16 + (0 if self.symmetric else self.bits)
        return self.bits + (extra / self.group if self.group > 0 else 0.02)


@dataclass(frozen=True, slots=True)
class BitsAndBytes(Scheme):
    """Weights in the formats of the bitsandbytes package."""

    marks: ClassVar = ("weight.absmax", "SCB")
    kind: Literal["nf4", "fp4", "int8"]
    nested: bool = False
    """Whether the scales are quantized, too."""

    @property
    def bits_per_weight(self) -> float:
        return 8.02 if self.kind == "int8" else 4.13 if self.nested else 4.5


@dataclass(frozen=True, slots=True)
class BlockFloat(Scheme):
    """Floating-point weights of 4 bits (e2m1) or 8 bits (e4m3) with a scale per block of inputs: an e4m3
    scale per 16 inputs and one scale per tensor (`nvfp4`), or a power of two per 32 inputs (`mxfp4`,
    `mxfp8`)."""

    marks: ClassVar = ("weight_scale",)
    kind: Literal["nvfp4", "mxfp4", "mxfp8"]
    codes_name: str = "weight"
    """Suffix of the packed values."""
    tensor_scale: str = ""
    """Suffix of the scale per tensor; empty if there is none."""
    is_divisor: bool = False
    """Whether values are divided by the scale per tensor, instead of multiplied."""

    @property
    def bits_per_weight(self) -> float:
        """Return 16 for the formats without a kernel, which are dequantized."""
        return 4.25 if self.kind == "mxfp4" else 16


@dataclass(frozen=True, slots=True)
class Mxfp4(Scheme):
    """The experts of gpt-oss: 4-bit floating-point weights (e2m1), with a power-of-two scale per 32
    weights."""

    marks: ClassVar = ("_blocks",)

    @property
    def bits_per_weight(self) -> float:
        return 4.25

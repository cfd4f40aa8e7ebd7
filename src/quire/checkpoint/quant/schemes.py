"""Schemes: how the weight of one layer is stored, apart from which layer it is and from its file's names."""

from dataclasses import dataclass
from typing import ClassVar, Literal


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a layer's weight is kept in fewer bits than it computes with."""

    marks: ClassVar[tuple[str, ...]] = ()
    """Suffixes of tensors that only a layer stored like this has."""


@dataclass(frozen=True, slots=True)
class Fp8(Scheme):
    """Numbers of 8 bits with an exponent (e4m3), and scales."""

    marks: ClassVar = ("weight_scale", "weight_scale_inv")
    weights: Literal["tensor", "channel", "block"] = "channel"
    """What has one scale."""
    activations: Literal["token", "tensor", "static", "group", "none"] = "token"
    """What has one scale where a layer's inputs are narrowed, too; `static`: it is stored; `none`: they are
    not."""
    block: tuple[int, int] = (128, 128)
    scale_name: str = "weight_scale"
    """Suffix of the scales."""
    stored: bool = True
    """False: weights are stored plain, and narrowed while they are loaded."""


@dataclass(frozen=True, slots=True)
class Int8(Scheme):
    """Whole numbers of 8 bits, and scales."""

    marks: ClassVar = ("weight_scale",)
    weights: Literal["tensor", "channel"] = "channel"
    activations: Literal["token", "static", "none"] = "token"
    symmetric: bool = True
    """Of inputs: False where 0 may be stored as another number."""
    stored: bool = True


@dataclass(frozen=True, slots=True)
class Grouped(Scheme):
    """Whole numbers of few bits; so many inputs of an output have a scale, and some a zero of their own."""

    marks: ClassVar = ("qweight", "weight_packed")
    bits: int
    group: int
    """-1: all of them."""
    symmetric: bool
    act_order: bool
    """Whether a group is not made of neighbours: the file says of each input which it is in."""
    layout: Literal["awq", "gptq", "gptq_v2", "compressed"]


@dataclass(frozen=True, slots=True)
class BitsAndBytes(Scheme):
    """The weights of the package of that name."""

    marks: ClassVar = ("weight.absmax", "SCB")
    kind: Literal["nf4", "fp4", "int8"]
    nested: bool = False
    """Whether the scales are narrowed as well."""


@dataclass(frozen=True, slots=True)
class Mxfp4(Scheme):
    """Numbers of 4 bits with an exponent (e2m1), 32 of which have a power of two for their scale."""

    marks: ClassVar = ("_blocks",)

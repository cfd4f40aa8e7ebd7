"""SchemeFormat: makes each layer's weight by the scheme that its checkpoint names."""

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby, islice

from quire.checkpoint.quant.facts import QuantFacts
from quire.checkpoint.quant.schemes import Fp8, Scheme
from quire.errors import ConfigError
from quire.quant.experts import ExpertShape, StoredExperts
from quire.quant.format import Format
from quire.quant.mixed import MixedWeight, shapes_of
from quire.quant.weight import LinearShape, Weight
from quire.registry import LazyTable

SCHEMES = LazyTable(
    "weight scheme",
    {
        "BitsAndBytes": "quire.quant.bitsandbytes:BitsAndBytesFormat",
        "Fp8": "quire.quant.fp8:Fp8Format",
        "Grouped": "quire.quant.int4:Int4Format",
        "Int8": "quire.quant.int8:Int8Format",
        "Mxfp4": "quire.quant.mxfp4:Mxfp4Format",
    },
)
"""By the name of a scheme's class: what is made of (scheme, plain format), a `Format`."""


class SchemeFormat:
    """A `Format` for layers in several schemes; those without one are `plain`."""

    def __init__(self, facts: QuantFacts, plain: Format, is_stored: Callable[[str], bool] | None) -> None:
        self.facts = facts
        self.plain = plain
        self.is_stored = is_stored
        """Whether the checkpoint has a tensor of a name; None where it has none at all."""
        self._made: dict[Scheme, Format] = {}

    def linear(self, parts: tuple[str, ...], shape: LinearShape) -> Weight:
        schemes = [self._scheme(part, narrows=shape.narrows) for part in parts]
        alike = [(scheme, len(list(run))) for scheme, run in groupby(schemes)]
        if len(alike) == 1:
            return self._format(schemes[0]).linear(parts, shape)
        weights, named = [], iter(parts)
        for (scheme, count), own in zip(alike, shapes_of(shape, [count for _, count in alike]), strict=True):
            weights.append(self._format(scheme).linear(tuple(islice(named, count)), own))
        return MixedWeight(shape, weights)

    def experts(self, parts: tuple[str, ...], shape: ExpertShape) -> StoredExperts:
        schemes = {part: self._scheme(part, narrows=True) for part in parts}
        first, *others = set(schemes.values())
        if others:
            raise ConfigError(
                "these experts are computed as one, but are not stored alike: "
                + ", ".join(f"{part} ({scheme or 'plain'})" for part, scheme in schemes.items())
                + "; use a checkpoint whose experts are"
            )
        return self._format(first).experts(parts, shape)

    def _format(self, scheme: Scheme | None) -> Format:
        if scheme is None:
            return self.plain
        if scheme not in self._made:
            self._made[scheme] = SCHEMES[type(scheme).__name__](scheme, self.plain)
        return self._made[scheme]

    def _scheme(self, part: str, *, narrows: bool) -> Scheme | None:
        """A layer's as the facts say, if the checkpoint has such tensors of it."""
        names = part, _of_one_expert(part)
        scheme = next(filter(None, map(self.facts.scheme, reversed(names))), None)
        if scheme is None:
            return None
        if self.is_stored is None or not getattr(scheme, "stored", True):
            return scheme if narrows else None
        marks = (
            mark
            for name in names
            for mark in scheme.marks
            if self.is_stored(f"{name}{'' if mark[0] == '_' else '.'}{mark}")
        )
        found = next(marks, None)
        if found is not None and isinstance(scheme, Fp8):
            return replace(scheme, scale_name=found)  # files differ in what they call it
        return None if found is None else scheme


def _of_one_expert(part: str) -> str:
    """experts.gate_proj -> experts.0.gate_proj"""
    where, _, last = part.rpartition(".")
    return f"{where}.0.{last}"

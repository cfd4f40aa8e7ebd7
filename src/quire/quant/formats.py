"""SchemeFormat: builds the weight of each layer by the scheme in its checkpoint."""

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby, islice

from quire.checkpoint.quant.facts import QuantFacts
from quire.checkpoint.quant.schemes import Fp8, Scheme
from quire.errors import ConfigError
from quire.quant import SCHEMES
from quire.quant.experts import ExpertShape, StoredExperts
from quire.quant.format import Format
from quire.quant.weight import LinearShape, MixedWeight, Weight, shapes_of


class SchemeFormat:
    """A `Format` for layers in several schemes; layers without one are `plain`."""

    def __init__(self, facts: QuantFacts, plain: Format, is_stored: Callable[[str], bool] | None) -> None:
        self.facts = facts
        self.plain = plain
        self.is_stored = is_stored
        """Whether the checkpoint has a tensor of a name; None if there are no weight files."""
        self._formats: dict[Scheme, Format] = {}

    def linear(self, parts: tuple[str, ...], shape: LinearShape) -> Weight:
        schemes = [self._scheme(part, narrows=shape.narrows) for part in parts]
        runs = [(scheme, len(list(run))) for scheme, run in groupby(schemes)]
        if len(runs) == 1:
            return self._format(schemes[0]).linear(parts, shape)
        weights, names = [], iter(parts)
        for (scheme, count), part_shape in zip(
            runs, shapes_of(shape, [count for _, count in runs]), strict=True
        ):
            weights.append(self._format(scheme).linear(tuple(islice(names, count)), part_shape))
        return MixedWeight(shape, weights)

    def experts(self, parts: tuple[str, ...], shape: ExpertShape) -> StoredExperts:
        schemes = {part: self._scheme(_first_expert(part), part, narrows=True) for part in parts}
        first, *others = set(schemes.values())
        if others:
            raise ConfigError(
                "experts of a layer must have the same quantization scheme: "
                + ", ".join(f"{part} ({scheme or 'plain'})" for part, scheme in schemes.items())
                + "; use another checkpoint"
            )
        return self._format(first).experts(parts, shape)

    def _format(self, scheme: Scheme | None) -> Format:
        if scheme is None:
            return self.plain
        if scheme not in self._formats:
            self._formats[scheme] = SCHEMES[type(scheme).__name__](scheme, self.plain)
        return self._formats[scheme]

    def _scheme(self, *names: str, narrows: bool) -> Scheme | None:
        """Return the scheme of a layer with one of these names if the checkpoint has its tensors."""
        scheme = next(filter(None, map(self.facts.scheme, names)), None)
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
        mark = next(marks, None)
        if mark is not None and isinstance(scheme, Fp8):
            return replace(scheme, scale_name=mark)  # files use different names
        return None if mark is None else scheme


def _first_expert(part: str) -> str:
    """Map experts.gate_proj to experts.0.gate_proj."""
    where, _, last = part.rpartition(".")
    return f"{where}.0.{last}"

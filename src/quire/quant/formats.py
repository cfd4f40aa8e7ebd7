"""SchemeFormat: builds the weight of each layer by its quantization scheme in the checkpoint."""

from itertools import groupby, islice

from quire.checkpoint.quant.facts import QuantFacts
from quire.checkpoint.quant.schemes import Scheme, StoredShape
from quire.errors import ConfigError
from quire.quant import SCHEMES
from quire.quant.experts import ExpertShape, StoredExperts
from quire.quant.format import Format
from quire.quant.weight import LinearShape, MixedWeight, Weight, shapes_of


class SchemeFormat:
    """Builds the weight of each layer by its quantization scheme, and weights without a scheme in the format
    `plain`."""

    def __init__(self, facts: QuantFacts, plain: Format, shape_of: StoredShape | None) -> None:
        self.facts = facts
        self.plain = plain
        self.shape_of = shape_of
        """Function that returns the shape of a checkpoint tensor by name; None if there are no weight
        files."""
        self._formats: dict[Scheme, Format] = {}

    def linear(self, parts: tuple[str, ...], shape: LinearShape) -> Weight:
        size_in = shape.size_in if shape.inputs is None else shape.inputs.all
        sizes = [sum(run.all for run in runs) for runs in shape.outputs] or shape.sizes_out
        schemes = [
            self._scheme(part, size=size * size_in, quantizable=shape.quantizable)
            for part, size in zip(parts, sizes, strict=True)
        ]
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
        size = shape.hidden * (shape.intermediate if shape.inner is None else shape.inner.all)
        schemes = {
            part: self._scheme(_first_expert(part), part, size=size, quantizable=True) for part in parts
        }
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

    def _scheme(self, *names: str, size: int, quantizable: bool) -> Scheme | None:
        """Return the scheme of a layer with one of these names; None if the checkpoint does not have the
        scheme's tensors for it. The layer has `size` weights; `quantizable`: whether to quantize it if the
        checkpoint is unquantized."""
        scheme = next(filter(None, map(self.facts.scheme, names)), None)
        if scheme is None:
            return None
        if self.shape_of is None or not getattr(scheme, "stored", True):
            return scheme if quantizable else None
        for name in names:
            for mark in scheme.marks:
                if self.shape_of(f"{name}{'' if mark[0] == '_' else '.'}{mark}") is not None:
                    return scheme.as_stored(name, mark, size, self.shape_of)
        return None


def _first_expert(part: str) -> str:
    """Return the name of the first expert's projection: experts.0.gate_proj for experts.gate_proj."""
    where, _, last = part.rpartition(".")
    return f"{where}.0.{last}"

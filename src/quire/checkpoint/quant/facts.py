"""QuantFacts: which layers of a checkpoint are stored in which scheme."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from quire.checkpoint.quant.schemes import Scheme


class LayerRule(NamedTuple):
    """The layers whose dotted names have a match of `pattern`, and their scheme; None: they are plain."""

    pattern: str
    scheme: Scheme | None


@dataclass(frozen=True, slots=True)
class QuantFacts:
    """What a checkpoint says of how its layers are stored, or what was asked for."""

    method: str
    """As the checkpoint calls it."""
    rules: tuple[LayerRule, ...]
    """The first that matches decides; without one a layer is plain."""
    cache: str | None = None
    """The type of keys and values that its scales were made for."""

    def scheme(self, name: str) -> Scheme | None:
        return next((rule.scheme for rule in self.rules if re.search(rule.pattern, name)), None)


def all_but(skipped: Iterable[str], scheme: Scheme) -> tuple[LayerRule, ...]:
    """Every layer but those with one of these names, whole or as a part between dots."""
    plain = (LayerRule(rf"(^|\.){re.escape(name)}(\.|$)", None) for name in skipped)
    return (*plain, LayerRule("", scheme))

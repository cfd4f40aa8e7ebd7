"""QuantFacts: the layers of a checkpoint and their quantization schemes."""

import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from quire.checkpoint.quant.schemes import Scheme
from quire.errors import ConfigError


class LayerRule(NamedTuple):
    """Regular expression for dotted layer names, and the scheme of these layers; None: they are not
    quantized."""

    pattern: str
    scheme: Scheme | None


@dataclass(frozen=True, slots=True)
class QuantFacts:
    """Quantization of a checkpoint, or the online quantization that was requested."""

    method: str
    """Method name in the checkpoint."""
    rules: tuple[LayerRule, ...]
    """Rules by layer name: the first matching rule applies; a layer without a matching rule is not
    quantized."""
    cache: str | None = None
    """KV cache dtype that the checkpoint was quantized for; None: the model's dtype."""

    def scheme(self, name: str) -> Scheme | None:
        return next((rule.scheme for rule in self.rules if re.search(rule.pattern, name)), None)

    @property
    def main_scheme(self) -> Scheme | None:
        """Return the scheme of most layers: that of the last rule that quantizes."""
        return next((rule.scheme for rule in reversed(self.rules) if rule.scheme is not None), None)


def all_but(skipped: Iterable[str], scheme: Scheme | None) -> tuple[LayerRule, ...]:
    """Return rules that give `scheme` to all layers, except those with a name in `skipped`: as their whole
    name, or as a part of it between dots."""
    return (*(LayerRule(layer_pattern(name), None) for name in skipped), LayerRule("", scheme))


def layer_pattern(*names: str) -> str:
    """Return a regular expression for layers with one of these names: as their whole name, or as a part of it
    between dots. The prefix `language_model.` of multimodal models is removed."""
    known = "|".join(re.escape(name.replace("language_model.", "")) for name in names)
    return rf"(^|\.)(?:{known})(\.|$)"


def target_pattern(name: str) -> str:
    """Return a regular expression for layers with this name, which may have wildcards. After `re:`, the name
    is itself a regular expression for the beginning of layer names."""
    if not name.startswith("re:"):
        return fnmatch.translate(name.replace("language_model.", "")) if "*" in name else layer_pattern(name)
    try:
        return re.compile(f"^(?:{name[3:]})").pattern
    except re.error as error:
        raise ConfigError(f"quantization_config: {name!r} is not a pattern: {error}") from error

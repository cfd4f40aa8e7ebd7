"""KVScales: the scales of keys and values in an 8-bit KV cache."""

from collections.abc import Iterator

import torch
from torch import nn

from quire.layers.scope import LoadedModule, Scope, Target
from quire.quant.weight import frozen_parameter

_NAMES = {
    "k": ("k_scale", "attn.k_scale", "k_proj.k_scale", "k_proj.output_scale", "kv_scale"),
    "v": ("v_scale", "attn.v_scale", "v_proj.v_scale", "v_proj.output_scale", "kv_scale"),
}
"""Names of the scales inside of an attention layer, in order of preference."""


class KVScales(LoadedModule):
    """Scale of the keys and scale of the values of an attention layer; 1.0 if not stored."""

    def __init__(self, attention: str, scope: Scope) -> None:
        super().__init__()
        self._stored: dict[str, str] = {}
        self.values = nn.ParameterDict()
        for kind, names in _NAMES.items():
            stored = [name for end in names if scope.is_stored(name := f"{attention}.{end}")]
            if not stored or stored[0] in self._stored.values():
                continue
            self._stored[kind] = stored[0]
            value = torch.ones(1, dtype=torch.float32, device=scope.device)
            self.values[kind] = frozen_parameter(value)

    @property
    def k(self) -> float:
        return float(self.values["k"]) if "k" in self.values else 1.0

    @property
    def v(self) -> float:
        """Return the scale of values; a shared kv_scale is stored as the scale of keys."""
        shared = "v" not in self.values and self._stored.get("k", "").endswith(".kv_scale")
        return self.k if shared else float(self.values["v"]) if "v" in self.values else 1.0

    def targets(self) -> Iterator[Target]:
        for kind, name in self._stored.items():
            yield Target(name, self.values[kind])

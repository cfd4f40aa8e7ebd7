"""Tokens that an adapter brings, or has trained by themselves: their rows of embedding and head."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError, RequestError
from quire.layers.lora import AdapterSlots
from quire.layers.lora_vocab import LoRAVocab

_EMBEDDING, _HEAD = "embed_tokens", "lm_head"
_TENSOR = re.compile(
    r"(?P<front>(?:base_model\.model\.)?)(?P<layer>.+?)\."
    r"(?:(?P<within>token_adapter|modules_to_save|original_module)\.)?(?:base_layer\.)?"
    r"(?P<what>weight|trainable_tokens_delta|lora_(?:embedding_)?(?P<factor>[AB])(?:\.\w+)??(?:\.weight)?)"
)
Scale = Callable[[str], tuple[int, float]]


def token_indices(keys: ConfigReader) -> dict[str, list[int]]:
    """What `trainable_token_indices` says, by the end of a layer's name; '' is the embedding."""
    found = keys.get("trainable_token_indices") or {}
    by_layer = found if isinstance(found, dict) else {"": found}
    for ids in by_layer.values():
        if not isinstance(ids, list) or not all(type(each) is int and each >= 0 for each in ids):
            raise keys.wrong("trainable_token_indices", "a list of token ids, or such lists by layer")
    return by_layer


@dataclass(slots=True)
class _Layer:
    """What the tensors have of one layer."""

    base: Tensor | None = None
    """Rows beyond the vocabulary,"""
    factors: dict[str, Tensor] = field(default_factory=dict)
    """what is added to these: A [rank, k] and B of an embedding, A and B [k, rank] of a head,"""
    scale: float = 1.0
    trained: dict[int, Tensor] = field(default_factory=dict)
    """and rows by id, in place of others."""


class LoRAVocabReader:
    """Takes such rows out of the tensors of an adapter. `kinds`: embed_tokens or lm_head, by the names that
    these have."""

    def __init__(self, slots: AdapterSlots, kinds: Mapping[str, str]) -> None:
        self.slots, self._kinds = slots, kinds

    @torch.inference_mode()
    def take(
        self, tensors: dict[str, Tensor], token_ids: Mapping[str, list[int]], scale: Scale
    ) -> dict[str, LoRAVocab]:
        """What is left in `tensors` is of the tokens that the model has."""
        if token_ids and not self.slots.owned:
            raise ConfigError(f"trainable_token_indices is not supported: {self.slots.no_own}")
        layers: dict[str, _Layer] = {}
        for name in list(tensors):
            match = _TENSOR.fullmatch(name)
            kind = match and self._kinds.get(match["layer"])
            if match is not None and kind:
                self._part(name, match, tensors, layers.setdefault(kind, _Layer()), token_ids, scale)
        found = {kind: own for kind in self.slots.owned if (own := self._own(kind, layers)) is not None}
        self._check(found)
        return found

    def num_new(self, own: Mapping[str, LoRAVocab]) -> int:
        """Tokens that the model does not have."""
        return max((int((each.ids >= self._vocab(kind)).sum()) for kind, each in own.items()), default=0)

    def why_not(self, tensor: Tensor, size: int) -> str:
        """Of a tensor that is not as large as the model's."""
        return f": an adapter cannot bring tokens here, {self.slots.no_own}" if len(tensor) > size else ""

    def _vocab(self, kind: str) -> int:
        return int(self.slots.owned[kind].vocab)

    def _part(
        self,
        name: str,
        match: re.Match[str],
        tensors: dict[str, Tensor],
        into: _Layer,
        token_ids: Mapping[str, list[int]],
        scale: Scale,
    ) -> None:
        kind, layer, tensor = self._kinds[match["layer"]], match["layer"], tensors[name]
        vocab, within = self._vocab(kind), match["within"]
        if within in ("modules_to_save", "original_module"):
            if f"{match['front']}{layer}.weight" in tensors:  # which is the one that was trained
                del tensors[name]
            return
        if match["what"] == "trainable_tokens_delta":
            into.trained = self._trained(name, layer, tensors.pop(name), token_ids)
        elif factor := match["factor"]:
            axis, is_long = (1, factor == "A") if kind == _EMBEDDING else (0, factor == "B")
            into.scale = scale(layer)[1]
            if is_long and tensor.ndim == 2 and tensor.shape[axis] > vocab:
                tensors[name], into.factors[factor] = tensor.tensor_split((vocab,), axis)
            elif not is_long:
                into.factors[factor] = tensor
        elif within == "token_adapter" or (tensor.ndim == 2 and len(tensor) > vocab):
            kept = tensors.pop(name)
            into.base = kept[vocab:]
            if within is None:
                tensors[name] = kept[:vocab]

    def _trained(
        self, name: str, layer: str, rows: Tensor, token_ids: Mapping[str, list[int]]
    ) -> dict[int, Tensor]:
        # Heads that are tied have what the embedding has.
        named = [ids for end, ids in token_ids.items() if end and f".{layer}".endswith(f".{end}")]
        ids = (named or list(token_ids.values()) or [[]])[0]
        if rows.ndim != 2 or len(ids) != len(rows):
            raise ConfigError(
                f"{name} has the shape {tuple(rows.shape)}, and trainable_token_indices has {len(ids)} tokens"
            )
        return dict(zip(ids, rows, strict=True))

    def _own(self, kind: str, layers: Mapping[str, _Layer]) -> LoRAVocab | None:
        room, found = self.slots.owned[kind], layers.get(kind, _Layer())
        if room.tied and found.base is None and not found.trained and _EMBEDDING in layers:
            found = _Layer(base=layers[_EMBEDDING].base, trained=layers[_EMBEDDING].trained)
        rows = {} if found.base is None else dict(enumerate(_sum(kind, found), room.vocab))
        rows |= found.trained
        if not rows:
            if len(found.factors) > 1:
                raise ConfigError(
                    f"the adapter has more tokens of {kind} than the model, and not their weights"
                )
            return None
        if len(rows) > self.slots.num_own:
            raise RequestError(
                f"the adapter has {len(rows)} tokens of its own, above the {self.slots.num_own} of "
                "--lora-extra-vocab-size",
                param="lora_request",
            )
        if any(row.shape != (room.hidden,) for row in rows.values()):
            raise ConfigError(f"{kind} of the adapter is not {room.hidden} wide, as the model's is")
        pins = self.slots.device.type == "cuda"
        own = torch.empty(len(rows), room.hidden, dtype=self.slots.dtype, pin_memory=pins)
        return LoRAVocab(
            torch.tensor(list(rows), dtype=torch.int64), own.copy_(torch.stack(list(rows.values())))
        )

    def _check(self, found: Mapping[str, LoRAVocab]) -> None:
        """Tokens that the model does not have are there one after the other, in both layers."""
        new = {
            kind: sorted(each for each in found[kind].ids.tolist() if each >= room.vocab)
            if kind in found
            else []
            for kind, room in self.slots.owned.items()
        }
        for kind, ids in new.items():
            first = self._vocab(kind)
            if ids != list(range(first, first + len(ids))):
                raise ConfigError(
                    f"the adapter brings the tokens {ids} of {kind}, and not all from {first} on"
                )
        if len({len(ids) for ids in new.values()}) > 1:
            counts = " and ".join(f"{len(ids)} rows of {kind}" for kind, ids in new.items())
            raise ConfigError(f"the adapter brings {counts}: a token of its own needs both")


def _sum(kind: str, layer: _Layer) -> Tensor:
    """[k, hidden], float32"""
    assert layer.base is not None
    rows, (a, b) = layer.base.float(), (layer.factors.get(which) for which in "AB")
    if a is None or b is None:
        return rows
    a, b = a.float(), b.float()
    added = (b @ a).t() if kind == _EMBEDDING else b @ a
    if added.shape != rows.shape:
        raise ConfigError(f"the adapter has weights of {len(rows)} tokens of its own, and adapts others")
    return rows + layer.scale * added

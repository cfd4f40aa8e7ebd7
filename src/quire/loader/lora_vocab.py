"""Embedding and head rows of tokens that an adapter adds or trains individually."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError, RequestError
from quire.layers.lora import AdapterSlots
from quire.layers.lora_tables import LoRAVocab

_EMBEDDING, _HEAD = "embed_tokens", "lm_head"
_TENSOR = re.compile(
    r"(?P<front>(?:base_model\.model\.)?)(?P<layer>.+?)\."
    r"(?:(?P<within>token_adapter|modules_to_save|original_module)\.)?(?:base_layer\.)?"
    r"(?P<what>weight|trainable_tokens_delta|lora_(?:embedding_)?(?P<factor>[AB])(?:\.\w+)??(?:\.weight)?)"
)
Scale = Callable[[str], tuple[int, float]]


def token_indices(keys: ConfigReader) -> dict[str, list[int]]:
    """Return the token ids in PEFT's `trainable_token_indices`, by the suffix of a layer's name; '' stands
    for the embedding."""
    indices = keys.get("trainable_token_indices") or {}
    by_layer = indices if isinstance(indices, dict) else {"": indices}
    for ids in by_layer.values():
        if not isinstance(ids, list) or not all(type(id) is int and id >= 0 for id in ids):
            raise keys.wrong("trainable_token_indices", "a list of token ids, or such lists by layer")
    return by_layer


@dataclass(slots=True)
class _Layer:
    """The tensors in an adapter that concern single tokens of the embedding or the head."""

    base: Tensor | None = None
    """Rows [k, hidden] of the k tokens beyond the model's vocabulary; None if the adapter has none."""
    factors: dict[str, Tensor] = field(default_factory=dict)
    """LoRA factors of `base`: A [rank, k] and B of an embedding, A and B [k, rank] of a head."""
    scale: float = 1.0
    trained: dict[int, Tensor] = field(default_factory=dict)
    """Rows of individually trained tokens, by token id; these rows take precedence over `base`."""


class LoRAVocabReader:
    """Extracts rows of added and trained tokens from an adapter; `kinds` maps layer names to `embed_tokens`
    or `lm_head`."""

    def __init__(self, slots: AdapterSlots, kinds: Mapping[str, str]) -> None:
        self.slots, self._kinds = slots, kinds

    @torch.inference_mode()
    def take(
        self, tensors: dict[str, Tensor], token_ids: Mapping[str, list[int]], scale: Scale
    ) -> dict[str, LoRAVocab]:
        """Remove from the `tensors` of a LoRA adapter the embedding rows of the tokens that it adds or has
        trained, and return them under the keys `embed_tokens` and `lm_head`. All other rows stay."""
        if token_ids and not self.slots.vocab_rows:
            raise ConfigError(f"trainable_token_indices is not supported: {self.slots.no_extra_vocab}")
        layers: dict[str, _Layer] = {}
        for name in list(tensors):
            match = _TENSOR.fullmatch(name)
            kind = match and self._kinds.get(match["layer"])
            if match is not None and kind:
                self._take_tensor(name, match, tensors, layers.setdefault(kind, _Layer()), token_ids, scale)
        vocabs = {
            kind: rows
            for kind in self.slots.vocab_rows
            if (rows := self._build_rows(kind, layers)) is not None
        }
        self._check(vocabs)
        return vocabs

    def why_not(self, tensor: Tensor, size: int) -> str:
        """Return the end of an error message, which says why an adapter cannot add tokens, if `tensor` has
        more than `size` rows; otherwise an empty string."""
        if len(tensor) <= size:
            return ""
        return f": an adapter cannot bring tokens here, {self.slots.no_extra_vocab}"

    def _take_tensor(
        self,
        name: str,
        match: re.Match[str],
        tensors: dict[str, Tensor],
        into: _Layer,
        token_ids: Mapping[str, list[int]],
        scale: Scale,
    ) -> None:
        kind, layer, tensor = self._kinds[match["layer"]], match["layer"], tensors[name]
        vocab, within = self.slots.vocab_rows[kind].vocab, match["within"]
        if within in ("modules_to_save", "original_module"):
            if f"{match['front']}{layer}.weight" in tensors:  # that tensor is the trained copy
                del tensors[name]
            return
        if match["what"] == "trainable_tokens_delta":
            into.trained = self._trained_rows(name, layer, tensors.pop(name), token_ids)
        elif factor := match["factor"]:
            axis, is_long = (1, factor == "A") if kind == _EMBEDDING else (0, factor == "B")
            into.scale = scale(layer)[1]
            if is_long and tensor.ndim == 2 and tensor.shape[axis] > vocab:
                tensors[name], into.factors[factor] = tensor.tensor_split((vocab,), axis)
            elif not is_long:
                into.factors[factor] = tensor
        elif within == "token_adapter" or (tensor.ndim == 2 and len(tensor) > vocab):
            rows = tensors.pop(name)
            into.base = rows[vocab:]
            if within is None:
                tensors[name] = rows[:vocab]

    def _trained_rows(
        self, name: str, layer: str, rows: Tensor, token_ids: Mapping[str, list[int]]
    ) -> dict[int, Tensor]:
        # Tied heads share the rows of the embedding.
        named = [ids for end, ids in token_ids.items() if end and f".{layer}".endswith(f".{end}")]
        ids = (named or list(token_ids.values()) or [[]])[0]
        if rows.ndim != 2 or len(ids) != len(rows):
            raise ConfigError(
                f"{name} has the shape {tuple(rows.shape)}, and trainable_token_indices has {len(ids)} tokens"
            )
        return dict(zip(ids, rows, strict=True))

    def _build_rows(self, kind: str, layers: Mapping[str, _Layer]) -> LoRAVocab | None:
        vocab_slots, layer = self.slots.vocab_rows[kind], layers.get(kind, _Layer())
        if vocab_slots.tied and layer.base is None and not layer.trained and _EMBEDDING in layers:
            layer = _Layer(base=layers[_EMBEDDING].base, trained=layers[_EMBEDDING].trained)
        rows = {} if layer.base is None else dict(enumerate(_sum_rows(kind, layer), vocab_slots.vocab))
        rows |= layer.trained
        if not rows:
            if len(layer.factors) > 1:
                raise ConfigError(
                    f"the adapter has more tokens of {kind} than the model, but lacks their weights"
                )
            return None
        if len(rows) > self.slots.max_extra_vocab:
            raise RequestError(
                f"the adapter has {len(rows)} tokens of its own, above the {self.slots.max_extra_vocab} of "
                "--lora-extra-vocab-size",
                param="lora_request",
            )
        if any(row.shape != (vocab_slots.hidden,) for row in rows.values()):
            raise ConfigError(f"{kind} of the adapter must have the model's hidden size {vocab_slots.hidden}")
        pins = self.slots.device.type == "cuda"
        buffer = torch.empty(len(rows), vocab_slots.hidden, dtype=self.slots.dtype, pin_memory=pins)
        return LoRAVocab(
            torch.tensor(list(rows), dtype=torch.int64), buffer.copy_(torch.stack(list(rows.values())))
        )

    def _check(self, vocabs: Mapping[str, LoRAVocab]) -> None:
        """Raise a ConfigError unless new tokens have consecutive ids after the model's vocabulary and are
        equally many in the embedding and the head."""
        new = {
            kind: sorted(id for id in vocabs[kind].ids.tolist() if id >= vocab_slots.vocab)
            if kind in vocabs
            else []
            for kind, vocab_slots in self.slots.vocab_rows.items()
        }
        for kind, ids in new.items():
            first = self.slots.vocab_rows[kind].vocab
            if ids != list(range(first, first + len(ids))):
                raise ConfigError(
                    f"the adapter brings the tokens {ids} of {kind}, but new ids must start at {first}"
                )
        if len({len(ids) for ids in new.values()}) > 1:
            counts = " and ".join(f"{len(ids)} rows of {kind}" for kind, ids in new.items())
            raise ConfigError(f"the adapter brings {counts}: a token of its own needs both")


def _sum_rows(kind: str, layer: _Layer) -> Tensor:
    """Return the rows [k, hidden] of the k new tokens with their LoRA update, in float32."""
    assert layer.base is not None
    rows, (a, b) = layer.base.float(), (layer.factors.get(name) for name in "AB")
    if a is None or b is None:
        return rows
    a, b = a.float(), b.float()
    added = (b @ a).t() if kind == _EMBEDDING else b @ a
    if added.shape != rows.shape:
        raise ConfigError(
            f"the adapter has weights of {len(rows)} tokens of its own, but adapts a different number"
        )
    return rows + layer.scale * added

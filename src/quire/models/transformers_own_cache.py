"""Models of transformers that cache each sequence themselves: any decoder, one sequence at a time."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.layout import CacheSpec, cache_specs
from quire.layers.scope import Scope
from quire.logs import get_logger, warn_once
from quire.models.transformers_attention import SelfTest, config_errors
from quire.models.transformers_backend import TransformersModel

logger = get_logger(__name__)

_CACHES = ("past_key_values", "cache_params", "state")
"""Names of the cache among the arguments and outputs of models."""
_CHUNKABLE = frozenset({"DynamicLayer", "DynamicSlidingWindowLayer"})
"""Classes of transformers' cache layers to which several tokens at once can be added after the first step."""


class _CacheMark(nn.Module):
    """Stands for the KV cache of one layer in the engine's memory plan, so that the scheduler counts blocks.
    The model keeps its keys and values in transformers' own cache objects."""

    def __init__(self, cache_spec: CacheSpec) -> None:
        super().__init__()
        self.cache_spec = cache_spec

    def bind_memory(self, memory: Tensor, *, block_size: int, cache_dtype: torch.dtype, group: int) -> None:
        """Ignore the memory: transformers allocates the cache of a sequence itself, as it grows."""


class OwnCacheModel(TransformersModel):
    """A model of transformers that computes one sequence after another, each with transformers' cache.

    A prompt is computed at once if one step has all of its tokens. Later tokens are computed one by one,
    unless all layers of the cache are plain keys and values: SSM states and compressed keys can be updated
    only by whole prompts or single tokens.
    """

    difference = "sequence by sequence it computes other logits than transformers"

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        self.marks = nn.ModuleList(_CacheMark(spec) for spec in cache_specs(facts) if spec is not None)
        self.caches: dict[int, Any] = {}
        """Transformers' cache of the sequence in each batch row. The first token of a new sequence replaces
        it."""
        self.cache_name = ""
        """Name of the model's cache argument. Empty if the model has none: `caches` then holds the token ids
        or embeddings of the sequence so far."""
        self.takes_positions = False
        """Whether the model takes `position_ids`. Some models count wrong from a cache of SSM states."""

    def place_cache(self) -> None:
        names = inspect.signature(self.body.forward).parameters
        self.cache_name = next((name for name in _CACHES if name in names), "")
        self.takes_positions = "position_ids" in names
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.scope.device)
        with config_errors(self.name):
            output = self.body(input_ids=token, use_cache=True, return_dict=True) if self.cache_name else {}
        if output.get(self.cache_name) is None:
            self._drop_cache("has no cache")

    def matches(self, expected: Tensor, trial: SelfTest) -> bool:
        if super().matches(expected, trial):
            return True
        if self.cache_name:
            self._drop_cache("computes other logits with its cache than without")
        return super().matches(expected, trial)

    def _drop_cache(self, reason: str) -> None:
        warn_once(logger, f"{self.name} {reason}: each step computes all tokens of its requests")
        self.cache_name = ""

    def logits_of(self, trial: SelfTest) -> Tensor:
        (first, second), rows = trial.sequences, range(2)
        with config_errors(self.name):
            parts = [self._advance(0, {"input_ids": first[None, :2]}, 0)]
            others = self._advance(1, {"input_ids": second[None]}, 0)
            parts += [self._advance(0, {"input_ids": first[None, 2:]}, 2), others]
            logits = self.logits(torch.cat(parts))
        for row in rows:
            del self.caches[row]
        return logits

    def forward(self, batch: Batch) -> Tensor:
        """Return hidden states [T, hidden] after the final norm."""
        ((name, inputs),) = self.inputs_of(batch).items()
        starts, rows = batch.query_starts.tolist(), batch.rows.tolist()
        positions = batch.positions.tolist()
        hidden = [
            self._advance(row, {name: inputs[:, start:end]}, positions[start])
            for row, start, end in zip(rows, starts[:-1], starts[1:], strict=True)
            if start < end
        ]
        num_padding = inputs.shape[1] - starts[-1]
        return torch.cat([*hidden, hidden[-1].new_zeros(num_padding, hidden[-1].shape[1])])

    def _advance(self, row: int, inputs: dict[str, Tensor], position: int) -> Tensor:
        """Compute the next tokens of the sequence in a batch row, the first at `position`; return hidden
        states [T, hidden]. `inputs` has token ids [1, T] or embeddings [1, T, hidden] by argument name."""
        ((name, tokens),) = inputs.items()
        cache = self.caches.get(row) if position else None
        if not self.cache_name:
            return self._compute_all(row, tokens, cache)
        parts = [tokens] if cache is None or _takes_chunks(cache) else list(tokens.split(1, 1))
        hidden = []
        for part in parts:
            known = {} if cache is None else {self.cache_name: cache}
            if self.takes_positions:
                end = position + part.shape[1]
                known["position_ids"] = torch.arange(position, end, device=part.device)[None]
                position = end
            output = self.body(**{name: part}, use_cache=True, return_dict=True, **known)
            hidden.append(output[0][0])
            cache = output[self.cache_name]
        self.caches[row] = cache
        return torch.cat(hidden)

    def _compute_all(self, row: int, tokens: Tensor, earlier: Tensor | None) -> Tensor:
        """Compute the sequence in a batch row again from the start, for models without a cache. Return the
        hidden states of the new `tokens`. These and the `earlier` tokens are ids or embeddings."""
        body: Any = self.body
        if earlier is not None and earlier.ndim != tokens.ndim:
            embed = body.get_input_embeddings()
            earlier = earlier if earlier.ndim == 3 else embed(earlier)
            tokens = tokens if tokens.ndim == 3 else embed(tokens)
        # The next step writes its tokens to the same memory.
        inputs = self.caches[row] = tokens.clone() if earlier is None else torch.cat([earlier, tokens], 1)
        name = "input_ids" if inputs.ndim == 2 else "inputs_embeds"
        hidden: Tensor = body(**{name: inputs}, return_dict=True)[0][0]
        return hidden[-tokens.shape[1] :]


def _takes_chunks(cache: Any) -> bool:
    """Return whether several tokens can be added to a cache at once: all its layers are plain keys and
    values, of all tokens or of a window."""
    layers: Any = getattr(cache, "layers", None) or ()
    return bool(layers) and all(type(layer).__name__ in _CHUNKABLE for layer in layers)

"""The two ends of a model: token ids and positions to vectors, vectors to logits."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from quire.errors import ConfigError
from quire.layers.lora_layers import LoRAEmbeddingLayer, LoRAHeadLayer, LoRALayer, LoRATarget
from quire.layers.lora_tables import LoRATable, whole_of
from quire.layers.lora_vocab import LoRAVocabRows, own_of
from quire.layers.scope import Scope, Target, target_of
from quire.quant.sharding import Shard, padded
from quire.quant.weight import LinearShape, kept

_HEAD = "lm_head"
"""What transformers calls it, whatever the checkpoint does."""


class _Table(nn.Module):
    """A vector for each token of the vocabulary, of which each device of a group has some."""

    multiply: Callable[[Tensor], Tensor]
    """[T, hidden] -> [T, vocab]; there after `finish`."""
    rows: Callable[[Tensor], Tensor]
    """[T] ids -> [T, hidden]; there after `finish`, unless no format of embeddings."""

    def __init__(
        self, vocab: int, hidden: int, scope: Scope, *, bias: bool = False, unit: bool = False
    ) -> None:
        super().__init__()
        self.name = scope.name
        self.unit = unit
        self.group = scope.group
        self.own = padded(scope.group, vocab)
        shape = LinearShape(
            hidden,
            (self.own.size,),
            bias,
            scope.dtype,
            scope.device,
            narrows=False,
            outputs=((self.own,),),
            inputs=Shard(hidden),
        )
        self.weight = scope.linear((scope.name,), shape)

    def targets(self) -> Iterator[Target]:
        (part,) = self.weight.parts()
        for suffix, piece in part.items():
            yield target_of(f"{self.name}.{suffix}", piece, (self.own,))

    def begin(self) -> None:
        self.weight.begin()

    def finish(self) -> None:
        if self.unit:
            (part,) = self.weight.parts()
            rows = part["weight"].tensor
            rows.copy_(functional.normalize(rows.float()))
        self.weight.finish()
        self.equip()

    def equip(self) -> None:
        is_alone = self.group.size == 1
        self.multiply = self.weight.product if is_alone else self._multiplied
        if self.weight.rows is not None:
            self.rows = self.weight.rows if is_alone else self._summed

    def _multiplied(self, x: Tensor) -> Tensor:
        return self.gathered(self.weight.product(x))

    def gathered(self, logits: Tensor) -> Tensor:
        """Those of all devices; what these have beyond the vocabulary is left out."""
        if self.group.size == 1:
            return logits
        logits = self.group.gather(logits)
        return logits if logits.shape[1] == self.own.all else logits[:, : self.own.all].contiguous()

    def _summed(self, token_ids: Tensor) -> Tensor:
        """Each token's vector is that of one device, and zero on the others."""
        assert self.weight.rows is not None
        own = token_ids - self.own.start
        is_elsewhere = (own < 0) | (own >= self.own.size)
        rows = self.weight.rows(own.masked_fill_(is_elsewhere, 0))
        return self.group.all_reduce(rows.masked_fill_(is_elsewhere[:, None], 0))


class TokenEmbedding(_Table):
    """The vectors of token ids."""

    def __init__(self, vocab: int, hidden: int, scope: Scope) -> None:
        super().__init__(vocab, hidden, scope)
        self.point: LoRALayer | None = None
        if scope.adapters is not None and scope.stage.is_first and scope.adapters.takes(scope.name):
            self.point = LoRAEmbeddingLayer(scope.name, scope.adapters, vocab, (hidden,), scope.ops)
            self.point.places[scope.name] = LoRATarget(
                self.point, slice(0, 1), Shard(vocab), (Shard(hidden),), is_table=True
            )
        self.whole: LoRATable | None = None
        if scope.stage.is_first:
            self.whole = whole_of("embed_tokens", scope, self.own, hidden)
        self.slots = scope.adapters
        self.brought: LoRAVocabRows | None = None
        if scope.stage.is_first:
            self.brought = own_of("embed_tokens", scope, vocab, hidden)

    def equip(self) -> None:
        super().equip()
        assert self.weight.rows is not None, "a format without rows is not one for embeddings"

    def forward(self, token_ids: Tensor) -> Tensor:
        if self.brought is None or self.slots is None or not self.slots.is_wide:
            return self._embedded(token_ids)
        return self.brought.embed(self._embedded(self.brought.inside(token_ids)), token_ids)

    def _embedded(self, token_ids: Tensor) -> Tensor:
        out = self.rows(token_ids)
        if self.whole is not None:
            out = self.whole.rows(out, token_ids)
        return out if self.point is None else self.point.add(out, token_ids)


class Positions(nn.Module):
    """The learned vectors of positions; the checkpoint has those of the first in row `first`."""

    def __init__(self, max_len: int, hidden: int, scope: Scope, *, first: int = 0) -> None:
        super().__init__()
        if scope.max_len > max_len:
            raise ConfigError(
                f"max_model_len {scope.max_len} is more than the {max_len} positions that the checkpoint has"
            )
        self.name = f"{scope.name}.weight"
        self.ops = scope.ops
        self.first = first
        self.weight = kept(scope.empty(first + max_len, hidden))

    def forward(self, positions: Tensor) -> Tensor:
        return self.ops.embed(positions, self.weight[self.first :])

    def targets(self) -> Iterator[Target]:
        yield Target(self.name, self.weight)

    def finish(self) -> None:
        """The vectors are used as they were loaded."""


class Head(nn.Module):
    """Logits of the whole vocabulary; `tied` is the embedding whose weight it shares, `unit` says that its
    rows are made of one length."""

    def __init__(
        self,
        vocab: int,
        hidden: int,
        scope: Scope,
        *,
        tied: TokenEmbedding | None = None,
        bias: bool = False,
        unit: bool = False,
    ) -> None:
        super().__init__()
        self.tied = tied is not None
        self.table: _Table = tied or _Table(vocab, hidden, scope, bias=bias, unit=unit)
        self.point: LoRALayer | None = None
        if scope.adapters is not None and scope.adapters.takes(scope.name, _HEAD):
            own = self.table.own
            self.point = LoRAHeadLayer(scope.name, scope.adapters, hidden, (own.size,), scope.ops)
            place = LoRATarget(self.point, slice(0, 1), Shard(hidden), (own,))
            self.point.places |= {scope.name: place, _HEAD: place}
        self.slots = scope.adapters
        self.whole = None if bias else whole_of(_HEAD, scope, self.table.own, hidden)
        self.brought = None if bias else own_of(_HEAD, scope, vocab, hidden, tied.name if tied else "")
        self.name = scope.name
        own_bias = bias and tied is not None
        self.bias = kept(scope.empty(vocab)) if own_bias else None
        """What is not in the table that it shares."""

    def targets(self) -> Iterator[Target]:
        if self.bias is not None:
            yield Target(f"{self.name}.bias", self.bias)

    def finish(self) -> None:
        """The bias is used as it was loaded."""

    def forward(self, x: Tensor) -> Tensor:
        out = self._product(x)
        return out if self.bias is None else out.add_(self.bias)

    def _product(self, x: Tensor) -> Tensor:
        if self.slots is None or self.slots.logit_tokens is None:
            return self.table.multiply(x)
        out = self.table.weight.product(x)
        if self.whole is not None:
            out = self.whole.logits(out, x)
        out = self.table.gathered(out if self.point is None else self.point.add(out, x))
        return self.brought.logits(out, x) if self.brought is not None and self.slots.is_wide else out

    @property
    def is_wide(self) -> bool:
        """Whether there are logits of tokens that adapters bring, minus infinity for all others."""
        return self.brought is not None and self.brought.slots.is_wide

    def rows(self, token_ids: list[int]) -> Tensor:
        """[len(token_ids), hidden]: the weights of these tokens."""
        device = self.table.weight.shape.device
        return self.table.rows(torch.tensor(token_ids, device=device))

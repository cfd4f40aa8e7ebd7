"""Token embedding, learned position embedding, and the LM head."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from quire.attention.batch import Batch, LoRATokens
from quire.errors import ConfigError
from quire.layers.lora_layers import LoRAEmbeddingLayer, LoRAHeadLayer, LoRALayer, LoRATarget
from quire.layers.lora_tables import LoRATable, LoRAVocabRows
from quire.layers.scope import LoadedModule, Scope, Target, target_of
from quire.quant.sharding import Shard, padded
from quire.quant.weight import LinearShape, frozen_parameter

_HEAD = "lm_head"
"""Name of the LM head in transformers. LoRA adapters use this name even if the checkpoint of the model has
another."""


class _Table(nn.Module):
    """Weight of an embedding or LM head: one row for each token of the vocabulary, sharded over the
    tensor-parallel group. With `unit` the rows are scaled to unit length after loading."""

    multiply: Callable[[Tensor], Tensor]
    """Function that computes logits: [T, hidden] -> [T, vocab]; set by `finish`."""
    rows: Callable[[Tensor], Tensor]
    """Function that looks up rows: [T] token ids -> [T, hidden]; set by `finish` if the weight format
    supports it."""

    def __init__(
        self, vocab: int, hidden: int, scope: Scope, *, bias: bool = False, unit: bool = False
    ) -> None:
        super().__init__()
        self.name = scope.name
        self.unit = unit
        self.group = scope.group
        self.shard = padded(scope.group, vocab)
        shape = LinearShape(
            hidden,
            (self.shard.size,),
            bias,
            scope.dtype,
            scope.device,
            quantizable=False,
            outputs=((self.shard,),),
            inputs=Shard(hidden),
        )
        self.weight = scope.linear((scope.name,), shape)

    def targets(self) -> Iterator[Target]:
        (part,) = self.weight.parts()
        for suffix, piece in part.items():
            yield target_of(f"{self.name}.{suffix}", piece, (self.shard,))

    def begin(self) -> None:
        self.weight.begin()

    def finish(self) -> None:
        if self.unit:
            (part,) = self.weight.parts()
            rows = part["weight"].tensor
            rows.copy_(functional.normalize(rows.float()))
        self.weight.finish()
        self.bind_kernels()

    def bind_kernels(self) -> None:
        is_alone = self.group.size == 1
        self.multiply = self.weight.product if is_alone else self._multiply_and_gather
        if self.weight.rows is not None:
            self.rows = self.weight.rows if is_alone else self._lookup_and_reduce

    def _multiply_and_gather(self, x: Tensor) -> Tensor:
        return self.gathered(self.weight.product(x))

    def gathered(self, logits: Tensor) -> Tensor:
        """Return the logits of the whole vocabulary: gather the shards of all tensor-parallel ranks, and drop
        the padding of the vocabulary."""
        if self.group.size == 1:
            return logits
        logits = self.group.gather(logits)
        return logits if logits.shape[1] == self.shard.all else logits[:, : self.shard.all].contiguous()

    def _lookup_and_reduce(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings [T, hidden]: look up the rows of this rank, set those of other ranks to zero,
        and all-reduce."""
        assert self.weight.rows is not None
        local_ids = token_ids - self.shard.start
        is_elsewhere = (local_ids < 0) | (local_ids >= self.shard.size)
        rows = self.weight.rows(local_ids.masked_fill_(is_elsewhere, 0))
        return self.group.all_reduce(rows.masked_fill_(is_elsewhere[:, None], 0))


class TokenEmbedding(_Table):
    """Token embedding, sharded over the vocabulary, with optional LoRA."""

    def __init__(self, vocab: int, hidden: int, scope: Scope) -> None:
        super().__init__(vocab, hidden, scope)
        self.lora_layer: LoRALayer | None = None
        self.lora_table: LoRATable | None = None
        self.extra_rows: LoRAVocabRows | None = None
        slots = scope.adapters
        if slots is None or not scope.stage.is_first:
            return
        if slots.takes(scope.name):
            self.lora_layer = LoRAEmbeddingLayer(scope.name, slots, vocab, (hidden,), scope.ops)
            self.lora_layer.targets[scope.name] = LoRATarget(
                self.lora_layer, slice(0, 1), Shard(vocab), (Shard(hidden),), is_table=True
            )
        self.lora_table = slots.add_table("embed_tokens", scope.name, self.shard, hidden, scope.group)
        self.extra_rows = slots.add_vocab_rows("embed_tokens", scope.name, vocab, hidden)

    def bind_kernels(self) -> None:
        super().bind_kernels()
        assert self.weight.rows is not None, "this weight format does not support embedding lookup"

    def forward(self, token_ids: Tensor, batch: Batch | None = None) -> Tensor:
        """Return the embeddings [T, hidden], with the LoRA adapters of the batch's tokens applied."""
        lora = None if batch is None else batch.lora
        if lora is None:
            return self.rows(token_ids)
        if self.extra_rows is None or not lora.uses_extra_vocab:
            return self._embed(token_ids, lora)
        return self.extra_rows.embed(
            self._embed(self.extra_rows.inside(token_ids), lora), token_ids, lora.slots
        )

    def _embed(self, token_ids: Tensor, lora: LoRATokens) -> Tensor:
        out = self.rows(token_ids)
        if self.lora_table is not None:
            out = self.lora_table.embed(out, token_ids, lora.slots)
        return out if self.lora_layer is None else self.lora_layer.add(out, token_ids, lora)


class Positions(LoadedModule):
    """Learned position embeddings; position 0 is in row `first` of the checkpoint."""

    def __init__(self, max_len: int, hidden: int, scope: Scope, *, first: int = 0) -> None:
        super().__init__()
        if scope.max_len > max_len:
            raise ConfigError(
                f"max_model_len {scope.max_len} exceeds the {max_len} positions of the checkpoint"
            )
        self.name = f"{scope.name}.weight"
        self.ops = scope.ops
        self.first = first
        self.weight = frozen_parameter(scope.empty(first + max_len, hidden))

    def forward(self, positions: Tensor) -> Tensor:
        return self.ops.embed(positions, self.weight[self.first :])

    def targets(self) -> Iterator[Target]:
        yield Target(self.name, self.weight)


class Head(LoadedModule):
    """LM head. `tied` is the embedding whose weight the head shares; `unit` gives the rows unit length."""

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
        self.lora_layer: LoRALayer | None = None
        self.lora_table: LoRATable | None = None
        self.extra_rows: LoRAVocabRows | None = None
        slots, shard = scope.adapters, self.table.shard
        if slots is not None and slots.takes(scope.name, _HEAD):
            self.lora_layer = LoRAHeadLayer(scope.name, slots, hidden, (shard.size,), scope.ops)
            target = LoRATarget(self.lora_layer, slice(0, 1), Shard(hidden), (shard,))
            self.lora_layer.targets |= {scope.name: target, _HEAD: target}
        if slots is not None and not bias:
            self.lora_table = slots.add_table(_HEAD, scope.name, shard, hidden, scope.group)
            self.extra_rows = slots.add_vocab_rows(_HEAD, scope.name, vocab, hidden, tied=self.tied)
        self.name = scope.name
        has_bias = bias and tied is not None
        self.bias = frozen_parameter(scope.empty(vocab)) if has_bias else None
        """Bias of a head with a tied embedding; an untied table has its own bias."""

    def targets(self) -> Iterator[Target]:
        if self.bias is not None:
            yield Target(f"{self.name}.bias", self.bias)

    def forward(self, x: Tensor, lora: LoRATokens | None = None) -> Tensor:
        """Return the logits [N, vocab] of x [N, hidden]; `lora` has the adapter slots of the rows of x."""
        out = self.table.multiply(x) if lora is None else self._adapted_logits(x, lora)
        return out if self.bias is None else out.add_(self.bias)

    def _adapted_logits(self, x: Tensor, lora: LoRATokens) -> Tensor:
        out = self.table.weight.product(x)
        if self.lora_table is not None:
            out = self.lora_table.logits(out, x, lora.slots)
        out = self.table.gathered(out if self.lora_layer is None else self.lora_layer.add(out, x, lora))
        return (
            self.extra_rows.logits(out, x, lora.slots)
            if self.extra_rows is not None and lora.uses_extra_vocab
            else out
        )

    def widens(self, lora: LoRATokens | None) -> bool:
        """Return whether `forward` adds columns for the new tokens of LoRA adapters to the logits. They are
        -inf for rows without that adapter."""
        return self.extra_rows is not None and lora is not None and lora.uses_extra_vocab

    def rows(self, token_ids: list[int]) -> Tensor:
        """Return the rows of the LM head weight for these token ids, [len(token_ids), hidden]."""
        device = self.table.weight.shape.device
        return self.table.rows(torch.tensor(token_ids, device=device))

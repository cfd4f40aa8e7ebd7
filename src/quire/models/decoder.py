"""Decoder: the base of all decoder models, with embedding, layers, final norm and LM head."""

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from quire.attention.batch import Batch, LoRATokens
from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.errors import ConfigError
from quire.layers.embedding import Head, Positions, TokenEmbedding
from quire.layers.norm import Norm, norm_of
from quire.layers.rope import Rope
from quire.layers.scope import DecoderNames, Scope


class LayerFactory(Protocol):
    """Class or function that builds a decoder layer, or the mixer of one, from its hyperparameters."""

    def __call__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> nn.Module: ...


class HiddenWithAux(NamedTuple):
    """Output of a target model, with the hidden states of intermediate layers for its draft model."""

    hidden: Tensor
    """Hidden states after the final norm, [T, hidden]."""
    aux: tuple[Tensor, ...]
    """Inputs of intermediate layers, [T, hidden] each, in the order of
    `Decoder.set_aux_hidden_state_layers`."""


class Decoder(nn.Module):
    """A stack of layers. Each layer maps (x, residual) to (x, residual); x + residual is the hidden state.

    A pipeline stage has some of the layers; the first stage has the embedding, the last has norm and head.
    """

    Layer: LayerFactory
    names = DecoderNames()
    first_position = 0
    """Row of position 0 in the table of learned positions."""

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__()
        names = self.names
        scope = replace(scope, transposed=facts.transposed, names=names)
        body, stage = scope / names.body, scope.stage
        self.ops = scope.ops
        self.aux_layers: tuple[int, ...] = ()
        self.token_indices = torch.empty(0, dtype=torch.int64)
        """Consecutive indices, [max_tokens], used to copy hidden states for a draft model; empty without
        `aux_layers`."""
        self.embed_scale, self.logit_scale = facts.embed_scale, facts.logit_scale
        self.logit_softcap = facts.logit_softcap
        self.embed: TokenEmbedding | None = None
        self.positions: Positions | None = None
        self.norm: Norm | None = None
        self.head: Head | None = None
        if stage.is_first or (stage.is_last and facts.tied):
            self.embed = TokenEmbedding(facts.vocab, facts.hidden, body / names.embedding)
        if stage.is_first and facts.learned_positions:
            self.positions = Positions(
                facts.max_len, facts.hidden, body / names.positions, first=self.first_position
            )
        rope = cache(lambda rope: Rope(rope, scope))  # one table for each kind of layer
        stage_layers = [(i, facts.layers[i]) for i in stage.layers(len(facts.layers))]
        self.layers = nn.ModuleList(
            scope.on_layer_built(
                self.Layer(facts.of_layer(layer), layer, rope(layer.rope), body / names.layers / i)
            )
            for i, layer in stage_layers
        )
        self.hidden = facts.hidden
        levels = 0 if facts.media is None else facts.media.levels
        if stage.is_first and len(self.layers) < levels:
            raise ConfigError(
                f"the first pipeline stage has {len(self.layers)} layers, but this model adds image features "
                f"to its first {levels} layers; reduce pipeline_parallel_size or set pp_layer_partition"
            )
        if stage.is_last:
            self.norm = norm_of(facts, body / names.last_norm)
            self.head = Head(
                facts.vocab,
                facts.hidden,
                scope / names.head,
                tied=self.embed if facts.tied else None,
                bias=facts.head_bias,
                unit=facts.norm_head,
            )

    def forward(self, batch: Batch) -> Tensor | HiddenWithAux | tuple[Tensor, Tensor]:
        """Return hidden states [T, hidden] after the final norm, with the inputs of `aux_layers` if there are
        any; on pipeline stages before the last, return (x, residual), whose sum is the hidden state."""
        x, residual = (
            self.embedded(batch) if batch.intermediate_tensors is None else batch.intermediate_tensors
        )
        aux, more = tuple[Tensor, ...](), self.layer_inputs(x, batch)
        if self.aux_layers or (batch.embeds is not None and batch.embeds[1].shape[1] > self.hidden):
            x, residual, aux = self._layer_by_layer(x, residual, batch, more)
        else:
            for layer in self.layers:
                x, residual = layer(x, residual, batch, *more)
        if self.norm is None:
            assert residual is not None, "a stage has at least one layer"
            return x, residual
        hidden = self.norm(x, residual)[0]
        return HiddenWithAux(hidden, aux) if aux else hidden

    def layer_inputs(self, x: Tensor, batch: Batch) -> tuple[Any, ...]:
        """Return the arguments that every layer gets besides x, residual and batch, computed once per forward
        pass. `x` is the input of the first layer."""
        return ()

    def set_aux_hidden_state_layers(
        self, layers: tuple[int, ...], max_tokens: int, device: torch.device
    ) -> None:
        """Let each forward pass also return the hidden states before these layers, for a draft model
        (EAGLE-3). An index equal to the number of layers stands for the output of the last layer."""
        self.aux_layers, self.token_indices = layers, torch.arange(max_tokens, device=device)

    def _layer_by_layer(
        self, x: Tensor, residual: Tensor | None, batch: Batch, more: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
        """Run all layers, and add deepstack image features to the outputs of the first ones. Return
        (x, residual) and the inputs of `aux_layers`."""
        states, index = dict[int, Tensor](), self.token_indices[: len(x)]
        tokens, added = index, list[Tensor]()
        if batch.embeds is not None:
            tokens, vectors = batch.embeds
            _, *added = vectors.split(self.hidden, 1)
        for number, layer in enumerate(self.layers):
            if number in self.aux_layers:
                states[number] = self._copy_sum(index, x, residual)
            x, residual = layer(x, residual, batch, *more)
            if number < len(added):
                x.index_add_(0, tokens, added[number].to(x.dtype))
        if len(self.layers) in self.aux_layers:
            states[len(self.layers)] = self._copy_sum(index, x, residual)
        return x, residual, tuple(states[number] for number in self.aux_layers)

    def _copy_sum(self, index: Tensor, x: Tensor, residual: Tensor | None) -> Tensor:
        """Return x + residual in new memory, because layers add in place. `index` holds the row indices to
        copy. The operations used can be recorded for replay."""
        copied = self.ops.embed(index, x if residual is None else residual)
        return copied if residual is None else self.ops.add(copied, x)

    def embedded(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return the token embeddings and the embeddings of learned positions (None if there are none) as x
        and residual, which the first norm adds."""
        assert self.embed is not None, "only the first stage reads tokens"
        x: Tensor = self.embed(batch.token_ids, batch)
        x = x if self.embed_scale == 1 else self.ops.scale(x, self.embed_scale)
        if batch.embeds is not None:
            tokens, vectors = batch.embeds
            x.index_copy_(0, tokens, vectors[:, : self.hidden].to(x.dtype))
        return x, None if self.positions is None else self.positions(batch.positions)

    def logits(self, hidden: Tensor, lora: LoRATokens | None = None) -> Tensor:
        """Return logits [N, vocab] of hidden states [N, hidden]; `lora` has the adapter slots of the rows."""
        assert self.head is not None, "only the last stage has a head"
        out: Tensor = self.head(hidden, lora)
        if self.logit_scale != 1:
            out = self.ops.scale(out, self.logit_scale)
        if self.logit_softcap is None:
            return out
        masked = out.isneginf() if self.head.widens(lora) else None
        out = self.ops.softcap(out, self.logit_softcap)
        return out if masked is None else out.masked_fill_(masked, -torch.inf)


def refuse_pipeline(scope: Scope, models: str) -> None:
    """Raise a ConfigError if there are several pipeline stages. `models` names the models that do not support
    them."""
    if scope.stage.count > 1:
        raise ConfigError(
            f"pipeline_parallel_size > 1 is not supported with {models}: use tensor_parallel_size"
        )


def decoder_of(layer: LayerFactory, like: type[Decoder] = Decoder, **names: Any) -> type[Decoder]:
    """Return a decoder class whose layers are built by `layer`. Its checkpoint names are those of `like`,
    except for `names`."""
    return type("Decoder", (Decoder,), {"Layer": staticmethod(layer), "names": like.names._replace(**names)})

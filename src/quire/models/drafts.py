"""Draft models that read the hidden states of a target model: EAGLE, EAGLE-3 and MTP."""

from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.layers.embedding import Head, TokenEmbedding
from quire.layers.linear import WholeLinear
from quire.layers.norm import norm_of
from quire.layers.rope import Rope
from quire.layers.scope import Scope
from quire.layers.vision import Learned
from quire.models import MODELS, llama
from quire.models.decoder import LayerFactory


class TargetModel(Protocol):
    """The target model: provides the embedding and LM head that a draft model does not have."""

    embed: TokenEmbedding | None
    embed_scale: float

    def logits(self, hidden: Tensor) -> Tensor: ...


class DraftHead(nn.Module):
    """A draft model. It reads each token with the hidden state of the token before, which the target model or
    the draft model itself computed."""

    embed: TokenEmbedding | None
    """Token embedding; None to use the target model's embedding."""

    def __init__(self) -> None:
        super().__init__()
        self._target: list[TargetModel] = []
        """Target model, in a list so that it is not registered as a submodule."""

    def set_target(self, target: TargetModel) -> None:
        self._target = [target]

    def embedded(self, token_ids: Tensor) -> Tensor:
        target = self._target[0]
        embed = target.embed if self.embed is None else self.embed
        assert embed is not None, "the target's embedding is on another pipeline stage"
        x: Tensor = embed(token_ids)
        return x if target.embed_scale == 1 else x * target.embed_scale

    def input_states(self, target_states: Tensor) -> Tensor:
        """Return the hidden states [T, hidden] that `forward` reads, computed from those of the target model,
        which may be of several layers."""
        return target_states

    def forward(self, batch: Batch, states: Tensor) -> tuple[Tensor, Tensor]:
        """Run the draft model on tokens and `states` [T, hidden], the hidden state of the token before each.
        Return the input of `logits`, and the states for the next draft step, [T, hidden] each."""
        raise NotImplementedError

    def logits(self, x: Tensor) -> Tensor:
        """Return logits [N, draft vocabulary] of x [N, hidden]."""
        return self._target[0].logits(x)

    def target_ids(self, ids: Tensor) -> Tensor:
        """Return the target model's token ids for ids of the draft vocabulary, which may be smaller."""
        return ids


def _build_embedding(facts: ArchFacts, scope: Scope) -> TokenEmbedding | None:
    """Build the embedding if the checkpoint has one; otherwise return None, to use the target's embedding."""
    if not scope.is_stored(f"{scope.name}.embed_tokens.weight"):
        return None
    return TokenEmbedding(facts.vocab, facts.hidden, scope / "embed_tokens")


def _with_qkv_bias(facts: ArchFacts, scope: Scope) -> ArchFacts:
    """Set `qkv_bias` by the checkpoint's tensors, because its configuration may be wrong."""
    return replace(facts, qkv_bias=scope.is_stored(f"{scope.name}.self_attn.q_proj.bias"))


class FirstLayer(llama.Layer):
    """Llama layer without the norm before attention."""

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__(facts, layer, rope, scope)
        del self.attention_norm

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        x, residual = self.mlp_norm(self.attention(x, batch), x)
        return self.mlp(x, batch), residual


class Eagle(DraftHead):
    """EAGLE draft model. It uses the target's LM head."""

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__()
        body = scope / "model"
        self.ops = scope.ops
        self.embed = _build_embedding(facts, body)
        biased = scope.is_stored((body / "fc").name + ".bias")
        self.fc = WholeLinear(2 * facts.hidden, facts.hidden, body / "fc", bias=biased)
        rope = Rope(facts.layers[0].rope, scope)
        facts = _with_qkv_bias(facts, body / "layers" / 0)
        kinds: list[LayerFactory] = [FirstLayer, *[llama.Layer] * (len(facts.layers) - 1)]
        self.layers = nn.ModuleList(
            kind(facts, layer, rope, body / "layers" / number)
            for number, (kind, layer) in enumerate(zip(kinds, facts.layers, strict=True))
        )

    def forward(self, batch: Batch, states: Tensor) -> tuple[Tensor, Tensor]:
        x, residual = self.fc(torch.cat((self.embedded(batch.token_ids), states), 1)), None
        for layer in self.layers:
            x, residual = layer(x, residual, batch)
        assert residual is not None, "an EAGLE model has at least one layer"
        x = self.ops.add(x, residual)
        return x, x


class WideAttention(llama.Attention):
    """Llama attention that reads two concatenated vectors per token."""

    num_inputs = 2


class Layer3(llama.Layer):
    """EAGLE-3 layer: attention over concatenated token embeddings and states; the states are the residual."""

    Mixer: LayerFactory = WideAttention

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__(facts, layer, rope, scope)
        assert facts.drafts is not None
        self.keeps_normed = facts.drafts.keeps_normed
        self.states_norm = norm_of(facts, scope / "hidden_norm")

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return (x, residual); the input x is token embeddings, and `residual` is hidden states."""
        assert residual is not None
        tokens, states = self.attention_norm.normalize(x), self.states_norm.normalize(residual)
        attended = self.attention(torch.cat((tokens, states), 1), batch)
        x, residual = self.mlp_norm(attended, states if self.keeps_normed else residual)
        return self.mlp(x, batch), residual


class Eagle3(DraftHead):
    """EAGLE-3 draft model. Its LM head may have a reduced vocabulary."""

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__()
        drafts, body = facts.drafts, scope / "model"
        assert drafts is not None
        self.embed = _build_embedding(facts, body)
        self.fc = WholeLinear(len(drafts.aux_layers) * drafts.target_hidden, facts.hidden, body / "fc")
        scopes = [body / "midlayer", body / "layers" / 0]
        stored = (inner for inner in scopes if scope.is_stored(f"{inner.name}.hidden_norm.weight"))
        inner, layer = next(stored, scopes[0]), facts.layers[0]
        self.layer = Layer3(_with_qkv_bias(facts, inner), layer, Rope(layer.rope, scope), inner)
        self.norm = norm_of(facts, body / "norm")
        self.head: Head | None = None
        if drafts.vocab != facts.vocab or scope.is_stored("lm_head.weight"):
            self.head = Head(drafts.vocab, facts.hidden, scope / "lm_head")
        self.offsets: Learned | None = None
        """Offset to add to each token id of the draft vocabulary for the target's id; None if the
        vocabularies are equal."""
        if scope.is_stored("d2t"):
            self.offsets = Learned(scope / "d2t", drafts.vocab, dtype=torch.int64)

    def input_states(self, target_states: Tensor) -> Tensor:
        return self.fc(target_states)

    def forward(self, batch: Batch, states: Tensor) -> tuple[Tensor, Tensor]:
        x, residual = self.layer(self.embedded(batch.token_ids), states, batch)
        out: tuple[Tensor, Tensor] = self.norm(x, residual)
        return out

    def logits(self, x: Tensor) -> Tensor:
        if self.head is None:
            return super().logits(x)
        return self.head(x)

    def target_ids(self, ids: Tensor) -> Tensor:
        return ids if self.offsets is None else ids + self.offsets.vectors[ids]


class MtpNames(NamedTuple):
    """Checkpoint names of the parts of an MTP layer. `{}` in a name stands for the number of layers of the
    target model."""

    layer: str
    join: str
    token_norm: str
    states_norm: str
    last: str
    gives_normed: bool = False
    """Whether the states for the next token are the outputs of the final norm."""


_DEEPSEEK = MtpNames(
    "model.layers.{}",
    "model.layers.{}.eh_proj",
    "model.layers.{}.enorm",
    "model.layers.{}.hnorm",
    "model.layers.{}.shared_head.norm",
)
_QWEN = MtpNames(
    "mtp.layers.0", "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm", True
)
_STEP = _DEEPSEEK._replace(last="model.layers.{}.transformer.shared_head.norm")
_NAMES = {"Step3p5ForCausalLM": _STEP}
_NAMES |= {"Qwen3NextForCausalLM": _QWEN, "Qwen3_5ForCausalLM": _QWEN, "Qwen3_5MoeForCausalLM": _QWEN}
"""Names by architecture of the target; all other architectures have DeepSeek's names."""


class MTP(DraftHead):
    """MTP draft model: norms of token embedding and hidden states, a joint projection, and one layer of the
    target's kind. It uses the target's embedding and LM head."""

    embed = None

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__()
        assert facts.drafts is not None
        (layer,), of = facts.layers, facts.drafts.layers_of
        names = _NAMES.get(of, _DEEPSEEK)

        def at(name: str) -> Scope:
            assert facts.drafts is not None
            return scope / name.format(facts.drafts.first)

        self.gives_normed = names.gives_normed
        self.token_norm = norm_of(facts, at(names.token_norm))
        self.states_norm = norm_of(facts, at(names.states_norm))
        self.join = WholeLinear(2 * facts.hidden, facts.hidden, at(names.join))
        model, rope = MODELS[of], Rope(layer.rope, scope)
        inner = replace(at(names.layer), names=model.names)
        self.layer = model.Layer(facts.of_layer(layer), layer, rope, inner)
        self.norm = norm_of(facts, at(names.last))

    def forward(self, batch: Batch, states: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self.token_norm.normalize(self.embedded(batch.token_ids))
        x = self.join(torch.cat((tokens, self.states_norm.normalize(states)), 1))
        out, summed = self.norm(*self.layer(x, None, batch))
        return out, out if self.gives_normed else summed

"""MTP: the multi-token prediction layer of a checkpoint, as a draft model."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts
from quire.layers.linear import WholeLinear
from quire.layers.norm import norm_of
from quire.layers.rope import Rope
from quire.layers.scope import Scope
from quire.models import MODELS
from quire.models.draft_head import DraftHead


class MtpNames(NamedTuple):
    """Checkpoint names of the MTP layer's parts. `{}` is the number of the model's layers."""

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
"""Names by architecture; all others have DeepSeek's names."""


class MTP(DraftHead):
    """Norms of token embedding and states, a joint projection, and one layer of the target's kind. It uses
    the target's embedding and LM head."""

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
        tokens = self.token_norm.alone(self.embedded(batch.token_ids))
        x = self.join(torch.cat((tokens, self.states_norm.alone(states)), 1))
        out, summed = self.norm(*self.layer(x, None, batch))
        return out, out if self.gives_normed else summed

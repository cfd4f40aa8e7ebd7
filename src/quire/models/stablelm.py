"""StableLM: Llama with layer norms, or with both halves of a layer side by side."""

from torch import nn

from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.layers.rope import Rope
from quire.layers.scope import Scope
from quire.models import cohere, llama
from quire.models.decoder import Decoder


class Attention(llama.Attention):
    """Llama's under other names."""

    norm_names = ("q_layernorm", "k_layernorm")


class InTurn(llama.Layer):
    """Llama's."""

    Mixer = Attention


class SideBySide(cohere.Layer):
    """Cohere's."""

    Mixer = Attention


class StableLM(Decoder):
    """The model."""

    @staticmethod
    def Layer(facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> nn.Module:
        return (SideBySide if facts.side_by_side else InTurn)(facts, layer, rope, scope)

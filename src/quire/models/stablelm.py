"""StableLM: Llama with layer norms, with attention and MLP sequential or in parallel."""

from torch import nn

from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.layers.rope import Rope
from quire.layers.scope import Scope
from quire.models import cohere, llama
from quire.models.decoder import Decoder


class Attention(llama.Attention):
    """Llama attention with StableLM's names."""

    norm_names = ("q_layernorm", "k_layernorm")


class InTurn(llama.Layer):
    """Sequential layer: attention, then MLP."""

    Mixer = Attention


class SideBySide(cohere.Layer):
    """Parallel layer: attention and MLP after one norm."""

    Mixer = Attention


class StableLM(Decoder):
    """StableLM decoder."""

    @staticmethod
    def Layer(facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> nn.Module:
        return (SideBySide if facts.parallel_norms else InTurn)(facts, layer, rope, scope)

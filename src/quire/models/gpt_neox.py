"""GPT-NeoX, Persimmon, Falcon and Bloom: attention and MLP in parallel, or sequentially."""

from torch import Tensor, nn

from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.layers.norm import Norm, norm_of
from quire.layers.rope import Rope
from quire.layers.scope import Scope
from quire.models import llama, phi
from quire.models.decoder import Decoder
from quire.models.gpt2 import NemotronLayer


class Attention(llama.Attention):
    """Llama attention with GPT-NeoX's names; the fused QKV is grouped by key head."""

    fused_name, out_name = "query_key_value", "dense"
    by_head = True
    norm_names = ("q_layernorm", "k_layernorm")


class Layer(NemotronLayer):
    """Sequential layer: attention, then a plain MLP."""

    Mixer = Attention
    attention_name = "attention"
    mlp_names = ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")


class WideLayer(Layer):
    """Parallel layer: attention and a plain MLP of the same input, each with its own norm, are added."""

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        x, residual = self.attention_norm(x, residual)
        mlp_out = self.mlp(self.mlp_norm.alone(residual))
        return self.ops.add(self.attention(x, batch), mlp_out), residual


class GPTNeoX(Decoder):
    """GPT-NeoX and Pythia decoder."""

    body, embedding, last = "gpt_neox", "embed_in", "final_layer_norm"
    head_name = "embed_out"

    @staticmethod
    def Layer(facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> nn.Module:
        return (WideLayer if facts.parallel_norms else Layer)(facts, layer, rope, scope)


class PersimmonLayer(Layer):
    """Sequential layer with Persimmon's names."""

    attention_name = "self_attn"


class Persimmon(Decoder):
    """Persimmon decoder."""

    Layer = PersimmonLayer
    last = "final_layernorm"


class FalconLayer(Layer):
    """Sequential layer of Falcon-RW."""

    attention_name = "self_attention"


class FalconWide(WideLayer):
    """Parallel layer of Falcon-40B, with two norms."""

    attention_name, norm_names = "self_attention", ("ln_attn", "ln_mlp")


class FalconNarrow(phi.Layer):
    """Parallel layer of Falcon-7B, with one norm."""

    Mixer = Attention
    attention_name = "self_attention"
    mlp_names = Layer.mlp_names


class Falcon(Decoder):
    """Falcon decoder."""

    body, embedding, stack, last = "transformer", "word_embeddings", "h", "ln_f"

    @staticmethod
    def Layer(facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> nn.Module:
        kinds = (FalconLayer, FalconNarrow, FalconWide)
        return kinds[facts.parallel_norms](facts, layer, rope, scope)


class Bloom(Falcon):
    """Bloom decoder: Falcon-RW's layers, and a norm after the embedding."""

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        self.embed_norm: Norm | None = None
        if scope.stage.is_first:
            self.embed_norm = norm_of(facts, scope / self.body / "word_embeddings_layernorm")

    def embedded(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        assert self.embed_norm is not None, "only the first stage reads tokens"
        return self.embed_norm.alone(super().embedded(batch)[0]), None

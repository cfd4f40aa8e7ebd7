"""GPT-NeoX and its like: attention and feed-forward side by side behind norms of their own, or in turn."""

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
    """Llama's under other names."""

    fused_name, out_name = "query_key_value", "dense"
    by_head = True
    norm_names = ("q_layernorm", "k_layernorm")


class Layer(NemotronLayer):
    """One after the other."""

    Mixer = Attention
    attention_name = "attention"
    mlp_names = ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")


class WideLayer(Layer):
    """Attention and a plain feed-forward half of the same, added up."""

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        x, residual = self.attention_norm(x, residual)
        fed = self.mlp(self.mlp_norm.alone(residual))
        return self.ops.add(self.attention(x, batch), fed), residual


class GPTNeoX(Decoder):
    """GPT-NeoX and Pythia."""

    body, embedding, last = "gpt_neox", "embed_in", "final_layer_norm"
    head_name = "embed_out"

    @staticmethod
    def Layer(facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> nn.Module:
        return (WideLayer if facts.side_by_side else Layer)(facts, layer, rope, scope)


class PersimmonLayer(Layer):
    """The same under another name."""

    attention_name = "self_attn"


class Persimmon(Decoder):
    """The model."""

    Layer = PersimmonLayer
    last = "final_layernorm"


class FalconLayer(Layer):
    """Falcon-RW's."""

    attention_name = "self_attention"


class FalconWide(WideLayer):
    """Falcon-40B's."""

    attention_name, norm_names = "self_attention", ("ln_attn", "ln_mlp")


class FalconNarrow(phi.Layer):
    """Falcon-7B's: both behind one norm."""

    Mixer = Attention
    attention_name = "self_attention"
    mlp_names = Layer.mlp_names


class Falcon(Decoder):
    """The model."""

    body, embedding, stack, last = "transformer", "word_embeddings", "h", "ln_f"

    @staticmethod
    def Layer(facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> nn.Module:
        kinds = (FalconLayer, FalconNarrow, FalconWide)
        return kinds[facts.side_by_side](facts, layer, rope, scope)


class Bloom(Falcon):
    """Falcon-RW's layers, behind a norm of the embedding."""

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        self.embed_norm: Norm | None = None
        if scope.stage.is_first:
            self.embed_norm = norm_of(facts, scope / self.body / "word_embeddings_layernorm")

    def embedded(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        assert self.embed_norm is not None, "only the first stage reads tokens"
        return self.embed_norm.alone(super().embedded(batch)[0]), None

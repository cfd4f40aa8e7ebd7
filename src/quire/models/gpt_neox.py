"""GPT-NeoX and Pythia: attention and feed-forward side by side, each behind a norm of its own."""

from torch import Tensor

from quire.attention.batch import Batch
from quire.models import llama
from quire.models.decoder import Decoder
from quire.models.gpt2 import NemotronLayer


class Attention(llama.Attention):
    """Llama's under other names."""

    fused_name, out_name = "query_key_value", "dense"
    by_head = True


class Layer(NemotronLayer):
    """Attention and a plain feed-forward half of the same, added up."""

    Mixer = Attention
    attention_name = "attention"
    mlp_names = ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        x, residual = self.attention_norm(x, residual)
        fed = self.mlp(self.mlp_norm.alone(residual))
        return self.ops.add(self.attention(x, batch), fed), residual


class GPTNeoX(Decoder):
    """The model."""

    Layer = Layer
    body, embedding, last = "gpt_neox", "embed_in", "final_layer_norm"
    head_name = "embed_out"

"""Model shapes: the sizes that determine step time and memory."""

from dataclasses import dataclass
from typing import NamedTuple

from quire.plan.rates import LLAMA_8B


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model. Weights are counted in elements of `weight_bytes` each."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool = False
    """Whether the embedding and the output head share their weights."""
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    """Intermediate size of the shared expert."""
    dense_layers: int = 0
    """Number of leading dense layers of an MoE model."""
    latent: int = 0
    """MLA: number of latent values per token and layer in the KV cache, shared by all heads; 0: a cache of
    keys and values."""
    attention: int = 0
    """Number of attention weights of a layer, if it does not follow from the heads; else 0."""
    weight_bytes: int = 2

    @property
    def attention_weights(self) -> int:
        return self.attention or self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)

    @property
    def expert_weights(self) -> int:
        return 3 * self.hidden * self.expert_intermediate

    @property
    def head_weights(self) -> int:
        return self.vocab * self.hidden

    def mlp_weights(self, layer: int) -> int:
        """Return the number of MLP weights of a layer that every token uses."""
        if self.is_mixture(layer):
            return self.hidden * self.experts + 3 * self.hidden * self.shared_intermediate
        return 3 * self.hidden * self.intermediate

    def is_mixture(self, layer: int) -> bool:
        return self.experts > 0 and layer >= self.dense_layers

    def experts_met(self, num_tokens: float) -> float:
        """Return the expected number of experts of a layer that `num_tokens` are routed to, with uniform
        routing."""
        missed: float = (1 - self.experts_per_token / self.experts) ** num_tokens
        return self.experts * (1 - missed)

    def kv_heads_of(self, tp: int) -> int:
        """Return the KV heads of one device; heads are replicated if there are fewer than devices."""
        return max(self.kv_heads // tp, 1)

    def kv_bytes(self, tp: int) -> int:
        """Return the KV cache bytes of a token in one layer on one device, in 16 bits."""
        return 2 * (self.latent or 2 * self.kv_heads_of(tp) * self.head_dim)


SHAPES = {
    "qwen3-0.6b": ModelShape(28, 1024, 16, 8, 128, 3072, 151936, tied=True),
    "llama-3.1-8b": ModelShape(32, 4096, 32, 8, 128, 14336, 128256),
    "llama-3.1-70b": ModelShape(80, 8192, 64, 8, 128, 28672, 128256),
    "qwen3-30b-a3b": ModelShape(
        *(48, 2048, 32, 4, 128, 6144, 151936), experts=128, experts_per_token=8, expert_intermediate=768
    ),
    "deepseek-v3": ModelShape(
        *(61, 7168, 128, 128, 192, 18432, 129280),
        experts=256,
        experts_per_token=8,
        expert_intermediate=2048,
        shared_intermediate=2048,
        dense_layers=3,
        latent=576,
        attention=7168 * (1536 + 576) + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168,
        weight_bytes=1,
    ),
}


class Measured(NamedTuple):
    """Results of `quire.bench.gpu` on one H200, in bf16."""

    model: str
    tp: int
    """The shard of the model on the GPU: heads, KV heads, intermediate size and vocabulary divided by it,
    without communication."""
    decode_ms: tuple[float, ...]
    """Milliseconds of a decode step at each batch size of `BATCHES`, with `CONTEXT` tokens per sequence."""
    prefill_tok_s: float


PREFILL_LEN, PREFILL_STEP = 2048, 16384

MEASURED = (
    Measured("qwen3-0.6b", 1, (0.69, 1.09, 1.56, 3.17, 5.55), 409_024),
    Measured("llama-3.1-8b", 1, LLAMA_8B.decode_ms, LLAMA_8B.prefill_tok_s),
    Measured("llama-3.1-8b", 2, (2.238, 2.963, 3.209, 4.492, 6.618), 85_605),
    Measured("llama-3.1-8b", 4, (1.383, 1.772, 2.134, 3.473, 4.472), 161_041),
    Measured("llama-3.1-8b", 8, (0.910, 1.339, 1.585, 2.249, 2.794), 290_519),
    Measured("llama-3.1-70b", 8, (5.607, 6.993, 7.299, 12.318), 34_316),
    Measured("qwen3-30b-a3b", 1, (2.45, 7.81, 14.16, 17.83, 20.78), 76_630),
)

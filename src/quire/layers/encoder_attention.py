"""EncoderAttention: bidirectional attention over whole texts, or over a window, without a KV cache."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.kernels.reference.encoder import Angles, Spans, attend, rotate_in_place, spans_of
from quire.kernels.reference.ops import rotate
from quire.layers.linear import QKVLinear, RowLinear
from quire.layers.rope import Rope
from quire.layers.scope import Scope


def spans(batch: Batch) -> Spans:
    """Return the range of tokens of each text of a batch. Each text must be a whole prompt, because tokens
    also attend to later tokens."""
    assert (batch.query_lens_host == batch.seq_lens_host).all(), "an encoder needs whole prompts"
    return spans_of(batch.query_lens_host, batch.token_ids.device)


def attend_on(device: torch.device) -> Callable[[Tensor, Tensor, Tensor, Spans, int | None], Tensor]:
    if device.type != "cuda":
        return attend
    from quire.kernels.triton import encoder

    return encoder.attend


def rotate_on(device: torch.device) -> Callable[[Tensor, Angles], None]:
    if device.type != "cuda":
        return rotate_in_place
    from quire.kernels.triton import encoder

    return encoder.rotate


class EncoderAttention(nn.Module):
    """Bidirectional attention of an encoder layer, with QKV and output projections. `names` are the
    checkpoint names of query, key and value, or one fused name; `out` is the name of the output
    projection."""

    def __init__(
        self,
        facts: ArchFacts,
        layer: LayerFacts,
        scope: Scope,
        *,
        names: tuple[str, ...],
        out: str,
        rope: Rope | None = None,
    ) -> None:
        super().__init__()
        self.window = layer.window
        self.attend = attend_on(scope.device)
        self.rope = rope
        sizes = facts.heads, facts.kv_heads, facts.head_dim
        self.qkv = QKVLinear(facts.hidden, *sizes, scope / "qkv", bias=facts.qkv_bias, names=names)
        self.out = RowLinear(facts.hidden, facts.hidden, scope / out, bias=facts.out_bias)

    def forward(self, x: Tensor, batch: Batch, texts: Spans, bias: Tensor | None = None) -> Tensor:
        """Return the attention output [T, hidden]; tokens attend within their text (a token range of
        `texts`). A `bias` [heads or 1, length, length] is added to the scores; plain torch then computes the
        attention."""
        q, k, v = self.qkv.multiply(x, batch).view(len(x), 3, self.qkv.heads, self.qkv.head_dim).unbind(1)
        if self.rope is not None:
            cos, sin = self.rope.table[batch.positions][:, None].chunk(2, -1)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if bias is None:
            mixed = self.attend(q, k, v, texts, self.window)
        else:
            mixed = attend(q, k, v, texts, bias=bias)
        return self.out(mixed.flatten(1), batch)

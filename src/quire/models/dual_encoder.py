"""Text encoders of CLIP and SigLIP; the embedding of an image replaces the output of its token."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts
from quire.kernels.reference.encoder import Spans, spans_of
from quire.layers.embedding import TokenEmbedding
from quire.layers.encoder_attention import EncoderAttention, spans
from quire.layers.linear import WholeLinear
from quire.layers.norm import norm_of
from quire.layers.scope import Scope
from quire.layers.vision import Learned, VisionMLP

_TEXTS_AT_ONCE = 32
"""Maximum number of padded texts that are computed at once, which bounds the memory."""


class DualTextLayer(nn.Module):
    """Pre-norm layer: attention, then MLP, each with a residual."""

    def __init__(self, facts: ArchFacts, index: int, scope: Scope) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = (norm_of(facts, scope / f"layer_norm{i}") for i in (1, 2))
        names = ("q_proj", "k_proj", "v_proj")
        self.attention = EncoderAttention(
            facts, facts.layers[index], scope / "self_attn", names=names, out="out_proj"
        )
        self.mlp = VisionMLP(facts.hidden, facts.intermediate, scope / "mlp", activation=facts.activation)

    def forward(self, x: Tensor, batch: Batch, texts: Spans, bias: Tensor | None) -> Tensor:
        x = x + self.attention(self.attention_norm.normalize(x), batch, texts, bias)
        return x + self.mlp(self.mlp_norm.normalize(x))


class DualTextEncoder(nn.Module):
    """Text encoder with a projection of each hidden state to the space of the images. The embedding of an
    image is the output of its one token."""

    projection = "text_projection"
    has_bias = False

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__()
        encoder = facts.encoder
        assert encoder is not None
        body = scope / encoder.prefix
        embeddings = body / "embeddings"
        self.embed = TokenEmbedding(facts.vocab, facts.hidden, embeddings / "token_embedding")
        table = embeddings / "position_embedding" / "weight"
        self.places = Learned(table, encoder.positions, facts.hidden)
        self.layers = nn.ModuleList(
            DualTextLayer(facts, i, body / "encoder" / "layers" / i) for i in range(len(facts.layers))
        )
        self.norm = norm_of(facts, body / "final_layer_norm")
        self.project = WholeLinear(facts.hidden, facts.size_out, scope / self.projection, bias=self.has_bias)

    def forward(self, batch: Batch) -> Tensor:
        """Return the projected hidden states [T, size_out] of texts, and the embeddings of images."""
        if batch.embeds is None:
            return self.encode(batch)
        tokens, vectors = batch.embeds
        if len(tokens) == len(batch.token_ids):
            return vectors[tokens.argsort()]
        return self.encode(batch).index_copy_(0, tokens, vectors)

    def encode(self, batch: Batch) -> Tensor:
        raise NotImplementedError

    def run(self, batch: Batch, texts: Spans, bias: Tensor | None = None) -> Tensor:
        x: Tensor = self.embed(batch.token_ids, batch) + self.places.vectors[batch.positions]
        for layer in self.layers:
            x = layer(x, batch, texts, bias)
        return self.project(self.norm.normalize(x), batch)


class ClipText(DualTextEncoder):
    """CLIP text encoder, with causal attention."""

    def encode(self, batch: Batch) -> Tensor:
        length = batch.max_query_len
        zeros = torch.zeros((), dtype=self.places.vectors.dtype, device=batch.token_ids.device)
        bias = zeros.new_full((1, length, length), -torch.inf).triu(1)
        return self.run(batch, spans(batch), bias)


class SiglipText(DualTextEncoder):
    """SigLIP text encoder: texts are padded to the full length and represented by the last padding token."""

    projection = "text_model.head"
    has_bias = True

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        assert facts.encoder is not None and facts.encoder.padding is not None
        self.length, self.padding = facts.encoder.positions, facts.encoder.padding

    def encode(self, batch: Batch) -> Tensor:
        parts = [
            self._encode_texts(ids, lens, batch)
            for ids, lens in _split_texts(batch.token_ids, batch.query_lens_host, _TEXTS_AT_ONCE)
        ]
        return torch.cat(parts)

    def _encode_texts(
        self, token_ids: Tensor, lens: "np.ndarray[tuple[int], np.dtype[np.int32]]", batch: Batch
    ) -> Tensor:
        """Return the outputs of the tokens of some texts. A text's last token gets the output at the last
        position after padding."""
        count, length, device = len(lens), self.length, token_ids.device
        columns = np.arange(length)
        rows, places = np.nonzero(columns < lens[:, None])
        ends = np.cumsum(lens) - 1
        flat = torch.from_numpy(rows * length + places).to(device)
        padded = torch.full((count * length,), self.padding, dtype=token_ids.dtype, device=device)
        padded[flat] = token_ids
        positions = torch.arange(length, device=device).repeat(count)
        texts = spans_of(np.full(count, length, np.int32), device)
        states = self.run(replace(batch, token_ids=padded, positions=positions), texts)
        out = states[flat]
        out[torch.from_numpy(ends).to(device)] = states[length - 1 :: length]
        return out


def _split_texts(
    token_ids: Tensor, lens: "np.ndarray[tuple[int], np.dtype[np.int32]]", count: int
) -> list[tuple[Tensor, "np.ndarray[tuple[int], np.dtype[np.int32]]"]]:
    """Split a batch into parts of `count` texts: the tokens and the lengths of each."""
    parts = [lens[start : start + count] for start in range(0, len(lens), count)]
    tokens = token_ids.split([int(part.sum()) for part in parts])
    return list(zip(tokens, parts, strict=True))

"""Tests of cross-attention with every backend against softmax."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from by_hand import by_hand
from torch import nn

from quire.attention.backend import AttentionBackend
from quire.attention.batch import Batch
from quire.attention.cpu_attn import CPUAttention
from quire.attention.torch_sdpa import TorchSDPA
from quire.attention.triton_attn import TritonAttention
from quire.checkpoint.families.dense import whisper
from quire.checkpoint.reader import ConfigReader
from quire.kernels.cpu import native
from quire.layers.cross_attention import CrossAttention, CrossAttentionCache
from quire.layers.linear import Linear
from quire.layers.scope import Scope

NUM_VECTORS, MAX_ROWS = 37, 4
FACTS = whisper(
    ConfigReader("test", {"d_model": 32, "decoder_attention_heads": 2, "decoder_layers": 2, "vocab_size": 9})
)


def cross_cache_of(scope: Scope) -> CrossAttentionCache:
    layers = [CrossAttention(FACTS, scope / i) for i in range(2)]
    for linear in nn.ModuleList(layers).modules():
        if isinstance(linear, Linear):
            for target in linear.targets():
                target.tensor.normal_()
            linear.finish()
    made = CrossAttentionCache(layers, NUM_VECTORS, scope)
    num_bytes = made.cache_spec.row_bytes(4)
    memory = torch.full((MAX_ROWS + 1, num_bytes // 4), torch.nan).view(torch.uint8)
    made.bind_memory(memory, block_size=4, cache_dtype=torch.float32, group=0)
    return made


def batch_of(rows: list[int], lens: list[int]) -> Batch:
    nothing, query_lens = torch.zeros(sum(lens), dtype=torch.int64), np.array(lens, np.int32)
    return Batch(
        token_ids=nothing,
        positions=nothing,
        slots=nothing,
        query_starts=torch.tensor([0, *np.cumsum(lens)], dtype=torch.int32),
        seq_lens=torch.from_numpy(query_lens),
        rows=torch.tensor(rows, dtype=torch.int32),
        block_tables=torch.zeros(MAX_ROWS + 1, 1, dtype=torch.int32),
        logit_tokens=nothing,
        query_lens_host=query_lens,
        seq_lens_host=query_lens,
    )


@pytest.mark.parametrize(
    "backend", [TorchSDPA(), CPUAttention(), TritonAttention()], ids=lambda entry: entry.name
)
@pytest.mark.parametrize("lens", [[1, 1, 1], [3, 1, 5], [2]], ids=str)
@torch.inference_mode()
def test_every_token_attends_to_its_rows_item(
    backend: AttentionBackend, lens: list[int], scope: Scope
) -> None:
    """Check for other rows' items, other layers' keys, missing vectors and the rest of the last block.

    Rows may share an item, and slots are reused.
    """
    if isinstance(backend, CPUAttention) and native.library() is None:
        pytest.skip("there are no native kernels here")
    torch.manual_seed(0)
    cross_cache = cross_cache_of(replace(scope, backend=backend))
    items = torch.randn(3, NUM_VECTORS, FACTS.hidden)
    for item, slot in ((0, 3), (2, 1), (1, 1), (2, 2)):
        cross_cache.write(items[item], slot)
    seen_by = {3: 1, 0: 2, 2: 1}
    cross_cache.assign([*seen_by], [{0: 3, 1: 1, 2: 2}[item] for item in seen_by.values()])
    rows = [3, 0, 2][: len(lens)]
    batch = batch_of(rows, lens)
    cross_batch = cross_cache.cross_batch(batch)
    x = torch.randn(sum(lens), FACTS.hidden)
    for layer in cross_cache.layers:
        q = layer.q(x).view(len(x), 2, -1)
        mixed = [
            by_hand(query[None], *layer.kv(items[seen_by[row]]), layer.spec)
            for row, queries in zip(rows, q.split(lens), strict=True)
            for query in queries
        ]
        expected = layer.out(torch.cat(mixed).flatten(1))
        torch.testing.assert_close(layer(x, cross_batch), expected, atol=1e-3, rtol=1e-4)

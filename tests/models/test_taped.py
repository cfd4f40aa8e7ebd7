"""Decodes of whole models on a CPU's tape: nothing of torch takes part, other tokens give other logits."""

from pathlib import Path

import pytest
import torch
from oracle import BLOCK_SIZE, load_tiny, make_batch, make_tiny
from torch import Tensor

from quire.attention.cpu_attn import CPUAttention
from quire.kernels import native
from quire.kernels.tape import record
from quire.layers.attention import attention_layers

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native kernels do not compile here")


@pytest.mark.parametrize(
    "architecture",
    [
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "GptOssForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3MoeForCausalLM",
        "GraniteMoeForCausalLM",
        "Glm4MoeForCausalLM",
    ],
)
@torch.inference_mode()
def test_a_decode_is_taped_and_follows_its_tokens(architecture: str, tmp_path: Path) -> None:
    """An operation of torch in a step, which then is never taped; experts of the step that was recorded."""
    model = load_tiny(make_tiny(architecture, tmp_path)[0])
    for layer in attention_layers(model.modules()):
        layer.backend = CPUAttention()
        assert layer.k_cache is not None and layer.v_cache is not None
        layer.k_cache.normal_()
        layer.v_cache.normal_()
    batch = make_batch([([5], 6), ([9], 2), ([7], 13)], [[1, 2], [3], [4, 5, 6, 7]], BLOCK_SIZE)

    def step() -> Tensor:
        return model.logits(model(batch))

    with record() as tape:
        logits = step()
    assert tape.complete, tape.refused
    for _ in range(2):
        batch.token_ids.copy_(torch.randint(3, 128, (3,)))
        tape.replay()
        assert torch.equal(logits, step())

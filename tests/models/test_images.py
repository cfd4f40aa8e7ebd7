"""Tests of images in decoders against transformers: bidirectional attention, windows and DeepStack
vectors.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import BLOCK_SIZE, load_tiny, make_batch, make_tiny, random_prompts
from torch import Tensor

from quire.attention.backend import AttentionBackend
from quire.attention.cpu_attn import CPUAttention
from quire.attention.torch_sdpa import TorchSDPA
from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.model import read_checkpoint
from quire.config.parallel import Stage
from quire.data.multimodal import Media, MediaItem
from quire.data.params import SamplingParams
from quire.data.step_plan import Admission, StepPlan
from quire.errors import ConfigError
from quire.kernels.cpu import native
from quire.layers.scope import Scope
from quire.models import MODELS
from quire.sampling.rows import SamplingRows
from quire.worker.multimodal.bidirectional import last_visible_of
from quire.worker.rows import Rows

RUNS = [(3, 9), (15, 2)]
"""Lengths above and below the window."""
NATIVE = pytest.mark.skipif(native.library() is None, reason="there are no native kernels here")


@torch.inference_mode()
def expected_of(hf: Any, ids: list[int]) -> Tensor:
    from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model

    blocks = torch.full((1, len(ids)), -1)
    for number, (first, count) in enumerate(RUNS):
        blocks[0, first : first + count] = number
    masks = create_masks_for_vision_model(
        hf.config, hf.get_input_embeddings()(torch.tensor([ids])), None, None, None, blocks
    )
    logits: Tensor = hf(torch.tensor([ids]), attention_mask=masks).logits[0]
    return logits


def step(first: int, ids: list[int], admitted: list[Admission]) -> StepPlan:
    none, one = np.empty(0, np.int32), np.array([2], np.int32)
    lens, samples = np.array([len(ids)], np.int32), np.ones(1, np.bool_)
    return StepPlan(first, [], admitted, none, none.reshape(1, 0), one, lens, samples)


@pytest.mark.parametrize("backend", [TorchSDPA, pytest.param(CPUAttention, marks=NATIVE)])
@torch.inference_mode()
def test_bidirectional_image_attention_of_gemma(backend: type[AttentionBackend], tmp_path: Path) -> None:
    """Check windows inside an image, and tokens after it in a separate step."""
    path, hf = make_tiny("gemma3_text", tmp_path, sliding_window=5, attn_implementation="eager")
    ids = random_prompts(23)[0]
    model = load_tiny(path, backend=backend())
    all_rows = Rows(max_rows=4, max_len=32, block_size=4, sampling=SamplingRows(4, 128, torch.device("cpu")))
    item = MediaItem(
        modality="image", key=b"", offset=2, length=17, runs=[(at - 2, count) for at, count in RUNS]
    )
    admission = Admission(2, "", ids, len(ids), 0, [list(range(1, 9))], SamplingParams(), seed=0)
    admission.media = Media([item])
    actual = []
    for first, end in ((0, 14), (14, 23)):
        plan = step(first, ids[first:end], [admission] if not first else [])
        all_rows.apply(plan)
        batch = make_batch([(ids[first:end], first)], [list(range(1, 9))], BLOCK_SIZE)
        last_visible = last_visible_of(plan, all_rows)
        assert last_visible is not None
        batch.last_visible = torch.from_numpy(last_visible)
        model_backend = next(module.backend for module in model.modules() if hasattr(module, "backend"))
        model_backend.plan(batch)
        actual.append(model.logits(model(batch)))
        all_rows.advance(plan)
    assert last_visible_of(step(23, ids[:1], []), all_rows) is None
    torch.testing.assert_close(torch.cat(actual), expected_of(hf, ids), atol=3e-4, rtol=1e-3)


@torch.inference_mode()
def test_deepstack_vectors_are_added_after_the_first_layers(tmp_path: Path) -> None:
    """Check the layers and tokens, that vectors are added and not replaced, and a step that is the second of
    two.
    """
    import transformers

    path, hf = make_tiny("qwen3", tmp_path, num_hidden_layers=3)
    text = transformers.Qwen3VLTextModel(transformers.Qwen3VLTextConfig(**hf.config.to_dict())).eval()
    text.load_state_dict(hf.model.state_dict())
    ids, seen = random_prompts(23)[0], torch.tensor([4, 5, 6, 16, 17, 21])
    vectors = torch.randn(len(seen), 3 * 64)
    embeds = text.embed_tokens(torch.tensor([ids]))
    embeds[0, seen] = vectors[:, :64]
    mask = torch.zeros(1, len(ids), dtype=torch.bool).index_fill_(1, seen, True)
    deeper = list(vectors.split(64, 1)[1:])
    states = text(
        inputs_embeds=embeds,
        position_ids=torch.arange(23).expand(3, 1, -1),
        visual_pos_masks=mask,
        deepstack_visual_embeds=deeper,
    )
    model, actual = load_tiny(path), []
    for first, end in ((0, 6), (6, 23)):
        batch = make_batch([(ids[first:end], first)], [list(range(1, 9))], BLOCK_SIZE)
        here = (seen >= first) & (seen < end)
        batch.embeds = seen[here] - first, vectors[here]
        TorchSDPA().plan(batch)
        actual.append(model.logits(model(batch)))
    expected = hf.lm_head(states.last_hidden_state[0])
    torch.testing.assert_close(torch.cat(actual), expected, atol=3e-4, rtol=1e-3)


def test_first_stage_without_the_deepstack_layers_is_rejected(tmp_path: Path) -> None:
    path, _ = make_tiny("qwen3", tmp_path)
    media = MediaFacts("", ("image",), None, levels=2)
    facts = replace(read_checkpoint(path).facts, media=media)
    scope = Scope(torch.float32, torch.device("cpu"), TorchSDPA(), 64, stage=Stage(0, 2))
    with pytest.raises(ConfigError, match="first pipeline stage has 1 layers, .* to its first 2 layers"):
        MODELS["Qwen3ForCausalLM"](facts, scope)

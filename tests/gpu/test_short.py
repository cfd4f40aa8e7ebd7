"""Tests of short prompt steps in graphs: with adapters, with drafts, and with images."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafted import EagerPolicy
from on_gpu import SETTINGS
from oracle import make_tiny
from PIL import Image
from tiny import open_tiny, prompts_of
from tiny_adapter import write_adapter
from tiny_qwen import made

from quire import LLM, LoRARequest, SamplingParams
from quire.worker.cuda.graphs import Graph

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
IMAGE_TOKENS = "<begin><image><end>"


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """Record for each short step in a graph whether it has adapters, and its embeddings."""
    actual: list[tuple[bool, int]] = []
    load = Graph.load

    def counted(self: Graph, *args: Any) -> None:
        if self.is_mixed:
            actual.append((self.sizes.adapters, 0 if args[4] is None else len(args[4][0])))
        load(self, *args)

    monkeypatch.setattr(Graph, "load", counted)
    return actual


def generated_ids(
    llm: LLM, prompts: list[Any], adapters: list[LoRARequest | None] | None = None
) -> list[list[int]]:
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=adapters)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    size = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    return make_tiny("llama", tmp_path_factory.mktemp("short"), **size)[0]


def test_short_steps_with_adapters(tiny: Path, loaded: list[tuple[bool, int]]) -> None:
    model = json.loads((tiny / "config.json").read_text())
    some = [write_adapter(tiny.parent / f"adapter{seed}", model, seed) for seed in (1, 2)]
    prompts = prompts_of(9, 14, 5, 22, 30, 3)
    row_adapters = [some[0], None, some[1], some[0], some[1], None]
    settings = SETTINGS | {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "dtype": "float32"}
    settings |= {"max_num_batched_tokens": 128}
    expected = generated_ids(open_tiny(tiny, **settings, enforce_eager=True), prompts, row_adapters)
    assert not loaded
    llm = open_tiny(tiny, **settings)
    assert generated_ids(llm, prompts, row_adapters) == expected
    assert (True, 0) in loaded
    del loaded[:]
    alone = [
        generated_ids(llm, [prompt], [adapter])[0]
        for prompt, adapter in zip(prompts, row_adapters, strict=True)
    ]
    assert alone == expected
    assert [kind for kind, _ in loaded] == [adapter is not None for adapter in row_adapters]


def test_short_steps_with_drafts(
    tiny: Path, loaded: list[tuple[bool, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check prompts beside rows with drafts, of which some are accepted: the vocabulary has three tokens."""
    pace = EagerPolicy()
    monkeypatch.setattr("quire.core.build.AdaptiveDraftLength", lambda **sizes: pace)
    lookup = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    settings = SETTINGS | {"dtype": "float32", "max_num_batched_tokens": 128}
    few = {"temperature": 0, "ignore_eos": True, "allowed_token_ids": [5, 6, 7]}
    params = [SamplingParams(max_tokens=6 + 9 * (at % 4), **few) for at in range(12)]
    prompts = prompts_of(9, 14, 5, 22, 30, 3, 17, 8, 40, 11, 26, 2)

    def answers(**more: Any) -> list[list[int]]:
        outputs = open_tiny(tiny, **settings, **more).generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    expected = answers(enforce_eager=True)
    assert not loaded
    assert answers(speculative_config=lookup) == expected
    assert len(loaded) > 5 and 5 < pace.num_held < pace.num_drafts


@pytest.mark.parametrize("budget", [48, 256])
@pytest.mark.parametrize("family", ["Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe"])
def test_short_steps_with_images(
    family: str, budget: int, tmp_path_factory: pytest.TempPathFactory, loaded: list[tuple[bool, int]]
) -> None:
    """Check images split by steps and whole, beside text and repeated; then text alone."""
    path, draw = made(family, tmp_path_factory.getbasetemp())[0], np.random.default_rng(3)
    sizes = ((120, 90), (17, 19), (64, 24))
    images = [Image.fromarray(draw.integers(0, 256, (*size, 3), np.uint8)) for size in sizes]
    prompts = [
        {"prompt": f"what is {IMAGE_TOKENS} this", "multi_modal_data": {"image": images[0]}},
        {"prompt": "nothing to see here, only words"},
        {"prompt": f"{IMAGE_TOKENS}one {IMAGE_TOKENS}and then", "multi_modal_data": {"image": images[1:]}},
        {
            "prompt": f"{IMAGE_TOKENS} again, and a little more of it",
            "multi_modal_data": {"image": images[0]},
        },
    ]
    settings = SETTINGS | {"skip_tokenizer_init": False, "dtype": "float32", "max_model_len": 512}
    settings |= {"use_tqdm_on_load": False, "enable_prefix_caching": True, "max_num_batched_tokens": budget}
    expected = generated_ids(LLM(str(path), **settings, enforce_eager=True), prompts)
    assert not loaded
    llm = LLM(str(path), **settings)
    assert generated_ids(llm, prompts) == expected
    assert [generated_ids(llm, [prompt])[0] for prompt in prompts] == expected
    assert any(count for _, count in loaded) and any(not count for _, count in loaded)

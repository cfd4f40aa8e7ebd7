"""Tests of whole engines of vision families against transformers' answers."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from seeing import FAMILIES, Twin, picture
from tiny_engine import check_answers, generate_reference, open_llm

from quire import LLM, SamplingParams
from quire.checkpoint.model import read_checkpoint
from quire.errors import ConfigError, RequestError

COUNT = 3
SMALL, WIDE, TALL, LARGE = picture(17, 19), picture(64, 24), picture(20, 60), picture(120, 90)
Content = tuple[str, list[Image.Image]]
SETTINGS: dict[str, dict[str, int]] = {
    "lfm2_vl": {"mamba_block_size": 4},
    "gemma4_whole": {"max_num_batched_tokens": 96},
    "deepseek_ocr2": {"max_num_batched_tokens": 200, "max_model_len": 1024, "num_gpu_blocks_override": 600},
}
"""Engine settings of single families. Images of the last have more than 32 tokens and may not be split."""


def prompts(mark: str) -> list[Content]:
    return [
        (f"what is {mark} this", [LARGE]),
        ("nothing to see here, only words", []),
        (f"{mark}one {mark}\nand then {mark}?", [SMALL, WIDE, TALL]),
        (f"user\n{mark} again", [SMALL]),
    ]


def inputs_of(twin: Twin, content: Content) -> Any:
    text, images = content
    if images:
        return twin.inputs(text, images)
    inputs = twin.processor.tokenizer(text, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    return inputs


def requests_of(contents: list[Content]) -> list[Any]:
    return [
        {"prompt": text, "multi_modal_data": {"image": images}} if images else text
        for text, images in contents
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_about_images_equal_transformers(
    family: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Covers one image, several of mixed sizes with text between, and none: at once, in chunks that end
    within items where allowed, with the prefix cache, and with preemptions."""
    twin = Twin(tmp_path_factory.mktemp(family), family)
    contents = prompts(twin.mark)
    inputs = [inputs_of(twin, content) for content in contents]
    expected = [generate_reference(twin.model, item, COUNT) for item in inputs]
    settings = {"max_num_batched_tokens": 32} | SETTINGS.get(family, {})
    llm = open_llm(twin.path, max_logprobs=-1, **settings)
    outputs = check_answers(llm, requests_of(contents), expected, at=(1, 2, 5))
    for (_, images), item, output in zip(contents, inputs, outputs, strict=True):
        assert not images or output.prompt_token_ids == item["input_ids"][0].tolist()
    processor_cache = llm.llm_engine.inputs.media.processor_cache
    assert len(processor_cache) == 4
    llm.reset_mm_cache()
    assert not len(processor_cache)


def test_gemma4_settings_are_checked(tmp_path: Path) -> None:
    """Bidirectional images need layers with a sliding window; the number of soft tokens must be one of
    five."""
    twin = Twin(tmp_path, "gemma4_whole")
    with pytest.raises(ConfigError, match="max_model_len=48 must exceed 48, the sliding window"):
        LLM(str(tmp_path), dtype="float32", max_model_len=48, max_num_seqs=2, use_tqdm_on_load=False)
    with pytest.raises(RequestError, match="max_soft_tokens is 71, expected one of 70, 140"):
        twin.ours.process("image", SMALL, {"max_soft_tokens": 71})
    more = twin.ours.process("image", LARGE, {"max_soft_tokens": 280})
    assert 200 < len(more.token_ids) <= 282
    for wrong, message in (
        ({"num_key_value_heads": 1}, "num_key_value_heads is 1, expected 2"),
        ({"hidden_activation": "relu"}, "hidden_activation is 'relu'"),
        ({"head_dim": 6}, "head_dim is 6, expected a multiple of 4"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_checkpoint(tmp_path, {"vision_config": wrong})


def test_bidirectional_prompt_must_fit_into_a_step(tmp_path: Path) -> None:
    """In a split prompt, the first half could not attend to the second. A text without a placeholder is about
    one image."""
    twin = Twin(tmp_path, "paligemma")
    content = "describe", [SMALL]
    llm = LLM(str(tmp_path), dtype="float32", max_model_len=64, max_num_batched_tokens=32, max_num_seqs=2)
    with pytest.raises(RequestError, match="The prompt has 36 tokens .* and a step holds 32"):
        llm.generate(requests_of([("x" * 30, [SMALL])]), use_tqdm=False)
    params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
    (output,) = llm.generate(requests_of([content]), params, use_tqdm=False)
    assert output.outputs[0].token_ids == generate_reference(twin.model, inputs_of(twin, content), COUNT)[0]
    assert output.prompt_token_ids == twin.inputs("<image>describe", [SMALL])["input_ids"][0].tolist()

"""Tests of whole engines of Qwen and GLM vision models against transformers' answers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from finished import patches
from PIL import Image
from tiny import generate_preempted
from tiny_engine import open_llm
from tiny_qwen import FAMILIES, made

from quire import LLM, SamplingParams
from quire.checkpoint.model import read_checkpoint
from quire.data.params import BeamSearchParams
from quire.multimodal.processors import PROCESSORS, Video
from quire.text.tokenizer import load_tokenizer

COUNT = 5
_DRAW = np.random.default_rng(11)


def _image(width: int, height: int) -> Image.Image:
    return Image.fromarray(_DRAW.integers(0, 256, (height, width, 3), np.uint8))


SMALL, WIDE, TALL, LARGE = _image(17, 19), _image(64, 24), _image(20, 60), _image(120, 90)
FILM = _DRAW.integers(0, 256, (6, 24, 32, 3), np.uint8)
IMAGE_TOKENS = "<begin><image><end>"
WATCHES = {True: "<video begin><video><video end>", False: "<begin><video><end>"}
Content = tuple[str, list[Image.Image], list[Any]]


def prompts(is_glm: bool) -> list[Content]:
    """Return texts with their images and videos. transformers' GLM does not accept a video together with an
    image."""
    film = WATCHES[is_glm]
    return [
        (f"what is {IMAGE_TOKENS} this", [LARGE], []),
        ("nothing to see here, only words", [], []),
        (f"{IMAGE_TOKENS}one {IMAGE_TOKENS}and then {IMAGE_TOKENS}?", [SMALL, WIDE, TALL], []),
        (f"a film: {film} and {IMAGE_TOKENS}" if not is_glm else f"a film: {film}!", [TALL][is_glm:], [FILM]),
        (f"{IMAGE_TOKENS} again", [SMALL], []),
    ]


class Twin:
    """Model of transformers, with inputs from our processors."""

    def __init__(self, family: str, base: Path) -> None:
        self.path, self.model = made(family, base)
        self.media = read_checkpoint(self.path).facts.media
        assert self.media is not None
        self.tokenizer = load_tokenizer(self.path, "hf")
        self.processor = PROCESSORS[self.media.family](self.path, self.media, self.tokenizer)

    def inputs(self, content: Content) -> dict[str, Any]:
        text, images, videos = content
        ids = self.tokenizer.encode(text)
        left = {
            "image": [self.processor.process("image", image, {}) for image in images],
            "video": [self.processor.process("video", Video(video, fps=4.0), {}) for video in videos],
        }
        tensors: dict[str, Any] = {"pixel_values": [], "image_grid_thw": []}
        tensors |= {"pixel_values_videos": [], "video_grid_thw": []}
        out: list[int] = []
        kinds: list[int] = []
        while ids:
            for modality in ("image", "video"):
                mark = self.processor.marks(modality)
                if left[modality] and ids[: len(mark)] == mark:
                    processed = left[modality].pop(0)
                    ids = ids[len(mark) :]
                    of_run = {
                        at
                        for first, n in processed.runs or [(0, len(processed.token_ids))]
                        for at in range(first, first + n)
                    }
                    kind = 1 + (modality == "video")
                    kinds += [kind if at in of_run else 0 for at in range(len(processed.token_ids))]
                    out += processed.token_ids
                    pixels = patches(processed.arrays).flatten(0, 2)
                    tensors["pixel_values" + ("_videos" if modality == "video" else "")].append(pixels)
                    tensors[f"{modality}_grid_thw"].append(torch.tensor([processed.facts["grid"]]))
                    break
            else:
                out.append(ids.pop(0))
                kinds.append(0)
        model_inputs = {name: torch.cat(parts) for name, parts in tensors.items() if parts}
        model_inputs |= {"input_ids": torch.tensor([out])}
        if self.media is not None and self.media.family not in ("exaone4_5", "hyperclovax", "lfm3_vl"):
            model_inputs["mm_token_type_ids"] = torch.tensor([kinds])
        if videos and self.media is not None and self.media.family == "qwen2_5_vl":
            model_inputs["second_per_grid_ts"] = torch.tensor([2 / 4.0] * len(videos))
        return model_inputs

    @torch.inference_mode()
    def generate_reference(self, content: Content) -> list[int]:
        inputs = self.inputs(content)
        self.model.generation_config.eos_token_id = None
        out = self.model.generate(**inputs, max_new_tokens=COUNT, do_sample=False)
        token_ids: list[int] = out[0, inputs["input_ids"].shape[1] :].tolist()
        return token_ids


def request_of(content: Content) -> Any:
    text, images, videos = content
    data: dict[str, Any] = {"image": images} if images else {}
    data |= {"video": [(video, {"fps": 4.0}) for video in videos]} if videos else {}
    return {"prompt": text, "multi_modal_data": data} if data else text


def generate(llm: LLM, contents: list[Content]) -> list[Any]:
    params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
    return llm.generate([request_of(content) for content in contents], params, use_tqdm=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_about_media_equal_transformers(
    family: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Covers one image, several of mixed sizes with text between, a video, and none: at once, in chunks that
    end within items, and with the prefix cache."""
    twin = Twin(family, tmp_path_factory.getbasetemp())
    contents = prompts(family.startswith("Glm"))
    states = {"mamba_block_size": 4} if family in ("Lfm3Vl", "Qwen3_5") else {}
    llm = open_llm(twin.path, max_num_batched_tokens=24, **states)
    expected = [twin.generate_reference(content) for content in contents]
    first = generate(llm, contents)
    for content, output, token_ids in zip(contents, first, expected, strict=True):
        assert output.prompt_token_ids == twin.inputs(content)["input_ids"][0].tolist()
        assert output.outputs[0].token_ids == token_ids, content[0]
    again = generate(llm, contents)
    assert [output.outputs[0].token_ids for output in again] == expected
    assert all(output.num_cached_tokens > 0.5 * len(output.prompt_token_ids) for output in again)


def test_images_are_cached_by_content_and_options(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Neither another image of the same size nor the same image with other options is a cache hit. Embeddings
    in place of the image, and preemptions, change nothing."""
    twin = Twin("Qwen2_5_VL", tmp_path_factory.getbasetemp())
    llm = open_llm(twin.path, enable_mm_embeds=True, max_logprobs=-1)
    begin = "a beginning that both share: "
    one, other = (
        (f"{begin}{IMAGE_TOKENS}", [image], [])
        for image in (WIDE, WIDE.transpose(Image.Transpose.ROTATE_180))
    )
    (first,), (second,) = generate(llm, [one]), generate(llm, [other])
    assert [first.outputs[0].token_ids, second.outputs[0].token_ids] == [
        twin.generate_reference(one),
        twin.generate_reference(other),
    ]
    assert len(begin) - 4 <= second.num_cached_tokens <= len(begin) + 1
    (same,) = generate(llm, [(f"{begin}{IMAGE_TOKENS} and more", [WIDE], [])])
    assert same.num_cached_tokens > len(first.prompt_token_ids) - 8
    params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
    narrower = request_of(one) | {"mm_processor_kwargs": {"max_pixels": 512}}
    (less,) = llm.generate([narrower], params, use_tqdm=False)
    assert (
        len(less.prompt_token_ids) < len(first.prompt_token_ids) and less.num_cached_tokens <= len(begin) + 1
    )
    inputs = twin.inputs(one)
    with torch.inference_mode():
        vectors = twin.model.model.visual(
            inputs["pixel_values"], grid_thw=inputs["image_grid_thw"]
        ).pooler_output
    embeds = {"image_embeds": vectors.clone(), "image_grid_thw": inputs["image_grid_thw"]}
    brought = {"prompt": one[0], "multi_modal_data": {"image": embeds}}
    (seen,) = llm.generate([brought], params, use_tqdm=False)
    assert (
        seen.outputs[0].token_ids == first.outputs[0].token_ids and seen.num_cached_tokens <= len(begin) + 1
    )
    contents = [one, other, prompts(is_glm=False)[3]]
    outputs = generate_preempted(llm, [request_of(content) for content in contents], COUNT, at=(1, 3, 4))
    assert [output.outputs[0].token_ids for output in outputs] == [
        twin.generate_reference(content) for content in contents
    ]


@torch.inference_mode()
@pytest.mark.parametrize("family", ["Qwen2_5_VL"])
def test_beam_search_with_images_equals_transformers(
    family: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Check that positions continue after the largest one of the prompt in every step."""
    twin = Twin(family, tmp_path_factory.mktemp(family))
    content = prompts(is_glm=False)[2]
    inputs = twin.inputs(content)
    twin.model.generation_config.eos_token_id = None
    options = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": COUNT, "do_sample": False}
    expected = twin.model.generate(**inputs, **options)[:, inputs["input_ids"].shape[1] :].tolist()
    llm = open_llm(twin.path)
    prompt = {"prompt": content[0], "multi_modal_data": {"image": content[1]}}
    params = BeamSearchParams(beam_width=3, max_tokens=COUNT, ignore_eos=True)
    (output,) = llm.beam_search([prompt], params)
    beams = [beam.tokens[-COUNT:] for beam in output.sequences]
    assert beams == expected and len({*map(tuple, beams)}) == 3

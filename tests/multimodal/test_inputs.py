"""Tests of media in prompts and conversations: parsing, limits, and placeholder positions."""

import io
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fake_inputs import (
    END,
    HIDDEN,
    PAD,
    START,
    FakeProcessor,
    data_url,
    file_of,
    image_part,
    inputs,
    media,
    picture,
    wav,
)

from quire.config.env import MediaEnv
from quire.config.sections import MultimodalSection
from quire.data.params import SamplingParams
from quire.errors import RequestError
from quire.frontend.chat import chat_prompt
from quire.frontend.inputs import Prompt
from quire.frontend.multimodal import MediaInputReader
from quire.multimodal.placeholders import _find_spans
from quire.multimodal.processing import MediaProcessor, PreparedItem
from quire.multimodal.processors import ProcessedItem, Video

WHOLE = "{% for m in messages %}{{ m.content }}{% endfor %}"
PARTS = (
    "{% for m in messages %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<i>{% elif p.type == 'video' %}<v>{% elif p.type == 'audio' %}<a>"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}"
)
SPAN = [START, PAD, PAD, END]
"""Placeholder tokens of an image of 20 x 10."""
TEXT = {"type": "text", "text": "ab"}


def ids(text: str) -> list[int]:
    return inputs().tokenizer.encode(text, add_special_tokens=False)  # type: ignore[union-attr]


def turn(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def check_spans(prompt: Prompt) -> list[tuple[str, int, int]]:
    assert prompt.media is not None and prompt.media.positions is not None
    assert prompt.media.positions.shape == (3, len(prompt.token_ids))
    for item in prompt.media.items:
        span = prompt.token_ids[item.offset : item.end]
        assert [span[first : first + count] for first, count in item.runs] == [[PAD] * item.num_vectors]
    return [(item.modality, item.offset, item.num_vectors) for item in prompt.media.items]


@pytest.mark.parametrize(
    ("template", "interleaved", "text"),
    [(PARTS, False, "ab<i>cd<i>"), (WHOLE, False, "<i>\n<i>\nab\ncd"), (WHOLE, True, "ab\n<i>\ncd\n<i>")],
)
def test_items_are_placed_where_the_template_puts_them(template: str, interleaved: bool, text: str) -> None:
    small, large = image_part(), image_part(data_url(file_of(picture(40, 20))))
    result = chat_prompt(
        inputs(media(interleave_mm_strings=interleaved)),
        turn(TEXT, small, {"type": "text", "text": "cd"}, large),
        chat_template=template,
    )
    assert result.text == text
    tokens = []
    for piece, span in zip(text.split("<i>"), [SPAN, [START, *[PAD] * 6, END], []], strict=True):
        tokens += [*ids(piece), *span]
    assert result.token_ids == tokens
    assert [count for _, _, count in check_spans(result)] == [2, 6]
    first, second = result.media.items  # type: ignore[union-attr]
    assert first.key != second.key


def test_placeholder_written_by_the_user_is_not_added_again() -> None:
    written = {"type": "text", "text": "see <i> here"}
    result = chat_prompt(inputs(), turn(image_part(), written), chat_template=WHOLE)
    assert result.text == "see <i> here"


IMAGE = picture()
URL = data_url(file_of(IMAGE))


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": URL, "detail": "high"}},
        {"type": "image_url", "image_url": URL},
        {"image_url": URL},
        {"type": "input_image", "image_url": URL, "detail": "auto"},
        {"type": "image_pil", "image_pil": IMAGE},
        {"type": "image", "image": IMAGE},
        {"type": "image", "url": URL},
        {"image": IMAGE},
        {"type": "image_url", "image_url": {"url": URL}, "uuid": "mine"},
    ],
)
def test_every_image_part_form_gives_the_same_image(part: dict[str, Any]) -> None:
    result = chat_prompt(inputs(), turn(part), chat_template=PARTS)
    assert result.token_ids == SPAN
    (item,) = result.media.items  # type: ignore[union-attr]
    assert np.array_equal(item.arrays["numbers"].numbers(), np.asarray(IMAGE))  # type: ignore[index]


def test_audio_and_videos_have_their_own_placeholders() -> None:
    sound = wav(np.zeros((450, 1), np.int16))
    frames = [picture(seed=seed).quantize() for seed in range(3)]
    text = data_url(sound).partition(",")[2]
    film = file_of(frames[0], "GIF", save_all=True, append_images=frames[1:])
    result = chat_prompt(
        inputs(),
        turn(
            {
                "type": "input_audio",
                "input_audio": {"data": text, "format": "wav"},
            },
            TEXT,
            {"type": "video_url", "video_url": {"url": data_url(film, "video/gif")}},
            {"type": "audio_url", "audio_url": {"url": data_url(sound, "audio/wav")}},
        ),
        chat_template=PARTS,
    )
    assert check_spans(result) == [("audio", 0, 5), ("video", 9, 3), ("audio", 14, 5)]
    heard, _, again = result.media.items  # type: ignore[union-attr]
    assert heard.key == again.key


def test_prompts_accept_media_objects() -> None:
    reader = inputs()
    numbers = np.asarray(IMAGE)
    for image in (IMAGE, [IMAGE], numbers, torch.tensor(numbers)[None], [numbers.transpose(2, 0, 1) / 255]):
        result = reader.parse({"prompt": "a<i>b", "multi_modal_data": {"image": image}})
        assert result.token_ids == [*ids("a"), *SPAN, *ids("b")]
    both = {
        "video": np.zeros((4, 8, 8, 3), np.uint8),
        "audio": [(np.zeros(150, np.float32), 16000), np.zeros(50)],
        "image": None,
    }
    result = reader.parse({"prompt_token_ids": ids("<a>x<v><a>"), "multi_modal_data": both})
    assert check_spans(result) == [("audio", 0, 2), ("video", 5, 4), ("audio", 11, 1)]
    (request,) = reader.requests("1", result, SamplingParams(max_tokens=1))
    assert request.media is result.media and request.prompt_len == len(result.token_ids)


def test_token_prompts_may_have_expanded_placeholders() -> None:
    tokens = [7, *SPAN, 8, *SPAN]
    result = inputs().parse({"prompt_token_ids": tokens, "multi_modal_data": {"image": [IMAGE, IMAGE]}})
    assert result.token_ids == tokens and [offset for _, offset, _ in check_spans(result)] == [1, 6]


def test_placeholder_search_is_aligned_and_linear() -> None:
    """Covers tokens that have the placeholder's bytes at a wrong offset, and tokens that begin like the
    placeholder everywhere."""
    whole = PreparedItem("image", b"", ProcessedItem([1, 1]))
    ready = replace(whole, processed=ProcessedItem([256, 256]))
    assert _find_spans([1, 1, 1, 7], [ready]) is None and offsets([1, 256, 256], [ready]) == [(1, 2)]
    assert offsets([1, 1, 1, 1], [whole, whole]) == [(0, 2), (2, 2)]
    long = replace(whole, processed=ProcessedItem([5] * 16000))
    assert _find_spans(([5] * 15999 + [6]) * 8, [long]) is None


def offsets(token_ids: list[int], prepared: list[PreparedItem], *more: Any) -> list[tuple[int, int]] | None:
    result = _find_spans(token_ids, prepared, *more)
    return result and [(item.offset, item.length) for item in result]


def test_placeholders_with_merged_edge_tokens_are_found() -> None:
    """Tokens up to 9 are runs of newlines, as in Gemma; two of them surround an image."""

    def joined(before: int, after: int) -> int | None:
        return before + after if before < 10 > after and before + after < 10 else None

    item = PreparedItem("image", b"", ProcessedItem([2, 90, 91, 92, 2], [(2, 1)]))
    core = [90, 91, 92]
    assert offsets([50, 2, *core, 2, 50], [item], joined) == [(1, 5)]
    assert offsets([50, 3, *core, 4, 50], [item], joined) == [(2, 4)]
    assert offsets([2, *core, 4, *core, 3], [item, item], joined) == [(0, 5), (5, 4)]
    assert offsets([2, *core, 2, 2, *core, 2], [item, item], joined) == [(0, 5), (5, 5)]
    for wrong in ([*core, 2], [50, *core, 2], [2, *core], [2, *core, 50], [2, *core, 2]):
        assert offsets(wrong, [item, item] if wrong[0] == wrong[-1] else [item], joined) is None


def test_key_depends_on_content_and_options() -> None:
    reader = inputs()

    def key(image: Any = IMAGE, **more: Any) -> bytes:
        result = reader.parse({"prompt": "<i>", "multi_modal_data": {"image": image}, **more})
        return result.media.items[0].key  # type: ignore[union-attr]

    other = IMAGE.copy()
    other.putpixel((3, 3), (1, 2, 3))
    named: dict[str, Any] = {"multi_modal_uuids": {"image": ["x"]}}
    keys = [
        key(),
        key(other),
        key(IMAGE.resize((10, 20))),
        key(mm_processor_kwargs={"side": 8}),
        key(**named),
    ]
    assert len({*keys}) == 5
    assert key(other, **named) == keys[4] and key(IMAGE.copy()) == keys[0]
    others = [
        key(picture(40, 20), **named),
        key(**named, cache_salt="hers"),
        key(**named, mm_processor_kwargs={"side": 8}),
    ]
    assert len({*keys, *others}) == 8, "keys differ by size, salt and options"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"image": "x.png"}, r"multi_modal_data\['image'\]\[0\]: the type str is not supported"),
        ({"image": [IMAGE, None]}, r"\['image'\]\[1\] is None and has no uuid"),
        ({"image": [IMAGE] * 2}, "1 placeholders for media, and 2 image"),
        ({"image": [IMAGE] * 10}, r"At most 9 image\(s\) may be provided in one prompt\. Set `--limit-mm"),
        ({"pictures": IMAGE}, "multi_modal_data has no 'pictures'"),
        ({"image": np.zeros((3, 3, 3, 3, 3))}, "is not an image"),
        ({"image": np.full((3, 3, 3), np.nan)}, "pixels that are not finite"),
        ({"image": [[[1], [2, 3]]]}, "of different lengths"),
        ({"image": np.zeros((3, 3, 3), np.longdouble)}, "which is not supported"),
        ({"image": {"image_embeds": np.zeros((2, HIDDEN))}}, "You must set `--enable-mm-embeds`"),
        ({"audio": (np.zeros(5), -1)}, "sample rate of -1"),
        ({"audio": (np.zeros(0), 8000)}, "has no samples"),
        ([IMAGE], "must be a dict"),
    ],
)
def test_invalid_media_data_is_named(data: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        inputs().parse({"prompt": "<i>", "multi_modal_data": data})


def test_embeddings_replace_images_if_enabled() -> None:
    reader = inputs(media(enable_mm_embeds=True))
    vectors = np.arange(2 * HIDDEN, dtype=np.float32).reshape(2, HIDDEN)
    file, saved = io.BytesIO(), io.BytesIO()
    np.save(file, vectors)
    torch.save(torch.tensor(vectors).bfloat16(), saved)
    for buffer in (file, saved):
        text = data_url(buffer.getvalue()).partition(",")[2]
        result = chat_prompt(
            reader, turn({"type": "image_embeds", "image_embeds": text}), chat_template=PARTS
        )
        (item,) = result.media.items  # type: ignore[union-attr]
        assert result.token_ids == [PAD, PAD]
        assert np.array_equal(item.arrays["embeds"].numbers(), vectors)  # type: ignore[index]
    for wrong in (np.zeros((2, 5)), np.full((2, HIDDEN), 1e300), [[0] * HIDDEN, [1]], ["a"], [{}], [None]):
        with pytest.raises(RequestError, match="image_embeds|not \\[n, 4\\]"):
            reader.parse({"prompt": "<i>", "multi_modal_data": {"image": {"image_embeds": wrong}}})


def test_placeholders_count_toward_the_prompt_length() -> None:
    with pytest.raises(RequestError, match="contains 40 input tokens"):
        inputs(max_model_len=32).parse({"prompt": "<i>", "multi_modal_data": {"image": picture(608, 10)}})


def test_media_beyond_the_context_are_not_processed() -> None:
    """Each of many small files may take megabytes: those beyond the context are not even decoded."""
    reader = media({"image": 99}, max_tokens=40)
    with pytest.raises(RequestError, match=r"content\[\d+\]: the media of the prompt have at least"):
        chat_prompt(inputs(reader, max_model_len=4096), turn(*[image_part()] * 9 * 8), chat_template=PARTS)


class PerPixelProcessor(FakeProcessor):
    """Processor with one embedding per pixel of a video."""

    def num_vectors(self, video: Video, arguments: Any) -> int:
        return math.prod(video.frames.shape[:3])


def test_video_beyond_the_context_is_not_decoded() -> None:
    processor = PerPixelProcessor()
    media_processor = MediaProcessor(processor, MultimodalSection(), MediaEnv(), max_tokens=4096)
    reader = MediaInputReader("fake", media_processor, {"video": 1})
    frames = [picture(90, 90, seed=seed).quantize(4) for seed in range(3)]
    film = file_of(frames[0], "GIF", save_all=True, append_images=frames[1:])
    part = {"type": "video_url", "video_url": {"url": data_url(film, "video/gif")}}
    with pytest.raises(RequestError, match="3 frames of 90 x 90 pixels need at least 24300 tokens"):
        chat_prompt(inputs(reader), turn(part), chat_template=PARTS)
    assert not processor.seen


def test_text_only_models_refuse_media() -> None:
    for reader, words in (
        (MediaInputReader("org/llama"), "org/llama is not a multimodal model"),
        (
            MediaInputReader("org/vl", lacks_tokenizer=True),
            "needs its tokenizer for media, and skip_tokenizer_init is set",
        ),
        (
            MediaInputReader("org/vl", limits={"image": 0}),
            r"At most 0 image\(s\) may be provided in one prompt",
        ),
    ):
        with pytest.raises(RequestError, match=words):
            chat_prompt(inputs(reader), turn(image_part()), chat_template=PARTS)

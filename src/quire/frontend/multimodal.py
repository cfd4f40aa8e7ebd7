"""The media of prompts: which and how many a model takes, and how `multi_modal_data` brings them."""

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from quire.checkpoint.reader import read_json
from quire.config.engine import EngineConfig
from quire.config.env import Env
from quire.config.generation import max_first_moment
from quire.config.mm_caches import CacheKind, max_bytes, max_object_bytes
from quire.config.mm_limits import limits_of
from quire.data.multimodal import MODALITIES, Media
from quire.errors import RequestError
from quire.frontend.prompt_embeds import as_numbers, tensor_of
from quire.frontend.speech import Dictation, Speech, Transcriber
from quire.logs import get_logger
from quire.memory import max_span
from quire.multimodal.audio import checked
from quire.multimodal.image_files import to_rgb
from quire.multimodal.inputs import MediaInput, Source
from quire.multimodal.mel import Samples
from quire.multimodal.placeholders import place
from quire.multimodal.processing import MediaProcessor, Options, PreparedItem
from quire.multimodal.processor_cache import ProcessorCache
from quire.multimodal.processors import PROCESSORS, Processor, Sound, Video, spells
from quire.system.shared_arena import SharedArena
from quire.text.tokenizer import Tokenizer

log = get_logger(__name__)
_IDS = "prompt_token_ids"
_RAISE = " Set `--limit-mm-per-prompt` to increase this limit."


class MediaInputReader:
    """What one model can be given beside text, checked and made ready."""

    def __init__(
        self,
        model: str,
        media_processor: MediaProcessor | None = None,
        limits: Mapping[str, int] | None = None,
        *,
        takes_embeds: bool = False,
        interleaves: bool = False,
        max_span: int | None = None,
        crossed: bool = False,
        prefix: bool = False,
        speech: Transcriber | None = None,
        lacks_tokenizer: bool = False,
    ) -> None:
        """An item stands for at most `max_span` tokens; None: for any number. `lacks_tokenizer`: it could be
        given some, if it had one."""
        self._model, self._media_processor, self._limits = model, media_processor, limits or {}
        self._takes_embeds = takes_embeds
        self._max_span, self._lacks_tokenizer = max_span, lacks_tokenizer
        self.speech = speech
        """How the model is asked to write down what it hears, if that is what it does."""
        self.processor_cache = (
            ProcessorCache(0) if media_processor is None else media_processor.processor_cache
        )
        """What is kept of items that were read."""
        self.interleaves = interleaves
        """Whether items keep their places among texts where a template knows only text."""
        self.crossed = crossed
        """Whether each prompt has one item, which all of its tokens see. Its text is then as it is: the user
        writes what begins it."""
        self.prefix = prefix
        """Whether all tokens of a prompt with items see each other. Its processor writes what begins it."""

    @property
    def modalities(self) -> list[str]:
        """What a prompt may have."""
        known = self._media_processor.processor.modalities if self._media_processor is not None else ()
        return [modality for modality in known if self._limits.get(modality)]

    def check(self, given: Sequence[MediaInput]) -> None:
        """Before anything is fetched."""
        for modality in dict.fromkeys(item.modality for item in given):
            if self._media_processor is None and self._lacks_tokenizer:
                raise RequestError(
                    f"{self._model} takes media only with its tokenizer, and skip_tokenizer_init is set"
                )
            if self._media_processor is None and self._limits.get(modality, 1):
                raise RequestError(f"{self._model} is not a multimodal model")
            limit = min(self._limits.get(modality, 0), 1 if self.crossed else sys.maxsize)
            known = (
                self._media_processor is not None and modality in self._media_processor.processor.modalities
            )
            if sum(item.modality == modality for item in given) > (limit if known else 0):
                raise RequestError(
                    f"At most {limit if known else 0} {modality}(s) may be provided in one prompt."
                    + ("" if self.crossed or (limit and not known) else _RAISE),
                )
        for item in given:
            if isinstance(item.source, dict) and not self._takes_embeds:
                name = f"{item.modality}_embeds"
                raise RequestError(f"You must set `--enable-mm-embeds` to input `{name}`", param=name)

    def require(self, media: Media | None) -> None:
        """A prompt that has these has what it needs."""
        if self.crossed and media is None:
            raise RequestError(
                f"{self._model} writes down a sound, and there is none: give multi_modal_data with `audio`",
                param="multi_modal_data",
            )

    def prepare_now(
        self, given: Sequence[MediaInput], arguments: Options | None = None, reading: Options | None = None
    ) -> list[PreparedItem]:
        """For callers who wait."""
        self.check(given)
        return (
            self._media_processor.prepare_now(given, arguments, reading)
            if given and self._media_processor
            else []
        )

    async def prepare(
        self, given: Sequence[MediaInput], arguments: Options | None = None, reading: Options | None = None
    ) -> list[PreparedItem]:
        """For event loops."""
        self.check(given)
        return (
            await self._media_processor.prepare(given, arguments, reading)
            if given and self._media_processor
            else []
        )

    async def prepare_each(
        self, prompts: Sequence[Sequence[MediaInput]], reading: Options | None, arguments: Options | None
    ) -> list[list[PreparedItem]]:
        """The same of several prompts at once, which were checked."""
        if self._media_processor is None or not any(prompts):
            return [[] for _ in prompts]
        return await self._media_processor.prepare_each(prompts, arguments, reading)

    async def hear(self, data: bytes, rate: int, max_seconds: float) -> Samples:
        """A file of sound as samples at this rate."""
        if self._media_processor is None or "audio" not in self.modalities:
            raise RequestError(f"{self._model} does not hear")
        return await self._media_processor.hear(data, rate, max_seconds)

    def place(self, token_ids: Sequence[int], prepared: Sequence[PreparedItem]) -> tuple[list[int], Media]:
        assert self._media_processor is not None
        placed, media = place(token_ids, prepared, self._media_processor.processor)
        for item in media.items:
            if self._max_span is not None and item.length > self._max_span:
                raise RequestError(
                    f"One {item.modality} stands for {item.length} tokens, which are computed in one step, "
                    f"and a step holds {self._max_span}: take a smaller one, or raise max_num_batched_tokens"
                )
        return placed, self.joined(placed, media) if self.prefix else media

    def joined(self, token_ids: Sequence[int], media: Media) -> Media:
        """Of a prompt whose tokens see each other."""
        if self._max_span is not None and len(token_ids) > self._max_span:
            raise RequestError(
                f"The prompt has {len(token_ids)} tokens, which see each other and are computed in one step, "
                f"and a step holds {self._max_span}: shorten it, or raise max_num_batched_tokens"
            )
        return media.joined(token_ids)

    async def bring(self, media: Media, prepared: Sequence[PreparedItem]) -> None:
        """Give the items of a prompt the arrays again that were elsewhere."""
        assert self._media_processor is not None
        made = await self._media_processor.make_again(prepared)
        for item in media.items:
            item.arrays = item.arrays or made.get(item.key)

    def spelled(self, text: str) -> str:
        """A prompt with media, as its tokens are to be made."""
        assert self._media_processor is not None
        processor = self._media_processor.processor
        return processor.spelled(text) if spells(processor) else text

    def mark(self, modality: str, number: int) -> str:
        """What stands for an item in a text; `number` counts those of its modality, from 1 on."""
        assert self._media_processor is not None
        return self._media_processor.processor.text(modality, number)


TEXT_ALONE = MediaInputReader("This model")


def media_reader(
    config: EngineConfig, tokenizer: Tokenizer | None, *, cache: CacheKind = "processor"
) -> MediaInputReader:
    section, media = config.multimodal, config.checkpoint.facts.media
    name = config.model.served_model_name[0]
    limits = limits_of(section.limit_mm_per_prompt, language_model_only=section.language_model_only)
    crossed = media is not None and media.crossed > 0
    if media is None or tokenizer is None:  # whose marks are texts
        return MediaInputReader(name, limits=limits, crossed=crossed, lacks_tokenizer=media is not None)
    processor = PROCESSORS[media.family](config.checkpoint.path, media, tokenizer)
    if section.mm_processor_cache_type == "shm" and cache not in ("shm", "off"):
        log.warning(
            "mm_processor_cache_type=shm takes one API process and one engine on one machine: processed items"
            " are kept as with lru"
        )
    arena = SharedArena(max_bytes(section), max_object_bytes(section)) if cache == "shm" else None
    processor_cache = ProcessorCache(max_bytes(section), far=cache == "replicated", arena=arena)
    env = Env.read(os.environ).media
    media_processor = MediaProcessor(
        processor, section, env, processor_cache, max_tokens=config.model.max_model_len
    )
    return MediaInputReader(
        name,
        media_processor,
        limits,
        takes_embeds=section.enable_mm_embeds,
        interleaves=section.interleave_mm_strings,
        max_span=max_span(config),
        crossed=crossed,
        prefix=media.is_prefix,
        speech=_speech(config, processor, tokenizer) if media.transcribes else None,
    )


def _speech(config: EngineConfig, processor: Processor, tokenizer: Tokenizer) -> Transcriber | None:
    (at_once,), max_len = processor.largest("audio"), config.model.max_model_len
    media, said = config.checkpoint.facts.media, config.checkpoint.path / "generation_config.json"
    if media is not None and not media.crossed:
        most = processor.most_vectors("audio")
        return Dictation.of(tokenizer, max_len=max_len, at_once=at_once, num_vectors=most)
    is_english = said.is_file() and read_json(said).get("is_multilingual") is False
    return Speech.of(
        tokenizer,
        max_len=max_len,
        at_once=at_once,
        is_english=is_english,
        end=next(iter(config.checkpoint.eos_ids), None),
        max_first=max_first_moment(config),
    )


# ---- multi_modal_data


def joined(prompt: Mapping[str, Any]) -> Mapping[str, Any]:
    """The prompts of an encoder and of a decoder, where they came as two, as one: the media are the first
    one's, which has nothing else."""
    if "encoder_prompt" not in prompt and "decoder_prompt" not in prompt:
        return prompt
    heard, said = prompt.get("encoder_prompt"), prompt.get("decoder_prompt")
    if not isinstance(heard, Mapping) or heard.get("prompt") or heard.get("prompt_token_ids"):
        raise RequestError(
            "encoder_prompt must be a dict with multi_modal_data, and no text of its own", "encoder_prompt"
        )
    own = said if isinstance(said, Mapping) else {"prompt" if isinstance(said, str) else _IDS: said}
    return {**{key: value for key, value in heard.items() if key not in ("prompt", _IDS)}, **own}


def items_of(prompt: Mapping[str, Any]) -> list[MediaInput]:
    """The items of a prompt's `multi_modal_data`, each with its of `multi_modal_uuids`."""
    found: list[MediaInput] = []
    data, uuids = (_mapping(name, prompt.get(name)) for name in ("multi_modal_data", "multi_modal_uuids"))
    for modality in dict.fromkeys([*data, *uuids]):
        if modality not in MODALITIES:
            known = ", ".join(MODALITIES)
            raise RequestError(
                f"multi_modal_data has no {modality!r:.40}; known: {known}", "multi_modal_data"
            )
        sources = _several(modality, data.get(modality))
        names = uuids.get(modality)
        names = [names] if isinstance(names, str) else list(names or [None] * len(sources))
        sources = sources or [None] * len(names)
        if len(names) != len(sources):
            raise RequestError(
                f"multi_modal_uuids has {len(names)} for {len(sources)} {modality}(s)", "multi_modal_uuids"
            )
        for at, (source, uuid) in enumerate(zip(sources, names, strict=True)):
            where = f"multi_modal_data[{modality!r}][{at}]"
            if source is None and uuid is None:
                raise RequestError(f"{where} is None, and has no uuid", "multi_modal_data")
            item = MediaInput(modality, None, where, "multi_modal_data", uuid, prompt.get("cache_salt"))
            try:
                item.source = None if source is None else _READERS[modality](source)
            except RequestError as error:
                raise item.wrong(error) from None
            found.append(item)
    return found


def _mapping(name: str, given: Any) -> Mapping[str, Any]:
    if given is not None and not isinstance(given, Mapping):
        raise RequestError(f"{name} must be a dict by modality, not {type(given).__name__}", param=name)
    return {key: value for key, value in (given or {}).items() if value is not None}


def _several(modality: str, given: Any) -> list[Any]:
    """One item or several, as several. A list of frames is one video, and one of numbers a sound."""
    if given is None:
        return []
    dims = getattr(given, "ndim", None)
    if dims is not None:
        batched = {"image": 4, "video": 5, "audio": 2}[modality]
        if modality == "image" and dims == 3 and not isinstance(given, np.ndarray):
            return [{"image_embeds": each} for each in given]  # a tensor of torch, as vLLM takes it
        return list(given) if dims == batched else [given]
    if not isinstance(given, list):
        return [given]
    single = (Image.Image,) if modality == "video" else (int, float) if modality == "audio" else ()
    return [given] if given and isinstance(given[0], single) else given


def read_image(given: Any) -> Source:
    if isinstance(given, Image.Image):
        return to_rgb(given)
    if isinstance(given, Mapping):
        return read_embeds("image", given)
    numbers = _numbers(given)
    if numbers.ndim == 2 and np.issubdtype(numbers.dtype, np.floating):
        return {"embeds": numbers}
    if numbers.ndim == 3 and numbers.shape[0] in (1, 3, 4) and numbers.shape[2] not in (1, 3, 4):
        numbers = numbers.transpose(1, 2, 0)
    if numbers.ndim == 3 and numbers.shape[2] == 1:
        numbers = numbers[:, :, 0]
    if numbers.ndim not in (2, 3) or (numbers.ndim == 3 and numbers.shape[2] not in (3, 4)):
        raise RequestError(f"an array of shape {list(numbers.shape)} is no image")
    if not numbers.size:
        raise RequestError("the image has no pixels")
    return to_rgb(Image.fromarray(_bytes(numbers)))


def _read_video(given: Any) -> Source:
    if isinstance(given, Mapping):
        return read_embeds("video", given)
    facts: Mapping[str, Any] = {}
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping):
        given, facts = given
    if isinstance(given, list | tuple):
        sizes = {np.shape(frame)[:2] for frame in given}
        if len(sizes) != 1:
            raise RequestError(f"a video has frames of one size, not of {len(sizes)}")
        numbers = np.stack([np.asarray(read_image(frame)) for frame in given])
    else:
        numbers = _numbers(given)
        if numbers.ndim == 4 and numbers.shape[1] == 3 and numbers.shape[3] != 3:
            numbers = numbers.transpose(0, 2, 3, 1)
        numbers = _bytes(numbers)
    if numbers.ndim != 4 or numbers.shape[3] != 3 or not numbers.size:
        raise RequestError(f"an array of shape {list(numbers.shape)} is no video: it has [frames, h, w, 3]")
    indices = tuple(int(index) for index in facts.get("frames_indices") or ())
    source_fps, total = facts.get("fps"), int(facts.get("total_num_frames") or 0)
    fps = source_fps * len(numbers) / total if source_fps and total else source_fps
    return Video(numbers, fps, total, indices, source_fps)


def _read_audio(given: Any) -> Source:
    if isinstance(given, Sound):
        return given
    if isinstance(given, Mapping):
        return read_embeds("audio", given)
    samples, rate = given if isinstance(given, tuple) and len(given) == 2 else (given, 0)
    if not isinstance(rate, int | float) or rate < 0:
        raise RequestError(f"a sample rate of {rate!r:.40} is not possible")
    return checked(_numbers(samples), int(rate))


_READERS: dict[str, Callable[[Any], Source]] = {
    "image": read_image,
    "video": _read_video,
    "audio": _read_audio,
}


def read_embeds(modality: str, given: Any) -> dict[str, NDArray[Any]]:
    """Vectors in place of an item, bare or with what belongs to them: as tensors, or as base64 of files."""
    named = given if isinstance(given, Mapping) else {f"{modality}_embeds": given}
    found = {
        "embeds" if name in (f"{modality}_embeds", "embeds") else str(name): tensor_of(value, str(name))
        for name, value in named.items()
    }
    if "embeds" not in found:
        raise RequestError(f"{modality}_embeds are missing; there are {sorted(found)}", f"{modality}_embeds")
    with np.errstate(over="ignore"):
        found["embeds"] = found["embeds"].astype(np.float32, copy=False)
    if not np.isfinite(found["embeds"]).all():
        raise RequestError(f"{modality}_embeds have numbers that are not finite", f"{modality}_embeds")
    return found


def _numbers(given: Any) -> NDArray[Any]:
    """An array of numpy, or what can be one: a tensor of torch, a list of numbers."""
    if hasattr(given, "detach"):
        given = given.detach().cpu()
    if not isinstance(given, np.ndarray) and not hasattr(given, "__array__") and not _is_list(given):
        raise RequestError(f"{type(given).__name__} is nothing that can be read here")
    try:
        return as_numbers(given)
    except RequestError as error:
        raise RequestError(f"it {error}") from None


def _is_list(given: Any) -> bool:
    return isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping)


def _bytes(numbers: NDArray[Any]) -> NDArray[np.uint8]:
    """Pixels from 0 to 255; those that are fractions of 1 as well."""
    if numbers.dtype == np.uint8:
        return numbers
    if numbers.dtype.kind == "f":
        if not np.isfinite(numbers).all():
            raise RequestError("there are pixels that are no numbers")
        numbers = numbers * 255 if numbers.max(initial=0) <= 1 else numbers
        numbers = np.rint(numbers)
    return numbers.clip(0, 255).astype(np.uint8)

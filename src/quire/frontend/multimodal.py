"""Media of prompts: the modalities and limits of a model, and the items of `multi_modal_data`."""

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
from quire.config.generation import max_initial_timestamp
from quire.config.mm_caches import CacheKind, max_bytes, max_object_bytes
from quire.config.mm_limits import MODALITIES, limits_of
from quire.config.sections import MultimodalSection
from quire.data.multimodal import Media
from quire.errors import RequestError
from quire.frontend.prompt_embeds import as_numbers, tensor_of
from quire.frontend.speech import Transcriber, VoxtralTranscriber, WhisperTranscriber
from quire.logs import get_logger
from quire.memory import max_span
from quire.multimodal.audio import checked
from quire.multimodal.image_files import to_rgb
from quire.multimodal.inputs import MediaInput, Source
from quire.multimodal.mel import Samples
from quire.multimodal.placeholders import place
from quire.multimodal.processing import MediaProcessor, Options, PreparedItem
from quire.multimodal.processor_cache import ProcessorCache, SharedProcessorCache
from quire.multimodal.processors import PROCESSORS, Audio, Processor, Video, rewrites_text
from quire.system.shared_arena import SharedArena
from quire.system.shared_cache import SharedCache
from quire.text.tokenizer import Tokenizer

log = get_logger(__name__)
_IDS = "prompt_token_ids"
_RAISE = " Set `--limit-mm-per-prompt` to increase this limit."


class MediaInputReader:
    """Checks and prepares the media of prompts for one model."""

    def __init__(
        self,
        model: str,
        media_processor: MediaProcessor | None = None,
        limits: Mapping[str, int] | None = None,
        *,
        takes_embeds: bool = False,
        interleaves: bool = False,
        max_span: int | None = None,
        uses_cross_attention: bool = False,
        prefix: bool = False,
        speech: Transcriber | None = None,
        lacks_tokenizer: bool = False,
    ) -> None:
        """Create the reader of one model. `limits` are the most items of a prompt by modality; `max_span` is
        the maximum number of tokens of an item; None: any number. `lacks_tokenizer` means that media are
        refused, because the model needs its tokenizer for them and skip_tokenizer_init is set."""
        self._model, self._media_processor, self._limits = model, media_processor, limits or {}
        self._takes_embeds = takes_embeds
        self._max_span, self._lacks_tokenizer = max_span, lacks_tokenizer
        self.speech = speech
        """Builder of transcription prompts; None unless the model transcribes."""
        self.processor_cache = (
            ProcessorCache(0) if media_processor is None else media_processor.processor_cache
        )
        """Cache of processed items."""
        self.interleaves = interleaves
        """Whether items keep their places among the texts of a message if templates support only text."""
        self.uses_cross_attention = uses_cross_attention
        """Whether all tokens cross-attend to the prompt's one item; then its text gets no special tokens."""
        self.prefix = prefix
        """Whether all tokens of a prompt with items attend to each other; then the processor adds special
        tokens."""

    @property
    def modalities(self) -> list[str]:
        known = self._media_processor.processor.modalities if self._media_processor is not None else ()
        return [modality for modality in known if self._limits.get(modality)]

    def check(self, items: Sequence[MediaInput]) -> None:
        """Raise a RequestError if the model does not accept the number or the kind of the items. Nothing is
        fetched here."""
        for modality in dict.fromkeys(item.modality for item in items):
            if self._media_processor is None and self._lacks_tokenizer:
                raise RequestError(
                    f"{self._model} needs its tokenizer for media, and skip_tokenizer_init is set"
                )
            if self._media_processor is None and self._limits.get(modality, 1):
                raise RequestError(f"{self._model} is not a multimodal model")
            limit = min(self._limits.get(modality, 0), 1 if self.uses_cross_attention else sys.maxsize)
            known = (
                self._media_processor is not None and modality in self._media_processor.processor.modalities
            )
            if sum(item.modality == modality for item in items) > (limit if known else 0):
                raise RequestError(
                    f"At most {limit if known else 0} {modality}(s) may be provided in one prompt."
                    + ("" if self.uses_cross_attention or (limit and not known) else _RAISE)
                )
        for item in items:
            if isinstance(item.source, dict) and not self._takes_embeds:
                name = f"{item.modality}_embeds"
                raise RequestError(f"You must set `--enable-mm-embeds` to input `{name}`", param=name)

    def require(self, media: Media | None) -> None:
        """Raise a RequestError if the prompt lacks the item that the model needs."""
        if self.uses_cross_attention and media is None:
            raise RequestError(
                f"{self._model} transcribes audio, and there is none: set multi_modal_data with `audio`",
                param="multi_modal_data",
            )

    def prepare_sync(
        self, items: Sequence[MediaInput], arguments: Options | None = None, reading: Options | None = None
    ) -> list[PreparedItem]:
        """Check and prepare the items of a prompt, and block until that is done. `arguments` are the prompt's
        mm_processor_kwargs, `reading` its media_io_kwargs."""
        self.check(items)
        if not items or self._media_processor is None:
            return []
        return self._media_processor.prepare_sync(items, arguments, reading)

    async def prepare(
        self, items: Sequence[MediaInput], arguments: Options | None = None, reading: Options | None = None
    ) -> list[PreparedItem]:
        self.check(items)
        if not items or self._media_processor is None:
            return []
        return await self._media_processor.prepare(items, arguments, reading)

    async def prepare_each(
        self, prompts: Sequence[Sequence[MediaInput]], reading: Options | None, arguments: Options | None
    ) -> list[list[PreparedItem]]:
        """Process the items of several prompts that `check` has accepted; return the processed items of each
        prompt."""
        if self._media_processor is None or not any(prompts):
            return [[] for _ in prompts]
        return await self._media_processor.prepare_each(prompts, arguments, reading)

    async def decode_audio(self, data: bytes, rate: int, max_seconds: float) -> Samples:
        if self._media_processor is None or "audio" not in self.modalities:
            raise RequestError(f"{self._model} has no audio input")
        return await self._media_processor.decode_audio(data, rate, max_seconds)

    def place(self, token_ids: Sequence[int], prepared: Sequence[PreparedItem]) -> tuple[list[int], Media]:
        assert self._media_processor is not None
        placed, media = place(token_ids, prepared, self._media_processor.processor)
        for item in media.items:
            if self._max_span is not None and item.length > self._max_span:
                raise RequestError(
                    f"One {item.modality} has {item.length} tokens, which are computed in one step, and a "
                    f"step holds {self._max_span}: use a smaller one, or raise max_num_batched_tokens"
                )
        return placed, self.joined(placed, media) if self.prefix else media

    def joined(self, token_ids: Sequence[int], media: Media) -> Media:
        """Return the media of a prompt of which all tokens (`token_ids`) attend to each other; raise a
        RequestError if the tokens do not fit into one step."""
        if self._max_span is not None and len(token_ids) > self._max_span:
            raise RequestError(
                f"The prompt has {len(token_ids)} tokens with bidirectional attention, which are computed in "
                f"one step, and a step holds {self._max_span}: shorten it, or raise max_num_batched_tokens"
            )
        return media.joined(token_ids)

    async def restore_arrays(self, media: Media, prepared: Sequence[PreparedItem]) -> None:
        """Set the arrays (encoder inputs) of the items in `media` that have none, by processing the
        `prepared` items again."""
        assert self._media_processor is not None
        arrays = await self._media_processor.process_again(prepared)
        for item in media.items:
            item.arrays = item.arrays or arrays.get(item.key)

    def rewrite_text(self, text: str) -> str:
        """Return the text to tokenize for a prompt with media: some processors rewrite it."""
        assert self._media_processor is not None
        processor = self._media_processor.processor
        return processor.rewrite_text(text) if rewrites_text(processor) else text

    def mark(self, modality: str, number: int) -> str:
        """Return the placeholder of an item in a text; `number` counts the items of its modality, from 1."""
        assert self._media_processor is not None
        return self._media_processor.processor.text(modality, number)


TEXT_ONLY = MediaInputReader("This model")


def _open_cache(section: MultimodalSection, cache: CacheKind, shared_memory: str) -> ProcessorCache:
    """Open the cache of processed items; `shared_memory` is the path of the memory that all API processes
    share."""
    if section.mm_processor_cache_type == "shm" and cache not in ("shm", "off"):
        log.warning(
            "mm_processor_cache_type=shm needs one API process and one engine on one machine: %s is used",
            "memory shared by the API processes" if cache == "shared" else "the cache type lru",
        )
    if cache == "shared":
        try:
            return SharedProcessorCache(SharedCache(shared_memory))
        except OSError as error:
            log.warning("This API process cannot open the shared media cache and uses its own: %s", error)
    arena = SharedArena(max_bytes(section), max_object_bytes(section)) if cache == "shm" else None
    return ProcessorCache(max_bytes(section), replicated=cache == "replicated", arena=arena)


def media_reader(
    config: EngineConfig,
    tokenizer: Tokenizer | None,
    *,
    cache: CacheKind = "processor",
    shared_memory: str = "",
) -> MediaInputReader:
    section, media = config.multimodal, config.checkpoint.facts.media
    name = config.model.served_model_name[0]
    limits = limits_of(section.limit_mm_per_prompt, language_model_only=section.language_model_only)
    uses_cross_attention = media is not None and media.num_cross_states > 0
    if media is None or tokenizer is None:  # placeholders are found by the tokenizer
        return MediaInputReader(
            name, limits=limits, uses_cross_attention=uses_cross_attention, lacks_tokenizer=media is not None
        )
    processor = PROCESSORS[media.family](config.checkpoint.path, media, tokenizer)
    processor_cache = _open_cache(section, cache, shared_memory)
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
        uses_cross_attention=uses_cross_attention,
        prefix=media.is_prefix,
        speech=_transcriber(config, processor, tokenizer) if media.transcribes else None,
    )


def _transcriber(config: EngineConfig, processor: Processor, tokenizer: Tokenizer) -> Transcriber | None:
    (max_samples,), max_len = processor.largest("audio"), config.model.max_model_len
    media, file = config.checkpoint.facts.media, config.checkpoint.path / "generation_config.json"
    if media is not None and not media.num_cross_states:
        most = processor.max_vectors("audio")
        return VoxtralTranscriber.of(tokenizer, max_len=max_len, max_samples=max_samples, num_vectors=most)
    is_english = file.is_file() and read_json(file).get("is_multilingual") is False
    return WhisperTranscriber.of(
        tokenizer,
        max_len=max_len,
        max_samples=max_samples,
        is_english=is_english,
        end=next(iter(config.checkpoint.eos_ids), None),
        max_first=max_initial_timestamp(config),
    )


# ---- multi_modal_data


def merge_encoder_decoder(prompt: Mapping[str, Any]) -> Mapping[str, Any]:
    """Merge encoder_prompt, which has only media, and decoder_prompt, if the prompt has them."""
    if "encoder_prompt" not in prompt and "decoder_prompt" not in prompt:
        return prompt
    encoder, decoder = prompt.get("encoder_prompt"), prompt.get("decoder_prompt")
    if not isinstance(encoder, Mapping) or encoder.get("prompt") or encoder.get("prompt_token_ids"):
        raise RequestError(
            "encoder_prompt must be a dict with multi_modal_data and no text", "encoder_prompt"
        )
    is_text = isinstance(decoder, str)
    text = decoder if isinstance(decoder, Mapping) else {"prompt" if is_text else _IDS: decoder}
    return {**{key: value for key, value in encoder.items() if key not in ("prompt", _IDS)}, **text}


def media_inputs(prompt: Mapping[str, Any]) -> list[MediaInput]:
    """Read the items of a prompt's `multi_modal_data`, with their `multi_modal_uuids`."""
    items: list[MediaInput] = []
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
                f"multi_modal_uuids has {len(names)} entries for {len(sources)} {modality}(s)",
                "multi_modal_uuids",
            )
        for at, (source, uuid) in enumerate(zip(sources, names, strict=True)):
            where = f"multi_modal_data[{modality!r}][{at}]"
            if source is None and uuid is None:
                raise RequestError(f"{where} is None and has no uuid", "multi_modal_data")
            item = MediaInput(modality, None, where, "multi_modal_data", uuid, prompt.get("cache_salt"))
            try:
                item.source = None if source is None else _READERS[modality](source)
            except RequestError as error:
                raise item.wrong(error) from None
            items.append(item)
    return items


def _mapping(name: str, mapping: Any) -> Mapping[str, Any]:
    if mapping is not None and not isinstance(mapping, Mapping):
        raise RequestError(f"{name} must be a dict by modality, not {type(mapping).__name__}", param=name)
    return {key: value for key, value in (mapping or {}).items() if value is not None}


def _several(modality: str, data: Any) -> list[Any]:
    """Return the items of one modality in a prompt's `multi_modal_data`, as a list. A list of frames is one
    video, and a list of numbers is one audio input."""
    if data is None:
        return []
    dims = getattr(data, "ndim", None)
    if dims is not None:
        batched = {"image": 4, "video": 5, "audio": 2}[modality]
        if modality == "image" and dims == 3 and not isinstance(data, np.ndarray):
            return [{"image_embeds": embeds} for embeds in data]  # a torch tensor, as in vLLM
        return list(data) if dims == batched else [data]
    if not isinstance(data, list):
        return [data]
    single = (Image.Image,) if modality == "video" else (int, float) if modality == "audio" else ()
    return [data] if data and isinstance(data[0], single) else data


def read_image(image: Any) -> Source:
    if isinstance(image, Image.Image):
        return to_rgb(image)
    if isinstance(image, Mapping):
        return read_embeds("image", image)
    numbers = _numbers(image)
    if numbers.ndim == 2 and np.issubdtype(numbers.dtype, np.floating):
        return {"embeds": numbers}
    if numbers.ndim == 3 and numbers.shape[0] in (1, 3, 4) and numbers.shape[2] not in (1, 3, 4):
        numbers = numbers.transpose(1, 2, 0)
    if numbers.ndim == 3 and numbers.shape[2] == 1:
        numbers = numbers[:, :, 0]
    if numbers.ndim not in (2, 3) or (numbers.ndim == 3 and numbers.shape[2] not in (3, 4)):
        raise RequestError(f"an array of shape {list(numbers.shape)} is not an image")
    if not numbers.size:
        raise RequestError("the image has no pixels")
    return to_rgb(Image.fromarray(_bytes(numbers)))


def _read_video(video: Any) -> Source:
    if isinstance(video, Mapping):
        return read_embeds("video", video)
    facts: Mapping[str, Any] = {}
    if isinstance(video, tuple) and len(video) == 2 and isinstance(video[1], Mapping):
        video, facts = video
    if isinstance(video, list | tuple):
        sizes = {np.shape(frame)[:2] for frame in video}
        if len(sizes) != 1:
            raise RequestError(f"the frames of a video must have one size, and these have {len(sizes)}")
        numbers = np.stack([np.asarray(read_image(frame)) for frame in video])
    else:
        numbers = _numbers(video)
        if numbers.ndim == 4 and numbers.shape[1] == 3 and numbers.shape[3] != 3:
            numbers = numbers.transpose(0, 2, 3, 1)
        numbers = _bytes(numbers)
    if numbers.ndim != 4 or numbers.shape[3] != 3 or not numbers.size:
        raise RequestError(
            f"an array of shape {list(numbers.shape)} is not a video [frames, height, width, 3]"
        )
    indices = tuple(int(index) for index in facts.get("frames_indices") or ())
    source_fps, total = facts.get("fps"), int(facts.get("total_num_frames") or 0)
    fps = source_fps * len(numbers) / total if source_fps and total else source_fps
    return Video(numbers, fps, total, indices, source_fps)


def _read_audio(audio: Any) -> Source:
    if isinstance(audio, Audio):
        return audio
    if isinstance(audio, Mapping):
        return read_embeds("audio", audio)
    samples, rate = audio if isinstance(audio, tuple) and len(audio) == 2 else (audio, 0)
    if not isinstance(rate, int | float) or rate < 0:
        raise RequestError(f"a sample rate of {rate!r:.40} is not supported")
    return checked(_numbers(samples), int(rate))


_READERS: dict[str, Callable[[Any], Source]] = {
    "image": read_image,
    "video": _read_video,
    "audio": _read_audio,
}


def read_embeds(modality: str, value: Any) -> dict[str, NDArray[Any]]:
    """Return the arrays of an item that is sent as embeddings, by name: `embeds`, and further values such as
    its grid. `value` has tensors, or base64 of saved tensors."""
    named = value if isinstance(value, Mapping) else {f"{modality}_embeds": value}
    tensors = {
        "embeds" if name in (f"{modality}_embeds", "embeds") else str(name): tensor_of(tensor, str(name))
        for name, tensor in named.items()
    }
    if "embeds" not in tensors:
        raise RequestError(f"{modality}_embeds are missing; there is {sorted(tensors)}", f"{modality}_embeds")
    with np.errstate(over="ignore"):
        tensors["embeds"] = tensors["embeds"].astype(np.float32, copy=False)
    if not np.isfinite(tensors["embeds"]).all():
        raise RequestError(f"{modality}_embeds have numbers that are not finite", f"{modality}_embeds")
    return tensors


def _numbers(data: Any) -> NDArray[Any]:
    """Convert a numpy array, a torch tensor or a list of numbers to a numpy array."""
    if hasattr(data, "detach"):
        data = data.detach().cpu()
    if not isinstance(data, np.ndarray) and not hasattr(data, "__array__") and not _is_list(data):
        raise RequestError(f"the type {type(data).__name__} is not supported")
    try:
        return as_numbers(data)
    except RequestError as error:
        raise RequestError(f"it {error}") from None


def _is_list(data: Any) -> bool:
    return isinstance(data, Iterable) and not isinstance(data, str | bytes | Mapping)


def _bytes(numbers: NDArray[Any]) -> NDArray[np.uint8]:
    """Convert pixel values to uint8; floats may be from 0 to 1 or from 0 to 255. Raise a RequestError if a
    value is not finite."""
    if numbers.dtype == np.uint8:
        return numbers
    if numbers.dtype.kind == "f":
        if not np.isfinite(numbers).all():
            raise RequestError("there are pixels that are not finite")
        numbers = numbers * 255 if numbers.max(initial=0) <= 1 else numbers
        numbers = np.rint(numbers)
    return numbers.clip(0, 255).astype(np.uint8)

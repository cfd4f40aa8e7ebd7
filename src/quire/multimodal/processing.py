"""Fetching, decoding and processing of the media items of a request."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from quire.config.env import MediaEnv
from quire.config.sections import MultimodalSection
from quire.data.cache_scope import CACHE_SCOPE
from quire.data.lru import Lru
from quire.data.multimodal import Arrays
from quire.errors import RequestError
from quire.multimodal.audio import decode_audio
from quire.multimodal.byte_budget import BudgetHold, BudgetShare, ByteBudget
from quire.multimodal.decode import DecodeLimits, decode
from quire.multimodal.fetch import Blob, Fetcher
from quire.multimodal.image_files import allow_pixels
from quire.multimodal.inputs import Base64Media, MediaInput, MediaKeys, MediaLink
from quire.multimodal.mel import Samples, resampled
from quire.multimodal.processor_cache import ProcessorCache
from quire.multimodal.processors import CountsVideoVectors, ProcessedItem, Processor, Video
from quire.system.tasks import cancel_all

T = TypeVar("T")
Options = Mapping[str, Any]

_AT_ONCE = 16
"""Maximum number of images, videos and audio of one request that are processed concurrently."""
_REQUESTS = 4
"""Number of requests that may have the maximum of media bytes in memory at once; further requests wait."""
_LONG = 1 << 17
"""Minimum number of characters of a text for which its digest is computed in a thread."""
_TEXTS_BYTES, _TEXT_BYTES = 16 << 20, 512
"""Maximum bytes of the cache of known texts, and estimated bytes of an entry. Only digests are cached."""


@dataclass(slots=True)
class PreparedItem:
    """A processed image, video or audio with its cache key."""

    modality: str
    key: bytes
    processed: ProcessedItem
    raw: "RawItem | None" = None
    """The unprocessed item, to process again if the engine core, which alone has the arrays, evicts them."""


class RawItem(NamedTuple):
    """An unprocessed image, video or audio with its mm_processor_kwargs and media_io_kwargs."""

    item: MediaInput
    arguments: Options
    options: Options


class KnownText(NamedTuple):
    """Entry of the cache of data: urls and base64 texts that clients sent before: it names the item of the
    text, which then need not be decoded again."""

    name: bytes
    """Name of the item in the processor cache."""
    num_bytes: int
    """Size in bytes of the decoded text."""


class EqualItems:
    """The items of one request by their name in the processor cache, so that equal items are processed
    once."""

    def __init__(self) -> None:
        self._locks: dict[bytes, asyncio.Lock] = {}
        self.processed: dict[bytes, tuple[bytes, ProcessedItem]] = {}
        """Cache key and processed item, by name."""

    def lock(self, name: bytes) -> asyncio.Lock:
        """Return the lock under which the item of this name is processed."""
        return self._locks.setdefault(name, asyncio.Lock())


class MediaProcessor:
    """Fetches, decodes and processes items in threads. A process has one instance per model."""

    def __init__(
        self,
        processor: Processor,
        section: MultimodalSection,
        env: MediaEnv,
        processor_cache: ProcessorCache | None = None,
        *,
        max_tokens: int | None = None,
    ) -> None:
        """Build the processor. `max_tokens` is the maximum number of placeholder tokens of a prompt, beyond
        which it raises a RequestError; None: no limit."""
        self.processor = processor
        self.processor_cache = ProcessorCache(0) if processor_cache is None else processor_cache
        self._max_tokens = max_tokens
        self._threads = ThreadPoolExecutor(env.media_loading_thread_count, thread_name_prefix="media")
        self._fetcher = Fetcher(
            env,
            self._threads,
            allowed_domains=section.allowed_media_domains,
            allowed_path=section.allowed_local_media_path,
        )
        self._keys = MediaKeys(section.mm_hasher_algorithm)
        self._texts: Lru[KnownText] = Lru(_TEXTS_BYTES)
        """Items that were sent as a data: url or base64, by the digest of the text, so that known texts are
        not decoded again."""
        self._reading, self._arguments = section.media_io_kwargs, section.mm_processor_kwargs
        self._max_pixels, self._max_bytes = env.max_image_pixels, int(env.media_max_mb * 2**20)
        self._fetching = ByteBudget(_REQUESTS * self._max_bytes)
        self._decoding = ByteBudget(_REQUESTS * self._max_bytes)
        """Budget of bytes for decoding, apart from the budget for fetching, so that they cannot deadlock."""
        allow_pixels(self._max_pixels)

    def prepare_sync(
        self, items: Sequence[MediaInput], arguments: Options | None = None, reading: Options | None = None
    ) -> list[PreparedItem]:
        """Run `prepare` and block until it ends, whether or not an event loop runs in this thread."""
        context = copy_context()
        with ThreadPoolExecutor(1) as waiter:
            work = waiter.submit(lambda: context.run(asyncio.run, self.prepare(items, arguments, reading)))
            return work.result()

    async def prepare(
        self, items: Sequence[MediaInput], arguments: Options | None = None, reading: Options | None = None
    ) -> list[PreparedItem]:
        """Fetch, decode and process the items of one prompt, and return them in order. `arguments` are
        mm_processor_kwargs, `reading` are media_io_kwargs; both override those of the server. If an item
        fails, the error names it, and the other items are cancelled."""
        (prepared,) = await self.prepare_each([items], arguments, reading)
        return prepared

    async def prepare_each(
        self,
        prompts: Sequence[Sequence[MediaInput]],
        arguments: Options | None = None,
        reading: Options | None = None,
    ) -> list[list[PreparedItem]]:
        """Fetch, decode and process the items of several prompts of one request, as `prepare` does."""
        merged = {**self._arguments, **(arguments or {})}
        for item in chain.from_iterable(prompts):
            item.scope = CACHE_SCOPE.get()
        slots, share, equal_items = asyncio.Semaphore(_AT_ONCE), BudgetShare(self._max_bytes), EqualItems()
        num_tokens = [0] * len(prompts)

        async def prepare_one(prompt: int, item: MediaInput) -> PreparedItem:
            async with slots:
                with self._fetching.hold(share) as hold:
                    raw = RawItem(item, merged, self._options(item.modality, reading))
                    ready = await self._prepare_item(raw, hold, equal_items)
            num_tokens[prompt] += len(ready.processed.token_ids)
            if self._max_tokens is not None and num_tokens[prompt] > self._max_tokens:
                raise RequestError(
                    f"{item.place}: the media of the prompt have at least {num_tokens[prompt]} placeholder "
                    f"tokens, and this model's maximum context length is {self._max_tokens} tokens",
                    "input_tokens",
                )
            return ready

        tasks = [
            asyncio.create_task(prepare_one(at, item)) for at, items in enumerate(prompts) for item in items
        ]
        try:
            prepared = iter(await asyncio.gather(*tasks))
        finally:
            await cancel_all(tasks)
        return [[next(prepared) for _ in items] for items in prompts]

    def _options(self, modality: str, reading: Options | None) -> Options:
        options = (reading or {}).get(modality) or {}
        if not isinstance(options, Mapping):
            raise RequestError(f"media_io_kwargs: {modality} must be an object", param="media_io_kwargs")
        return {**(self._reading.get(modality) or {}), **options}

    async def _prepare_item(self, raw: RawItem, hold: BudgetHold, equal_items: EqualItems) -> PreparedItem:
        try:
            text = await self._digest(raw)
            known = None if text is None else self._texts.get(text)
            if known is None:
                raw, name = await self._name_item(raw, hold)
            else:
                name = known.name
            async with equal_items.lock(name):
                result = self.processor_cache.find(name) or equal_items.processed.get(name)
                if result is None:
                    key, processed = await self._process_item(name, raw, hold)
                    processed = await self._in_thread(self.processor_cache.put, name, key, processed)
                    result = equal_items.processed[name] = key, processed
                elif known is not None:
                    hold.count(known.num_bytes)
            if text is not None and known is None:
                self._texts.put(text, KnownText(name, hold.num_bytes), _TEXT_BYTES)
        except RequestError as error:
            raise raw.item.wrong(error) from None
        key, processed = result
        is_here = processed.arrays is not None or processed.stored is not None
        return PreparedItem(raw.item.modality, key, processed, None if is_here else raw)

    async def _digest(self, raw: RawItem) -> bytes | None:
        """Return a digest of the text of an item that was sent as a data: url or base64; None for other
        items, or if there is no cache."""
        text = raw.item.text
        if text is None or not self.processor_cache.is_open:
            return None
        return self._keys.of(*raw) if len(text) < _LONG else await self._in_thread(self._keys.of, *raw)

    async def _name_item(self, raw: RawItem, hold: BudgetHold) -> tuple[RawItem, bytes]:
        """Return the item and its name in the processor cache, a hash. For an item without a uuid, the
        content is loaded first, since the name is computed from it."""
        if raw.item.uuid is None:
            raw = raw._replace(item=await self._load_content(raw.item, hold))
        return raw, await self._in_thread(self._keys.of, *raw)

    async def _process_item(self, name: bytes, raw: RawItem, hold: BudgetHold) -> tuple[bytes, ProcessedItem]:
        """Load, decode and process an item; return its cache key and the processed item."""
        item = await self._load_content(raw.item, hold)
        processed = await self._in_thread(self._decode_and_process, item, raw.arguments, raw.options)
        return (name if item.uuid is None else self._keys.fitted(name, processed)), processed

    async def process_again(self, prepared: Sequence[PreparedItem]) -> dict[bytes, Arrays]:
        """Process again the items whose arrays the engine core has evicted; return the arrays by cache
        key."""
        share = BudgetShare(self._max_bytes)

        async def process_one(known_key: bytes, raw: RawItem) -> Arrays | None:
            try:
                with self._fetching.hold(share) as hold:
                    raw, name = await self._name_item(raw, hold)
                    key, processed = await self._process_item(name, raw, hold)
                if key != known_key:
                    raise RequestError(
                        f"the content of the uuid {raw.item.uuid!r:.80} is not what was sent with it before"
                    )
                return processed.arrays
            except RequestError as error:
                raise raw.item.wrong(error) from None

        raws = {item.key: item.raw for item in prepared if item.raw is not None}
        results = await asyncio.gather(*(process_one(key, raw) for key, raw in raws.items()))
        return {key: arrays for key, arrays in zip(raws, results, strict=True) if arrays is not None}

    async def decode_audio(self, data: bytes, rate: int, max_seconds: float) -> Samples:
        """Decode an audio file to mono samples at `rate` samples per second. Raise a RequestError if it is
        longer than `max_seconds`."""

        def decode_samples() -> Samples:
            with self._decoding.hold() as hold:
                sound = decode_audio(data, hold.take_blocking)
                if len(sound.samples) > max_seconds * sound.rate:
                    raise RequestError(
                        f"the audio is {len(sound.samples) / sound.rate:.1f} seconds long, and "
                        f"{max_seconds:g} are the maximum: send it in parts"
                    )
                return resampled(sound, rate, int(max_seconds * rate))

        return await self._in_thread(decode_samples)

    async def _load_content(self, item: MediaInput, hold: BudgetHold) -> MediaInput:
        """Return the item with the content of its url or base64 text. The bytes are reserved through
        `hold`."""
        source = item.source
        if isinstance(source, MediaLink):
            source = await self._fetcher.fetch(source.url, item.modality, hold)
        elif isinstance(source, Base64Media):
            await hold.take(len(source.text) // 4 * 3)
            source = Blob((await self._in_thread(self._fetcher.decode_base64, source.text),))
        return replace(item, source=source)

    def _decode_and_process(self, item: MediaInput, arguments: Options, options: Options) -> ProcessedItem:
        content = item.source
        if content is None:
            raise RequestError(f"there is no content, and nothing is cached for the uuid {item.uuid!r:.80}")
        if isinstance(content, dict):
            return self.processor.process_embeds(item.modality, content)
        with self._decoding.hold() as hold:
            if isinstance(content, Blob):
                check = partial(self._check_video, arguments)
                limits = DecodeLimits(self._max_pixels, check, hold.take_blocking)
                content = decode(item.modality, content, options, limits)
            assert not isinstance(content, MediaLink | Base64Media)
            return self.processor.process(item.modality, content, arguments)

    def _check_video(self, arguments: Options, video: Video) -> None:
        """Raise a RequestError for a video with more tokens than a prompt may have, before it is decoded."""
        if self._max_tokens is None or not isinstance(self.processor, CountsVideoVectors):
            return
        count = self.processor.num_vectors(video, arguments)
        if count > self._max_tokens:
            frames, height, width, _ = video.frames.shape
            raise RequestError(
                f"{frames} frames of {width} x {height} pixels need at least {count} tokens, and this "
                f"model's maximum context length is {self._max_tokens} tokens: set a smaller num_frames of "
                "media_io_kwargs.video",
                "input_tokens",
            )

    async def _in_thread(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: work(*args))

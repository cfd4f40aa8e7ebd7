"""Kitchen: items as users bring them become what a tower reads."""

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
from quire.multimodal.audio import decode_sound
from quire.multimodal.byte_budget import BudgetHold, BudgetShare, ByteBudget
from quire.multimodal.decode import DecodeLimits, decode
from quire.multimodal.fetch import Blob, Fetcher
from quire.multimodal.image_files import allow_pixels
from quire.multimodal.inputs import Base64Media, MediaInput, MediaKeys, MediaLink
from quire.multimodal.mel import Samples, resampled
from quire.multimodal.processor_cache import ProcessorCache
from quire.multimodal.processors import Foresees, ProcessedItem, Processor, Video
from quire.system.tasks import ended

T = TypeVar("T")
Options = Mapping[str, Any]

_AT_ONCE = 16
"""Items of one prompt that are on their way at the same time."""
_REQUESTS = 4
"""That may have as many bytes of media on their way as there may be; others wait."""
_LONG = 1 << 17
"""Characters whose digest takes longer than it takes to hand them to a thread."""
_TEXTS_BYTES, _TEXT_BYTES = 16 << 20, 512
"""For all texts that are known, and for one of them: of each a digest is kept."""


@dataclass(slots=True)
class PreparedItem:
    """An item that is ready for the prompt, and what it is known by."""

    modality: str
    key: bytes
    processed: ProcessedItem
    raw: "RawItem | None" = None
    """What it is made of, where its arrays are elsewhere, and may be lost there."""


class RawItem(NamedTuple):
    """An item, and how it is read."""

    item: MediaInput
    arguments: Options
    options: Options


class KnownText(NamedTuple):
    """An item that came as a text before."""

    name: bytes
    """What it is looked up by."""
    num_bytes: int
    """Of its content."""


class EqualItems:
    """The items of one prompt by what they are looked up by: those that are the same are made once."""

    def __init__(self) -> None:
        self._locks: dict[bytes, asyncio.Lock] = {}
        self.made: dict[bytes, tuple[bytes, ProcessedItem]] = {}
        """With their keys."""

    def alone(self, name: bytes) -> asyncio.Lock:
        """Who holds it makes it."""
        return self._locks.setdefault(name, asyncio.Lock())


class MediaProcessor:
    """Fetches items, and has them decoded and processed in threads. One for a model and a process."""

    def __init__(
        self,
        processor: Processor,
        section: MultimodalSection,
        env: MediaEnv,
        processor_cache: ProcessorCache | None = None,
        *,
        max_tokens: int | None = None,
    ) -> None:
        """The items of a prompt may stand for `max_tokens`; None: for any number."""
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
        """What data: urls and the like stood for, by their digest: those that are known are not decoded."""
        self._reading, self._arguments = section.media_io_kwargs, section.mm_processor_kwargs
        self._max_pixels, self._max_bytes = env.max_image_pixels, int(env.media_max_mb * 2**20)
        self._room = ByteBudget(_REQUESTS * self._max_bytes)
        self._decoding = ByteBudget(_REQUESTS * self._max_bytes)
        """For what is decoded. Its own: what takes of it waits for nothing that holds some of the other."""
        allow_pixels(self._max_pixels)

    def prepare_now(
        self, given: Sequence[MediaInput], arguments: Options | None = None, reading: Options | None = None
    ) -> list[PreparedItem]:
        """`prepare` for those who wait for it, whether a loop runs in their thread or not."""
        context = copy_context()
        with ThreadPoolExecutor(1) as waiter:
            work = waiter.submit(lambda: context.run(asyncio.run, self.prepare(given, arguments, reading)))
            return work.result()

    async def prepare(
        self, given: Sequence[MediaInput], arguments: Options | None = None, reading: Options | None = None
    ) -> list[PreparedItem]:
        """In the order of `given`. `arguments` are mm_processor_kwargs, `reading` are media_io_kwargs, each
        beside those of the server. An error of one item, which it names, ends the work on all."""
        (found,) = await self.prepare_each([given], arguments, reading)
        return found

    async def prepare_each(
        self,
        prompts: Sequence[Sequence[MediaInput]],
        arguments: Options | None = None,
        reading: Options | None = None,
    ) -> list[list[PreparedItem]]:
        """The same of several prompts of one request."""
        told = {**self._arguments, **(arguments or {})}
        for item in chain.from_iterable(prompts):
            item.scope = CACHE_SCOPE.get()
        places, share, twins = asyncio.Semaphore(_AT_ONCE), BudgetShare(self._max_bytes), EqualItems()
        num_tokens = [0] * len(prompts)

        async def one(prompt: int, item: MediaInput) -> PreparedItem:
            async with places:
                with self._room.hold(share) as hold:
                    raw = RawItem(item, told, self._options(item.modality, reading))
                    ready = await self._one(raw, hold, twins)
            num_tokens[prompt] += len(ready.processed.token_ids)
            if self._max_tokens is not None and num_tokens[prompt] > self._max_tokens:
                raise RequestError(
                    f"{item.place}: with it the media of the prompt stand for at least {num_tokens[prompt]} "
                    f"tokens, and this model's maximum context length is {self._max_tokens} tokens",
                    "input_tokens",
                )
            return ready

        tasks = [asyncio.create_task(one(at, item)) for at, given in enumerate(prompts) for item in given]
        try:
            found = iter(await asyncio.gather(*tasks))
        finally:
            await ended(tasks)
        return [[next(found) for _ in given] for given in prompts]

    def _options(self, modality: str, reading: Options | None) -> Options:
        asked = (reading or {}).get(modality) or {}
        if not isinstance(asked, Mapping):
            raise RequestError(f"media_io_kwargs: {modality} must be an object", param="media_io_kwargs")
        return {**(self._reading.get(modality) or {}), **asked}

    async def _one(self, raw: RawItem, hold: BudgetHold, twins: "EqualItems") -> PreparedItem:
        try:
            text = await self._digest(raw)
            known = None if text is None else self._texts.get(text)
            if known is None:
                raw, name = await self._named(raw, hold)
            else:
                name = known.name
            async with twins.alone(name):
                found = self.processor_cache.find(name) or twins.made.get(name)
                if found is None:
                    key, processed = await self._made(name, raw, hold)
                    processed = await self._in_thread(self.processor_cache.keep, name, key, processed)
                    found = twins.made[name] = key, processed
                elif known is not None:
                    hold.count(known.num_bytes)
            if text is not None and known is None:
                self._texts.put(text, KnownText(name, hold.num_bytes), _TEXT_BYTES)
        except RequestError as error:
            raise raw.item.wrong(error) from None
        key, processed = found
        is_here = processed.arrays is not None or processed.stored is not None
        return PreparedItem(raw.item.modality, key, processed, None if is_here else raw)

    async def _digest(self, raw: RawItem) -> bytes | None:
        """Of the text that an item came as, and of how it is read; None: it is known by something else."""
        text = raw.item.text
        if text is None or not self.processor_cache.is_open:
            return None
        return self._keys.of(*raw) if len(text) < _LONG else await self._in_thread(self._keys.of, *raw)

    async def _named(self, raw: RawItem, hold: BudgetHold) -> tuple[RawItem, bytes]:
        """With its content at hand, unless it has a uuid; and what it is looked up by."""
        if raw.item.uuid is None:
            raw = raw._replace(item=await self._brought(raw.item, hold))
        return raw, await self._in_thread(self._keys.of, *raw)

    async def _made(self, name: bytes, raw: RawItem, hold: BudgetHold) -> tuple[bytes, ProcessedItem]:
        """With the key of the item, out of what it is looked up by."""
        item = await self._brought(raw.item, hold)
        processed = await self._in_thread(self._processed, item, raw.arguments, raw.options)
        return (name if item.uuid is None else self._keys.fitted(name, processed)), processed

    async def make_again(self, prepared: Sequence[PreparedItem]) -> dict[bytes, Arrays]:
        """The arrays by key, of those whose arrays were elsewhere."""

        share = BudgetShare(self._max_bytes)

        async def one(wanted: bytes, raw: RawItem) -> Arrays | None:
            try:
                with self._room.hold(share) as hold:
                    raw, name = await self._named(raw, hold)
                    key, processed = await self._made(name, raw, hold)
                if key != wanted:
                    raise RequestError(
                        f"what came with the uuid {raw.item.uuid!r:.80} is not what it stood for"
                    )
                return processed.arrays
            except RequestError as error:
                raise raw.item.wrong(error) from None

        raws = {each.key: each.raw for each in prepared if each.raw is not None}
        made = await asyncio.gather(*(one(key, raw) for key, raw in raws.items()))
        return {key: arrays for key, arrays in zip(raws, made, strict=True) if arrays is not None}

    async def hear(self, data: bytes, rate: int, max_seconds: float) -> Samples:
        """A file of sound as samples at this rate."""

        def heard() -> Samples:
            with self._decoding.hold() as hold:
                sound = decode_sound(data, hold.take_here)
                if len(sound.samples) > max_seconds * sound.rate:
                    raise RequestError(
                        f"the sound is {len(sound.samples) / sound.rate:.1f} seconds long, and "
                        f"{max_seconds:g} are the most: send it in parts"
                    )
                return resampled(sound, rate, int(max_seconds * rate))

        return await self._in_thread(heard)

    async def _brought(self, item: MediaInput, hold: BudgetHold) -> MediaInput:
        """The item with its content at hand, for which it takes room."""
        source = item.source
        if isinstance(source, MediaLink):
            source = await self._fetcher.fetch(source.url, item.modality, hold)
        elif isinstance(source, Base64Media):
            await hold.take(len(source.text) // 4 * 3)
            source = Blob((await self._in_thread(self._fetcher.decode_base64, source.text),))
        return replace(item, source=source)

    def _processed(self, item: MediaInput, arguments: Options, options: Options) -> ProcessedItem:
        content = item.source
        if content is None:
            raise RequestError(f"there is no content, and nothing is kept of the uuid {item.uuid!r:.80}")
        if isinstance(content, dict):
            return self.processor.process_embeds(item.modality, content)
        with self._decoding.hold() as hold:
            if isinstance(content, Blob):
                check = partial(self._check_video, arguments)
                limits = DecodeLimits(self._max_pixels, check, hold.take_here)
                content = decode(item.modality, content, options, limits)
            assert not isinstance(content, MediaLink | Base64Media)
            return self.processor.process(item.modality, content, arguments)

    def _check_video(self, arguments: Options, video: Video) -> None:
        """Before it is decoded: one that has no place in a prompt may take all memory."""
        if self._max_tokens is None or not isinstance(self.processor, Foresees):
            return
        count = self.processor.num_vectors(video, arguments)
        if count > self._max_tokens:
            frames, height, width, _ = video.frames.shape
            raise RequestError(
                f"{frames} frames of {width} x {height} pixels stand for at least {count} tokens, and this "
                f"model's maximum context length is {self._max_tokens} tokens: ask for fewer by num_frames "
                "of media_io_kwargs.video",
                "input_tokens",
            )

    async def _in_thread(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: work(*args))

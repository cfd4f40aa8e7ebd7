"""Kitchen: items as users bring them become what a tower reads."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from quire.config.env import MediaEnv
from quire.config.sections import MultimodalSection
from quire.errors import RequestError
from quire.multimodal.decode import decode
from quire.multimodal.families import Processed, Processor
from quire.multimodal.fetch import Blob, Fetcher
from quire.multimodal.given import Base64, Given, Keys, Link
from quire.multimodal.image_files import allow_pixels

T = TypeVar("T")
Options = Mapping[str, Any]

_AT_ONCE = 16
"""Items of one prompt that are on their way at the same time."""


@dataclass(slots=True)
class Prepared:
    """An item that is ready for the prompt, and what it is known by."""

    modality: str
    key: bytes
    processed: Processed


class Kitchen:
    """Fetches items, and has them decoded and processed in threads. One for a model and a process."""

    def __init__(
        self,
        processor: Processor,
        section: MultimodalSection,
        env: MediaEnv,
        *,
        max_tokens: int | None = None,
    ) -> None:
        """The items of a prompt may stand for `max_tokens`; None: for any number."""
        self.processor = processor
        self._max_tokens = max_tokens
        self._threads = ThreadPoolExecutor(env.media_loading_thread_count, thread_name_prefix="media")
        self._fetcher = Fetcher(
            env,
            self._threads,
            allowed_domains=section.allowed_media_domains,
            allowed_path=section.allowed_local_media_path,
        )
        self._keys = Keys(section.mm_hasher_algorithm)
        self._reading, self._arguments = section.media_io_kwargs, section.mm_processor_kwargs
        self._max_pixels = env.max_image_pixels
        allow_pixels(self._max_pixels)

    def prepare_now(
        self, given: Sequence[Given], arguments: Options | None = None, reading: Options | None = None
    ) -> list[Prepared]:
        """`prepare` for those who wait for it, whether a loop runs in their thread or not."""
        with ThreadPoolExecutor(1) as waiter:
            return waiter.submit(lambda: asyncio.run(self.prepare(given, arguments, reading))).result()

    async def prepare(
        self, given: Sequence[Given], arguments: Options | None = None, reading: Options | None = None
    ) -> list[Prepared]:
        """In the order of `given`. `arguments` are mm_processor_kwargs, `reading` are media_io_kwargs, each
        beside those of the server. An error of one item, which it names, ends the work on all."""
        told = {**self._arguments, **(arguments or {})}
        places, num_tokens = asyncio.Semaphore(_AT_ONCE), 0

        async def one(item: Given) -> Prepared:
            nonlocal num_tokens
            async with places:
                ready = await self._one(item, told, self._options(item.modality, reading))
            num_tokens += len(ready.processed.token_ids)
            if self._max_tokens is not None and num_tokens > self._max_tokens:
                raise RequestError(
                    f"{item.place}: with it the media of the prompt stand for at least {num_tokens} tokens, "
                    f"and this model's maximum context length is {self._max_tokens} tokens",
                    "input_tokens",
                )
            return ready

        tasks = [asyncio.create_task(one(item)) for item in given]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _options(self, modality: str, reading: Options | None) -> Options:
        asked = (reading or {}).get(modality) or {}
        if not isinstance(asked, Mapping):
            raise RequestError(f"media_io_kwargs: {modality} must be an object", param="media_io_kwargs")
        return {**(self._reading.get(modality) or {}), **asked}

    async def _one(self, item: Given, arguments: Options, options: Options) -> Prepared:
        try:
            if item.uuid is None:
                item = await self._brought(item)
            key = await self._in_thread(self._keys.of, item, arguments, options)
            # What has been processed before is known by its key: nothing below need be done again.
            item = await self._brought(item)
            processed = await self._in_thread(self._processed, item, arguments, options)
            key = key if item.uuid is None else self._keys.fitted(key, processed)
        except RequestError as error:
            raise item.wrong(error) from None
        return Prepared(item.modality, key, processed)

    async def _brought(self, item: Given) -> Given:
        """The item with its content at hand."""
        source = item.source
        if isinstance(source, Link):
            source = await self._fetcher.fetch(source.url, item.modality)
        elif isinstance(source, Base64):
            source = Blob((await self._in_thread(self._fetcher.decode_base64, source.text),))
        return replace(item, source=source)

    def _processed(self, item: Given, arguments: Options, options: Options) -> Processed:
        content = item.source
        if content is None:
            raise RequestError(f"there is no content, and nothing is kept of the uuid {item.uuid!r:.80}")
        if isinstance(content, dict):
            return self.processor.process_embeds(item.modality, content)
        if isinstance(content, Blob):
            content = decode(item.modality, content, options, max_pixels=self._max_pixels)
        assert not isinstance(content, Link | Base64)
        return self.processor.process(item.modality, content, arguments)

    async def _in_thread(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: work(*args))

"""Backend that uses a server over its HTTP API."""

import argparse
import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from quire.remote.http import HttpClient
from quire.remote.openai import Chunk, bearer, models, stream
from quire.terminal import Emit

DEFAULT_URL = "http://localhost:8000/v1"


def api_url(url: str) -> str:
    """Return the URL of the API: a URL without a scheme or a path, such as `localhost:8000`, gets both."""
    url = url if "://" in url else f"http://{url}"
    return url if urlsplit(url).path.strip("/") else url.rstrip("/") + "/v1"


class ServerBackend:
    """Generates answers with a running OpenAI-compatible server, over HTTP."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._client = HttpClient(
            api_url(args.url or DEFAULT_URL), headers=bearer(args.api_key or os.environ.get("OPENAI_API_KEY"))
        )
        self.name: str = args.model_name or asyncio.run(self._first_model())
        self._options = {
            "model": self.name,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": args.max_tokens,
        }
        if args.temperature is not None:
            self._options["temperature"] = args.temperature

    def chat(self, messages: Sequence[Mapping[str, Any]], emit: Emit) -> int:
        return asyncio.run(self._answer("/chat/completions", {"messages": messages}, emit))

    def complete(self, prompt: str, emit: Emit) -> int:
        return asyncio.run(self._answer("/completions", {"prompt": prompt}, emit))

    async def _first_model(self) -> str:
        try:
            return (await models(self._client, "/models"))[0].id
        finally:
            self._client.close()

    async def _answer(self, path: str, fields: dict[str, Any], emit: Emit) -> int:
        count, num_reported = 0, None

        def on_chunk(chunk: Chunk) -> None:
            nonlocal count, num_reported
            if chunk.usage is not None:
                num_reported = chunk.usage.completion_tokens
            if text := chunk.text:
                count += 1
                emit(text)

        try:
            await stream(self._client, path, msgspec.json.encode(self._options | fields), on_chunk)
        finally:
            # Each answer has its own event loop, which a connection does not outlive.
            self._client.close()
        return count if num_reported is None else num_reported

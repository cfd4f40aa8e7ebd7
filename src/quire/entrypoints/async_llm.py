"""AsyncLLMEngine: an engine for programs with their own event loop; its cores run in child processes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from quire.config.args import EngineArgs
from quire.config.engine import EngineConfig
from quire.configure import configure
from quire.data.lora import LoRARequest
from quire.data.outputs import RequestOutput
from quire.data.params import SamplingParams
from quire.data.pooling import PoolingParams
from quire.data.pooling_outputs import PoolingRequestOutput
from quire.entrypoints.child_cores import private_engine
from quire.errors import EngineDead
from quire.frontend.checked_params import CheckedParams
from quire.frontend.engine import AsyncEngine
from quire.frontend.output_stream import OutputStream
from quire.frontend.outputs import AnyOutput
from quire.text.tokenizer import Tokenizer

T = TypeVar("T", bound=AnyOutput)


class AsyncLLMEngine:
    """Accepts requests and streams outputs. The cores start with the first call, on the caller's event
    loop."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._stack = AsyncExitStack()
        self._starting: asyncio.Task[AsyncEngine] | None = None
        self._ended = False

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **_: Any) -> "AsyncLLMEngine":
        """Build the engine from `EngineArgs`, or another object with its fields."""
        return cls(configure(engine_args.given(), usage="server"))

    async def _engine(self) -> AsyncEngine:
        if self._ended:
            raise EngineDead("this engine was shut down")
        if self._starting is None:
            self._starting = asyncio.create_task(
                self._stack.enter_async_context(private_engine(self.config)), name="quire-start"
            )
        return await asyncio.shield(self._starting)

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Yield outputs as they arrive, in the form of `sampling_params.output_kind`. Closing the iterator
        aborts the request."""
        engine = await self._engine()
        checked: SamplingParams | CheckedParams = sampling_params
        if sampling_params.structured_outputs is not None:  # its grammar may take long to compile
            checked = await asyncio.to_thread(engine.inputs.check, sampling_params, lora=lora_request)
        stream = engine.generate(
            await engine.inputs.of(lora_request).parse_beside(prompt),
            checked,
            request_id,
            priority=priority,
            lora=lora_request,
        )
        async for output in _outputs_of(stream, request_id):
            yield output

    async def encode(
        self,
        prompt: Any,
        pooling_params: PoolingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> AsyncIterator[PoolingRequestOutput[Any]]:
        """Yield the one output of a pooling model."""
        engine = await self._engine()
        stream = engine.encode(
            await engine.inputs.of(lora_request).parse_beside(prompt),
            pooling_params,
            request_id,
            priority=priority,
            lora=lora_request,
        )
        async for output in _outputs_of(stream, request_id):
            yield output

    async def get_tokenizer(self) -> Tokenizer | None:
        return (await self._engine()).tokenizer

    async def check_health(self) -> None:
        """Raise if the engine cannot answer."""
        (await self._engine()).check()

    async def reset_prefix_cache(self) -> bool:
        return await (await self._engine()).reset_prefix_cache()

    async def reset_mm_cache(self) -> None:
        await (await self._engine()).reset_mm_cache()

    async def aclose(self) -> None:
        """Stop the cores; running requests end with them."""
        self._ended = True
        if self._starting is not None:
            await asyncio.wait([self._starting])
            await self._stack.aclose()

    def shutdown(self) -> None:
        """Stop the cores without waiting; the event loop completes it."""
        self._ended = True
        if self._starting is not None:
            self._ending = asyncio.ensure_future(self.aclose())


async def _outputs_of(stream: OutputStream[T], request_id: str) -> AsyncIterator[T]:
    try:
        async for output in stream:
            output.request_id = request_id
            yield output
    finally:
        await stream.aclose()

"""MultiCoreEngine: engine cores in child processes, behind an engine that the caller steps."""

import asyncio
import atexit
import contextlib
import queue
import threading
import weakref
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from quire.config.engine import EngineConfig
from quire.data.lora import LoRARequest
from quire.data.outputs import RequestOutput
from quire.data.params import SamplingParams
from quire.data.pooling import PoolingParams
from quire.entrypoints.child_cores import private_engine
from quire.entrypoints.llm_control import LLMControl
from quire.errors import RequestError
from quire.frontend.checked_params import CheckedParams
from quire.frontend.engine import AsyncEngine
from quire.frontend.inputs import Prompt
from quire.frontend.output_stream import OutputStream
from quire.frontend.outputs import AnyOutput

T = TypeVar("T")


class MultiCoreEngine(LLMControl):
    """An engine with several cores, each in a process. The caller adds requests and calls `step()`
    repeatedly, which returns their outputs. The client of the cores runs on its own event loop in a thread,
    since the caller may have a loop already."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="quire-cores", daemon=True)
        self._thread.start()
        self._stack = contextlib.AsyncExitStack()
        self.close = weakref.finalize(self, _shut_down, self._loop, self._thread, self._stack)
        """Function that stops the cores; later calls do nothing."""
        self.close.atexit = False
        atexit.register(self.close)  # before multiprocessing joins its children
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._arrived: queue.SimpleQueue[tuple[str, AnyOutput | Exception]] = queue.SimpleQueue()
        try:
            self._engine: AsyncEngine = self._wait(self._stack.enter_async_context(private_engine(config)))
        except BaseException:
            self.close()
            raise
        self._operation = self._engine.operation
        self.inputs = self._engine.inputs
        self.tokenizer = self._engine.tokenizer
        self.max_model_len = self.inputs.max_model_len
        self.metrics = None if config.observability.disable_log_stats else self._engine.metrics

    def _wait(self, call: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | PoolingParams,
        *,
        priority: int = 0,
        add_special_tokens: bool = True,
        max_logprobs: int | None = None,
        lora_request: LoRARequest | None = None,
    ) -> None:
        """Validate and queue a prompt. If anything is invalid, nothing is queued."""
        if request_id in self._tasks:
            raise RequestError(f"request id {request_id!r} is in use")
        lora_request = self._operation.loaded_lora(lora_request)
        if not isinstance(prompt, Prompt):
            prompt = self.inputs.of(lora_request).parse(prompt, add_special_tokens=add_special_tokens)
        checked: PoolingParams | CheckedParams
        if isinstance(params, PoolingParams):
            checked = params
        else:  # here, not on the event loop: a grammar may take long to compile
            checked = self.inputs.check(params, lora=lora_request, max_logprobs=max_logprobs)

        async def begin() -> None:
            stream: OutputStream[Any]
            options: dict[str, Any] = {"priority": priority, "lora": lora_request}
            if isinstance(checked, PoolingParams):
                stream = self._engine.encode(prompt, checked, request_id, **options)
            else:
                stream = self._engine.generate(prompt, checked, request_id, **options)
            self._tasks[request_id] = asyncio.create_task(self._follow(request_id, stream))

        self._wait(begin())

    async def _follow(self, request_id: str, stream: OutputStream[Any]) -> None:
        try:
            async for output in stream:
                output.request_id = request_id
                self._arrived.put((request_id, output))
        except Exception as error:  # becomes the `error` of the request's last output
            self._arrived.put((request_id, error))
        finally:
            await stream.aclose()

    def abort_request(self, request_ids: Iterable[str] | str) -> list[AnyOutput]:
        """End one request or several early. Return an empty list: the requests have no last output."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        ended = [task for id in ids if (task := self._tasks.pop(id, None)) is not None]

        async def abort() -> None:
            for task in ended:
                task.cancel()
            await asyncio.gather(*ended, return_exceptions=True)

        self._wait(abort())
        return []

    def has_unfinished_requests(self) -> bool:
        return bool(self._tasks)

    def get_num_unfinished_requests(self) -> int:
        return len(self._tasks)

    @property
    def output_processor(self) -> "MultiCoreEngine":
        """Return the object with `has_unfinished_requests`, under vLLM's name."""
        return self

    def step(self) -> list[AnyOutput]:
        """Wait for at least one output and return all that have arrived; return none if no request is
        unfinished. The output of a failed request has its `error`."""
        if not self._tasks:
            return []
        outputs: list[AnyOutput] = []
        while not outputs:
            outputs += self._accept(*self._arrived.get())
        return outputs + self._take_arrived()

    def _take_arrived(self) -> list[AnyOutput]:
        outputs: list[AnyOutput] = []
        while not self._arrived.empty():
            outputs += self._accept(*self._arrived.get())
        return outputs

    def _accept(self, request_id: str, item: AnyOutput | Exception) -> list[AnyOutput]:
        if request_id not in self._tasks:
            return []  # the request was aborted
        if isinstance(item, Exception):
            output = RequestOutput(request_id, None, None, None, outputs=[], finished=True)
            output.error = item
            item = output
        if item.finished:
            del self._tasks[request_id]
        return [item]

    def sleep(self, level: int = 1, mode: str = "abort") -> list[AnyOutput]:
        """Put the engine to sleep, as `LLM.sleep` does; return the last outputs of the requests that end
        before it sleeps."""
        self._wait(self._operation.sleep(level, mode))
        if mode != "keep":
            self._wait(self._wait_for_tasks())
        return self._take_arrived()

    async def _wait_for_tasks(self) -> None:
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


def _shut_down(
    loop: asyncio.AbstractEventLoop, thread: threading.Thread, stack: contextlib.AsyncExitStack
) -> None:
    if threading.current_thread() is thread:  # called by the garbage collector in that thread
        loop.create_task(stack.aclose()).add_done_callback(lambda _: loop.stop())
        return
    asyncio.run_coroutine_threadsafe(stack.aclose(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()

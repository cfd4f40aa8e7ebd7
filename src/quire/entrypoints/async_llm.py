"""AsyncLLMEngine: an engine for programs with their own event loop; its cores run in child processes."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from quire.config.engine import EngineConfig
from quire.config.engine_args import EngineArgs
from quire.configure import configure
from quire.data.lora import LoRARequest
from quire.data.outputs import RequestOutput
from quire.data.params import SamplingParams
from quire.data.pooling import PoolingParams
from quire.data.pooling_outputs import PoolingRequestOutput
from quire.entrypoints.api_process import observe_by
from quire.entrypoints.child_cores import private_engine
from quire.entrypoints.llm_control import ConfigViews, transfer_info
from quire.errors import EngineDead
from quire.frontend.checked_params import CheckedParams
from quire.frontend.control import CoreControl
from quire.frontend.engine import AsyncEngine
from quire.frontend.output_stream import OutputStream
from quire.frontend.outputs import AnyOutput
from quire.frontend.tracing import PARENT
from quire.text.tokenizer import Tokenizer

T = TypeVar("T", bound=AnyOutput)


class AsyncLLMEngine(ConfigViews):
    """Asynchronous engine that streams the outputs of each request. The engine cores are child processes,
    which the first call of a method starts."""

    def __init__(self, config: EngineConfig, stat_loggers: Iterable[Callable[[Any, int], Any]] = ()) -> None:
        """Build the engine. Each function of `stat_loggers` makes a stat logger with vLLM's interface from
        the configuration and a data parallel rank."""
        self.config = config
        self._stat_loggers = {f"stat_loggers[{place}]": make for place, make in enumerate(stat_loggers)}
        self._stack = AsyncExitStack()
        self._starting: asyncio.Task[AsyncEngine] | None = None
        self._ended = False

    @classmethod
    def from_engine_args(
        cls, engine_args: EngineArgs, *, stat_loggers: Iterable[Any] | None = None, **_: Any
    ) -> "AsyncLLMEngine":
        """Build the engine from `EngineArgs`, or another object with its fields."""
        return cls(configure(engine_args.given(), usage="server"), stat_loggers or ())

    @classmethod
    def from_vllm_config(
        cls, vllm_config: Any, *, stat_loggers: Iterable[Any] | None = None, **_: Any
    ) -> "AsyncLLMEngine":
        """Build the engine from the result of `create_engine_config()` of vLLM's engine arguments."""
        return cls(vllm_config.engine_config, stat_loggers or ())

    async def _engine(self) -> AsyncEngine:
        if self._ended:
            raise EngineDead("this engine was shut down")
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(), name="quire-start")
        return await asyncio.shield(self._starting)

    async def _start(self) -> AsyncEngine:
        engine = await self._stack.enter_async_context(private_engine(self.config))
        ranks = list(range(self.config.parallel.data_parallel_size))
        observe_by(engine, self.config, ranks, self._stat_loggers)
        return engine

    async def _operation(self) -> CoreControl:
        return (await self._engine()).operation

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield outputs as they arrive, in the form of `sampling_params.output_kind`. Closing the iterator
        aborts the request. By default the request runs on the data parallel rank with the least load."""
        engine = await self._engine()
        lora_request = engine.operation.loaded_lora(lora_request)
        checked: SamplingParams | CheckedParams = sampling_params
        if sampling_params.structured_outputs is not None:  # its grammar may take long to compile
            checked = await asyncio.to_thread(engine.inputs.check, sampling_params, lora=lora_request)
        parsed = await engine.inputs.of(lora_request).parse_async(prompt)
        PARENT.set((trace_headers or {}).get("traceparent", ""))
        stream = engine.generate(
            parsed, checked, request_id, priority=priority, rank=data_parallel_rank, lora=lora_request
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
        lora_request = engine.operation.loaded_lora(lora_request)
        parsed = await engine.inputs.of(lora_request).parse_async(prompt)
        stream = engine.encode(parsed, pooling_params, request_id, priority=priority, lora=lora_request)
        async for output in _outputs_of(stream, request_id):
            yield output

    async def get_tokenizer(self) -> Tokenizer | None:
        return (await self._engine()).tokenizer

    async def check_health(self) -> None:
        """Raise EngineDead if an engine core is dead or hangs."""
        (await self._engine()).check()

    @property
    def errored(self) -> bool:
        """Return whether the engine was shut down, or an engine core is dead."""
        is_started = self._starting is not None and self._starting.done() and not self._starting.cancelled()
        if self._starting is None or not is_started or self._ended:
            return self._ended
        if self._starting.exception() is not None:
            return True
        try:
            self._starting.result().check()
        except EngineDead:
            return True
        return False

    is_stopped = errored

    @property
    def is_running(self) -> bool:
        return not self.errored

    @property
    def dead_error(self) -> EngineDead:
        """Return the error that callers raise if the engine is dead."""
        return EngineDead("the engine was shut down, or an engine core is dead")

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """Return the tasks of the model: `generate`, or those of a pooling model."""
        pooling = self.config.pooling
        return ("generate",) if pooling is None else pooling.tasks

    async def is_tracing_enabled(self) -> bool:
        return bool(self.config.observability.otlp_traces_endpoint)

    async def do_log_stats(self) -> None:
        """Do nothing: the engine cores log their statistics themselves."""

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        operation = await self._operation()
        return await operation.reset_prefix_cache(reset_running_requests, reset_connector)

    async def reset_mm_cache(self) -> None:
        await (await self._operation()).reset_mm_cache()

    async def reset_encoder_cache(self) -> bool:
        return await (await self._operation()).reset_encoder_cache()

    # ---- control

    @property
    def output_processor(self) -> "AsyncLLMEngine":
        """Return the object with `get_num_unfinished_requests`, under vLLM's name."""
        return self

    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests that have been given to the engine and have not ended."""
        is_started = self._starting is not None and self._starting.done() and not self._starting.cancelled()
        return self._starting.result().num_in_flight if self._starting is not None and is_started else 0

    def has_unfinished_requests(self) -> bool:
        return self.get_num_unfinished_requests() > 0

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """Abort the requests with these ids; their outputs end with the reason `abort`. `internal` has no
        effect: ids are always those of the caller."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        await (await self._operation()).abort(ids)

    async def wait_for_requests_to_drain(self, drain_timeout: int = 300) -> None:
        """Wait until no request is left; raise a TimeoutError after `drain_timeout` seconds."""
        async with asyncio.timeout(drain_timeout):
            while self.get_num_unfinished_requests():
                await asyncio.sleep(0.05)

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Release memory; see `LLM.sleep`. By `mode`, running requests are aborted, completed or kept as by
        `pause_generation`."""
        await (await self._operation()).sleep(level, mode)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Restore the memory that `sleep` released: all of it, or by `tags` the `weights` or the
        `kv_cache`."""
        await (await self._operation()).wake_up(tags)

    async def is_sleeping(self) -> bool:
        return await (await self._operation()).is_sleeping()

    async def start_profile(self, profile_prefix: str | None = None) -> None:
        """Start to profile the workers. Requires `profiler_config`."""
        await (await self._operation()).profile(True, profile_prefix)

    async def stop_profile(self) -> None:
        await (await self._operation()).profile(False)

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load a LoRA adapter before a request needs it; return True."""
        return await (await self._operation()).add_lora(lora_request)

    async def remove_lora(self, lora_id: int) -> bool:
        """Remove an adapter that `add_lora` has loaded when no request uses it any more; return whether there
        was one."""
        return await (await self._operation()).remove_lora(lora_id)

    async def list_loras(self) -> set[int]:
        """Return the ids of the adapters that `add_lora` has loaded."""
        return set((await self._operation()).loras)

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a public method of each worker, or a function with each worker as its argument; see
        `LLM.collective_rpc`."""
        return await (await self._operation()).collective_rpc(method, timeout, args, kwargs)

    async def pause_generation(
        self, *, mode: str = "abort", wait_for_inflight_requests: bool = False, clear_cache: bool = True
    ) -> None:
        """Pause the engine; new requests wait. By `mode`, running requests are aborted (`abort`), completed
        first (`wait`) or continued after `resume_generation` (`keep`). `clear_cache` drops cached prefixes,
        and kept requests compute their tokens again."""
        mode = "wait" if wait_for_inflight_requests else mode
        await (await self._operation()).pause(mode, clear_cache=clear_cache)

    async def resume_generation(self) -> None:
        await (await self._operation()).resume()

    async def is_paused(self) -> bool:
        return await (await self._operation()).is_paused()

    async def init_weight_transfer_engine(self, request: Any) -> None:
        """Set up the transfer of weights from a trainer; see `LLM.init_weight_transfer_engine`."""
        info = transfer_info(request, "init_info")
        await (await self._operation()).init_weight_transfer_engine(info)

    async def start_weight_update(self) -> None:
        await (await self._operation()).start_weight_update()

    async def update_weights(self, request: Any) -> None:
        """Receive new weights; see `LLM.update_weights`."""
        await (await self._operation()).update_weights(transfer_info(request, "update_info"))

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Apply the received weights as version `weight_version`, and drop the old cached prefixes."""
        await (await self._operation()).finish_weight_update(weight_version)

    async def update_weight_version(self, new_version: str) -> None:
        await (await self._operation()).update_weight_version(new_version)

    async def get_weight_version(self) -> str:
        return (await self._operation()).weight_version

    async def aclose(self) -> None:
        """Stop the engine cores and wait until they have ended; running requests fail."""
        self._ended = True
        if self._starting is not None:
            await asyncio.wait([self._starting])
            await self._stack.aclose()

    def shutdown(self) -> None:
        """Begin to stop the cores, without waiting until they have ended."""
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

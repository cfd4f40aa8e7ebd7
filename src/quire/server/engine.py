"""Protocols of the engine that the HTTP server uses. `frontend.engine.AsyncEngine` implements them."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeGuard

from quire.data.lora import AdapterFacts, LoRARequest
from quire.data.outputs import RequestOutput
from quire.data.params import SamplingParams
from quire.data.pooling import PoolingParams
from quire.data.pooling_outputs import PoolingOutput, PoolingRequestOutput
from quire.frontend.checked_params import CheckedParams
from quire.frontend.inputs import InputProcessor, Prompt
from quire.metrics.http import Exchange
from quire.metrics.keys import KeyAccount


class EngineFactsLike(Protocol):
    """Properties of the model and the engine, available after start-up."""

    @property
    def model_names(self) -> tuple[str, ...]: ...
    @property
    def vocab(self) -> int: ...
    @property
    def max_logprobs(self) -> int: ...
    @property
    def root(self) -> str: ...
    @property
    def default_sampling(self) -> dict[str, Any]: ...
    @property
    def chat_template(self) -> str | None: ...
    @property
    def version(self) -> str: ...
    @property
    def start_time(self) -> float: ...


class Outputs(Protocol):
    """Iterator over the outputs of one request. Closing it early aborts the request."""

    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...
    def __anext__(self) -> Awaitable[RequestOutput]: ...
    def aclose(self) -> Awaitable[None]: ...


class Pushed(Outputs, Protocol):
    """Outputs that can also be delivered by callback as soon as they arrive."""

    async def forward(
        self,
        reader: Callable[[RequestOutput], None],
        text_reader: Callable[[str, int], None] | None = None,
    ) -> None:
        """Call `reader` with each output. Text-only outputs, neither first nor last, may go to
        `text_reader`."""


def is_pushed(outputs: Outputs) -> TypeGuard[Pushed]:
    """Whether the outputs support `forward`. `isinstance` on a protocol would take 20 us."""
    return hasattr(outputs, "forward")


class PooledOutputs(Protocol):
    """The one output of a request to a pooling model. Closing it early aborts the request."""

    def __anext__(self) -> Awaitable[PoolingRequestOutput[PoolingOutput]]: ...
    def aclose(self) -> Awaitable[None]: ...


class Operations(Protocol):
    """Operator calls, which apply to all engine cores."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """Return the engine's settings by section and name."""
        ...

    async def pause(self, mode: str = "abort", *, clear_cache: bool = True) -> None: ...
    async def resume(self) -> None: ...
    async def is_paused(self) -> bool: ...
    async def sleep(self, level: int = 1, mode: str = "abort") -> None: ...
    async def wake_up(self, tags: list[str] | None = None) -> None: ...
    async def is_sleeping(self) -> bool: ...
    async def collective_rpc(
        self, method: str, timeout: float | None, args: list[Any], kwargs: dict[str, Any]
    ) -> list[Any]: ...
    async def profile(self, start: bool, prefix: str | None = None) -> None: ...
    async def abort(self, names: list[str]) -> int: ...
    async def reset_encoder_cache(self) -> bool: ...


class Engine(Protocol):
    """The engine as the routes use it."""

    @property
    def operation(self) -> Operations: ...

    @property
    def facts(self) -> EngineFactsLike: ...
    @property
    def inputs(self) -> InputProcessor:
        """Return the input processor, with the effective limits: `max_model_len` may be fitted to the
        memory."""
        ...

    @property
    def num_in_flight(self) -> int: ...
    def check(self) -> None: ...
    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | CheckedParams,
        request_id: str,
        *,
        priority: int = 0,
        rank: int | None = None,
        timed: bool = False,
        account: KeyAccount | None = None,
        lora: LoRARequest | None = None,
    ) -> Outputs:
        """Submit a request; raise RequestError at once if it is invalid. Outputs may carry an internal id.
        `rank` selects the engine core. `timed` measures the request's share of the steps. Its tokens are
        charged to `account`. `lora` is the adapter to use."""
        ...

    def encode(
        self,
        prompt: Prompt,
        params: PoolingParams,
        request_id: str,
        *,
        priority: int = 0,
        rank: int | None = None,
        account: KeyAccount | None = None,
        lora: LoRARequest | None = None,
    ) -> PooledOutputs:
        """Submit a request to a pooling model, like `generate`."""
        ...

    async def add_adapter(self, lora: LoRARequest) -> AdapterFacts:
        """Load an adapter; raise RequestError if it is invalid."""
        ...

    async def remove_adapter(self, name: str) -> bool:
        """Unload an adapter once no request uses it. Return whether it was loaded."""
        ...

    async def reset_mm_cache(self) -> None:
        """Clear the cache of processed multimodal items."""
        ...

    async def reset_prefix_cache(self, running: bool = False) -> bool:
        """Clear the prefix cache; with `running`, requests that hold blocks are preempted and recomputed."""
        ...

    def metrics_text(self) -> str: ...
    def count_exchange(self, exchange: Exchange) -> None: ...
    def snapshot(self) -> dict[str, Any]: ...

"""What the HTTP wing asks of an engine. `frontend.engine.AsyncEngine` is one; tests bring their own."""

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
    """What is known of the model once the engine is up."""

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
    """The outputs of one request as they come. Closing it early aborts the request."""

    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...
    def __anext__(self) -> Awaitable[RequestOutput]: ...
    def aclose(self) -> Awaitable[None]: ...


class Pushed(Outputs, Protocol):
    """Outputs that can also be handed over in the moment they come."""

    async def forward(
        self,
        reader: Callable[[RequestOutput], None],
        text_reader: Callable[[str, int], None] | None = None,
    ) -> None:
        """What is nothing but text, neither first nor last, may go to `text_reader`."""


def is_pushed(outputs: Outputs) -> TypeGuard[Pushed]:
    """As `isinstance` says, which looks at protocols for 20 us."""
    return hasattr(outputs, "forward")


class PooledOutputs(Protocol):
    """The one output of a request to a pooling model. Closing it early aborts the request."""

    def __anext__(self) -> Awaitable[PoolingRequestOutput[PoolingOutput]]: ...
    def aclose(self) -> Awaitable[None]: ...


class Operations(Protocol):
    """What operators ask of an engine, all of its cores."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """By section and name."""
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
    """An engine as the routes use it."""

    @property
    def operation(self) -> Operations: ...

    @property
    def facts(self) -> EngineFactsLike: ...
    @property
    def inputs(self) -> InputProcessor:
        """Knows the limits that hold: `max_model_len` may have been fitted to the memory."""
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
        """A RequestError is raised by the call itself. Outputs may carry an id of the engine's own. With a
        `rank` it goes to that core and no other; `timed`, its share of the steps is counted. Its tokens are
        of the `account`'s share. `lora`: the adapter that answers it."""
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
        """As `generate`, of a pooling model."""
        ...

    async def add_adapter(self, lora: LoRARequest) -> AdapterFacts:
        """Read it. A RequestError says what is wrong with it."""
        ...

    async def remove_adapter(self, name: str) -> bool:
        """Over when no request uses it any more. Whether it was known."""
        ...

    async def reset_mm_cache(self) -> None:
        """Forget the media that were processed."""
        ...

    async def reset_prefix_cache(self, running: bool = False) -> bool:
        """`running`: the requests that hold some are computed from their beginning again."""
        ...

    def metrics_text(self) -> str: ...
    def count_exchange(self, exchange: Exchange) -> None: ...
    def snapshot(self) -> dict[str, Any]: ...

"""Stream of one request's outputs from the engine to its reader, and the output buffer for a slow reader."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Generic, Protocol, TypeGuard, TypeVar, cast

from quire.data.outputs import CompletionOutput, PromptLogprobs, RequestOutput, SampleLogprobs
from quire.errors import QuireError

Out = TypeVar("Out", bound=Any)
TextReader = Callable[[str, int], None]
"""Callback that gets a text delta and its number of tokens."""


class Outputs(Protocol):
    """Outputs of one or several requests. Closing them early aborts the requests."""

    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...
    def __anext__(self) -> Awaitable[RequestOutput]: ...
    def aclose(self) -> Awaitable[None]: ...


class Pushed(Outputs, Protocol):
    """Outputs that can also be passed to a callback as soon as they arrive; see `OutputStream.forward`."""

    async def forward(
        self, reader: Callable[[RequestOutput], None], text_reader: TextReader | None = None
    ) -> None: ...


def is_pushed(outputs: Outputs) -> TypeGuard[Pushed]:
    """Whether the outputs support `forward`. `isinstance` on a protocol would take 20 us."""
    return hasattr(outputs, "forward")


class OutputStream(Generic[Out]):
    """The outputs of a request for one reader, iterated (`async for`) or passed to a callback (`forward`).
    The request starts with the first read; closing the stream early aborts it."""

    __slots__ = (
        "request_id",
        "_begin",
        "_abandon",
        "has_output",
        "_over",
        "_output",
        "_gathered",
        "_is_delta",
        "_error",
        "_reader",
        "_text_reader",
        "_wake",
    )

    def __init__(
        self,
        request_id: str,
        begin: Callable[["OutputStream[Out]"], None],
        abandon: Callable[[str], None],
        *,
        is_delta: bool = True,
    ):
        """Create a stream. `begin` starts the request at the first read; `abandon` aborts it after an early
        close. With `is_delta` each output contains only what is new since the previous output."""
        self.request_id = request_id
        self._is_delta = is_delta
        self._begin: Callable[[OutputStream[Out]], None] | None = begin
        """Callback that starts the request; None once it was called, which breaks the reference cycle."""
        self._abandon = abandon
        self._over = False
        self.has_output = False
        """Whether the engine has put an output object into the stream."""
        self._output: Out | None = None
        """The unread output, if there is one."""
        self._gathered: OutputBuffer | None = None
        """The unread outputs, if there are several."""
        self._error: QuireError | None = None
        self._reader: Callable[[Out], None] | None = None
        self._text_reader: TextReader | None = None
        self._wake: asyncio.Future[None] | None = None

    # ---- the engine's side

    def put(self, output: Out) -> None:
        self.has_output = True
        if self._reader is None:
            self._keep(output)
            self._wake_up()
            return
        try:
            self._reader(output)
        except Exception as error:  # an error of the reader: it is raised in `forward`
            self._wake_up(error)
        if output.finished:
            self._over = True
            self._wake_up()

    def _keep(self, output: Out) -> None:
        """Buffer an output until the next read; several buffered outputs are merged."""
        if self._output is None:
            self._output = output
            return
        if self._gathered is None:
            self._gathered = OutputBuffer(self._output, is_delta=self._is_delta)
        self._gathered.add(output)

    @property
    def takes_text(self) -> bool:
        return self._text_reader is not None

    def put_text(self, text: str, num_tokens: int) -> None:
        """Pass a delta that contains only text, and its number of tokens, to the text reader."""
        assert self._text_reader is not None
        try:
            self._text_reader(text, num_tokens)
        except Exception as error:
            self._wake_up(error)

    def fail(self, error: QuireError) -> None:
        """End the stream with an error; earlier outputs can still be read."""
        self._error = error
        self._wake_up(error if self._reader is not None else None)

    def _wake_up(self, error: Exception | None = None) -> None:
        if self._wake is None or self._wake.done():
            return
        if error is None:
            self._wake.set_result(None)
        else:
            self._wake.set_exception(error)

    # ---- the reader's side

    def __aiter__(self) -> "OutputStream[Out]":
        return self

    async def __anext__(self) -> Out:
        self._start()
        while self._output is None:
            if self._over:
                raise StopAsyncIteration
            if self._error is not None:
                raise self._error
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        output, gathered = self._output, self._gathered
        self._output = self._gathered = None
        if gathered is not None:
            output = cast(Out, gathered.joined())
        self._over = output.finished
        return output

    async def forward(self, reader: Callable[[Out], None], text_reader: TextReader | None = None) -> None:
        """Pass every output to `reader` as soon as it exists, and return after the last one. Deltas between
        the first and the last that contain only text may go to `text_reader`."""
        await self.push(reader, text_reader)

    def push(
        self, reader: Callable[[Out], None], text_reader: TextReader | None = None
    ) -> asyncio.Future[None]:
        """Begin to pass outputs as `forward` does; the future is done after the last one."""
        self._reader, self._text_reader = reader, text_reader
        self._wake = asyncio.get_running_loop().create_future()
        self._start()
        return self._wake

    def _start(self) -> None:
        if (begin := self._begin) is not None:
            self._begin = None
            begin(self)

    async def aclose(self) -> None:
        if self._begin is None and not self._over:
            self._over = True
            self._abandon(self.request_id)


class OutputBuffer:
    """Merges outputs of one request into one output for a slow reader: deltas are joined only once."""

    __slots__ = ("_is_delta", "_last", "_prompt_logprobs", "_choices")

    def __init__(self, first: RequestOutput, *, is_delta: bool = True) -> None:
        """Start with one output. With `is_delta` the contents of all outputs are joined; otherwise each
        output contains the earlier outputs, and only the newest one is kept."""
        self._is_delta = is_delta
        self._last = first
        self._prompt_logprobs: PromptLogprobs | None = None
        self._choices: dict[int, _Pieces] = {}
        self.add(first)

    def add(self, output: RequestOutput) -> None:
        self._last = output
        if self._prompt_logprobs is None:
            self._prompt_logprobs = output.prompt_logprobs
        for completion in output.outputs:
            pieces = self._choices.get(completion.index)
            if pieces is None or not self._is_delta:
                self._choices[completion.index] = _Pieces(completion)
            else:
                pieces.add(completion)

    def joined(self) -> RequestOutput:
        """Return the last output with the text, tokens and logprobs of all added outputs. Nothing may be
        added afterwards."""
        output = self._last
        output.outputs = [self._choices[index].joined() for index in sorted(self._choices)]
        output.prompt_logprobs = self._prompt_logprobs
        return output


class _Pieces:
    """The deltas of one completion of a request, which are joined when they are read."""

    __slots__ = ("_last", "_texts", "_token_ids", "_logprobs")

    def __init__(self, first: CompletionOutput) -> None:
        self._last = first
        self._texts = [first.text]
        self._token_ids: list[int] | None = None
        """Token ids of all deltas; None while there is only one."""
        self._logprobs: SampleLogprobs | None = first.logprobs

    def add(self, delta: CompletionOutput) -> None:
        if self._token_ids is None:
            self._token_ids = list(self._last.token_ids)
        self._last = delta
        self._texts.append(delta.text)
        self._token_ids.extend(delta.token_ids)
        if self._logprobs is None or delta.logprobs is None:
            self._logprobs = delta.logprobs
        else:
            self._logprobs.extend(delta.logprobs)  # type: ignore[arg-type]

    def joined(self) -> CompletionOutput:
        completion = self._last
        if self._token_ids is not None:
            completion.text = "".join(self._texts)
            completion.token_ids = self._token_ids
            completion.logprobs = self._logprobs
        return completion

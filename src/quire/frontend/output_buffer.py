"""Buffer of outputs for a slow reader, merged in linear time."""

from quire.data.outputs import CompletionOutput, PromptLogprobs, RequestOutput, SampleLogprobs


class OutputBuffer:
    """Outputs of one request that are merged into one. Deltas are kept in lists and joined once."""

    __slots__ = ("_is_delta", "_last", "_prompt_logprobs", "_choices")

    def __init__(self, first: RequestOutput, *, is_delta: bool = True) -> None:
        """Build it. Without `is_delta` each output contains the earlier ones, so that only the newest is
        kept."""
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
        """Return the last output with the content of all. Nothing may be added afterwards."""
        output = self._last
        output.outputs = [self._choices[index].joined() for index in sorted(self._choices)]
        output.prompt_logprobs = self._prompt_logprobs
        return output


class _Pieces:
    """The deltas of one choice."""

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

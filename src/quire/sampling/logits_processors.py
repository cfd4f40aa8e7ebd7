"""Custom logits processors, with the interface of vLLM v1, and the batch of requests that they process."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from quire.data.params import SamplingParams
from quire.data.step_plan import StepPlan
from quire.errors import EngineError, one_line
from quire.sampling.rows import History, Ints, SamplingRows
from quire.sampling.transfer import to_device

T = TypeVar("T")
RequestLogitsProcessor = (
    Callable[[list[int], Tensor], Tensor] | Callable[[list[int], list[int], Tensor], Tensor]
)
"""Function that returns the processed logits [V] of one request. Its arguments are the output token ids so
far, or the prompt and output token ids, and then the logits."""


class MoveDirectionality(Enum):
    """Effect of a move: an index takes over the request of another index, or both swap their requests."""

    UNIDIRECTIONAL = 0
    SWAP = 1


AddedRequest = tuple[int, SamplingParams, list[int] | None, list[int]]
"""Index, parameters, prompt (None for embeddings) and output, a list that grows with each step."""


@dataclass(frozen=True)
class BatchUpdate:
    """Changes of the batch since the last step; to be applied in the order removed, added, moved."""

    batch_size: int
    removed: Sequence[int]
    """Indices that have no request any more, in descending order."""
    added: Sequence[AddedRequest]
    """New requests; an index may replace the request that it had."""
    moved: Sequence[tuple[int, int, MoveDirectionality]]
    """Moves of requests, each as (from index, to index, directionality)."""


class LogitsProcessor(ABC):
    """Interface of a custom class that changes the logits of a batch. There is one instance per worker."""

    @classmethod  # noqa: B027
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise a ValueError if a request cannot be processed. This method runs in API processes."""

    @abstractmethod
    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        """Build the processor, once per worker."""

    @abstractmethod
    def apply(self, logits: Tensor) -> Tensor:
        """Return the logits [batch size, vocabulary] in float32, changed in place or new."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Return whether the most likely token never changes. Such a processor is applied after the
        temperature, and not to batches without random sampling."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Apply the changes of the batch before each step; None means that it has the same requests."""


class AdapterLogitsProcessor(LogitsProcessor):
    """Base of processors that call a separate function for each request."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self._functions: dict[int, Callable[[Tensor], Tensor]] = {}
        """Functions of the requests by index in the batch."""

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """Return the function of a new request; None leaves its logits as they are."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._functions, batch_update, self._new_function)

    def _new_function(
        self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
    ) -> Callable[[Tensor], Tensor] | None:
        function: Any = self.new_req_logits_processor(params)
        if function is None:
            return None
        if len(inspect.signature(function).parameters) == 3:
            return lambda row: function(prompt_ids or [], output_ids, row)
        return lambda row: function(output_ids, row)

    def apply(self, logits: Tensor) -> Tensor:
        for index, function in self._functions.items():
            logits[index] = function(logits[index])
        return logits


def process_dict_updates(
    entries: dict[int, T],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], T | None],
) -> bool:
    """Update a dict of states by index. `new_state` returns the state of a new request, None if it has none.
    Return whether the dict has changed."""
    if batch_update is None:
        return False
    before = dict(entries)
    for index in batch_update.removed:
        entries.pop(index, None)
    for index, params, prompt_ids, output_ids in batch_update.added:
        entries.pop(index, None)
        if (state := new_state(params, prompt_ids, output_ids)) is not None:
            entries[index] = state
    for source, target, kind in batch_update.moved:
        moved, replaced = entries.pop(source, None), entries.pop(target, None)
        if moved is not None:
            entries[target] = moved
        if replaced is not None and kind is MoveDirectionality.SWAP:
            entries[source] = replaced
    return entries != before


class _Entry(NamedTuple):
    """A request in the batch."""

    row: int
    admission: int
    """Ordinal number of the request among all requests that the row has had."""
    params: SamplingParams
    prompt_ids: list[int] | None
    output_ids: list[int]


class ProcessorBatch:
    """The logits processors of a worker, and their batch: the requests that sample in a step, at indices
    without gaps. `begin` and `end` are called in every step (`StepFeature`)."""

    def __init__(
        self, make: Callable[[], list[LogitsProcessor]], state: SamplingRows, history: History
    ) -> None:
        """Build the processors by calling `make`, which is called again after one of them has failed."""
        self._make = make
        self._state, self._history = state, history
        self._params: dict[int, tuple[SamplingParams, bool]] = {}
        """Parameters of each row, and whether its prompt consists of embeddings."""
        self._start()

    def _start(self) -> None:
        self._processors = self._make()
        self.invariant = [item for item in self._processors if item.is_argmax_invariant()]
        """Processors that never change the most likely token; they are applied after the temperature."""
        self.others = [item for item in self._processors if not item.is_argmax_invariant()]
        self._batch: list[_Entry] = []
        self._order: Ints | None = None
        """Position of each batch index among the rows of the step; None outside of steps."""
        self._is_sorted = True
        self._has_failed = False

    def begin(self, plan: StepPlan) -> None:
        self._order = None
        for row in plan.released:
            self._params.pop(row, None)
        for new in plan.admitted:
            self._params[new.row] = new.params, new.embeds is not None
        if self._has_failed:  # a processor may have applied half of an update
            self._start()
        rows = plan.logit_rows.tolist()
        if not rows:
            return
        update = self._update(rows)
        self._extend_outputs()
        for processor in self._processors:
            self._run(processor, "update_state", update)
        place_of = {row: place for place, row in enumerate(rows)}
        self._order = np.array([place_of[entry.row] for entry in self._batch], np.int32)
        self._is_sorted = bool((self._order == np.arange(len(rows))).all())

    def end(self, plan: StepPlan, done: Any, sampled: Any) -> None:
        self._order = None

    def _update(self, rows: list[int]) -> BatchUpdate | None:
        """Make the batch consist of the requests of `rows` and return the changes; None if there are none."""
        wanted = {(row, int(self._state.admission[row])) for row in rows}
        known = {(entry.row, entry.admission) for entry in self._batch}
        free = [at for at, entry in enumerate(self._batch) if (entry.row, entry.admission) not in wanted]
        new = [row for row in rows if (row, int(self._state.admission[row])) not in known]
        if not free and not new:
            return None
        added: list[AddedRequest] = []
        for row in new:
            index = free.pop(0) if free else len(self._batch)
            entry = self._entry(row)
            self._batch[index : index + 1] = [entry]
            added.append((index, entry.params, entry.prompt_ids, entry.output_ids))
        size = len(rows)
        holes = [at for at in free if at < size]
        tail = [at for at in range(size, len(self._batch)) if at not in free]
        moved = [(at, hole, MoveDirectionality.UNIDIRECTIONAL) for at, hole in zip(tail, holes, strict=True)]
        for at, hole, _ in moved:
            self._batch[hole] = self._batch[at]
        del self._batch[size:]
        return BatchUpdate(size, removed=free[::-1], added=added, moved=moved)

    def _entry(self, row: int) -> _Entry:
        params, has_embeds = self._params[row]
        prompt = None if has_embeds else self._history.tokens[row, : self._history.prompt_lens[row]].tolist()
        return _Entry(row, int(self._state.admission[row]), params, prompt, [])

    def _extend_outputs(self) -> None:
        tokens, num_tokens, prompt_lens = self._history
        for entry in self._batch:
            known = prompt_lens[entry.row] + len(entry.output_ids)
            entry.output_ids.extend(tokens[entry.row, known : num_tokens[entry.row]].tolist())

    def apply(self, logits: Tensor, processors: Sequence[LogitsProcessor]) -> Tensor:
        """Return the logits [N, V] of the step's rows as changed by `processors`. The processors get the rows
        in the order of the batch indices, the caller in the order of the step."""
        if self._order is None or not processors:
            return logits
        index = None if self._is_sorted else to_device(self._order.astype(np.int64), logits.device)
        ordered = logits if index is None else logits.index_select(0, index)
        for processor in processors:
            ordered = self._run(processor, "apply", ordered)
            if not isinstance(ordered, Tensor) or ordered.shape != logits.shape:
                self._has_failed = True
                shape = tuple(ordered.shape) if isinstance(ordered, Tensor) else type(ordered).__name__
                raise EngineError(
                    f"logits processor {_name(processor)}: apply returned {shape}, expected a tensor of the"
                    f" shape {tuple(logits.shape)}"
                )
        return ordered if index is None else logits.index_copy_(0, index, ordered.to(logits.dtype))

    def _run(self, processor: LogitsProcessor, method: str, argument: Any) -> Any:
        try:
            return getattr(processor, method)(argument)
        except Exception as error:  # code of the operator, which may raise anything
            self._has_failed = True
            raise EngineError(
                f"logits processor {_name(processor)} failed in {method}: {one_line(error)}"
            ) from error


def _name(processor: LogitsProcessor) -> str:
    return f"{type(processor).__module__}:{type(processor).__qualname__}"

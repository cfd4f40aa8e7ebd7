"""CUDA graphs of whole steps, from the input tokens to the sampled tokens."""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import cycle, product
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from quire.attention.batch import Batch
from quire.data.step_plan import Ints, StepPlan
from quire.logs import get_logger
from quire.memory import MAX_SAMPLES, ladder
from quire.worker.device import ForwardResult, batch_of
from quire.worker.input_buffers import BufferSizes, StepBuffers, blank, bytes_of, pad, tensors
from quire.worker.multimodal.embeds import EmbedsBuffer
from quire.worker.pipeline import IntermediateTensors
from quire.worker.rows import Int64s, Rows

log = get_logger(__name__)

T = TypeVar("T")

IN_FLIGHT = 3
"""Minimum number of host buffers of each kind: one more than the steps in flight. Pipeline parallelism may
need more."""
Compute = Callable[[Batch, dict[str, Tensor]], ForwardResult | IntermediateTensors]
AfterForward = Callable[[ForwardResult], Tensor]
ReceiveBuffer = Callable[[int], Tensor | None]
"""Function from a number of tokens to the buffer for the previous pipeline stage's output (None: first
stage)."""
MakeEmbedsBuffer = Callable[[int], EmbedsBuffer]
"""Function from a number of tokens to the buffer for embeddings of images, videos and audio."""


def pinned(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Return pinned host memory."""
    return torch.empty(shape, dtype=dtype, pin_memory=torch.cuda.is_available())


def capture(run: Callable[[], T], pool: Any) -> tuple[Any, T]:
    """Capture the GPU work of `run` as a CUDA graph; return the graph and the result of `run`. Before the
    capture, `run` is called once to compile and load the kernels. Other threads may pin memory during the
    capture, for example to read LoRA adapters."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        return graph, run()


def verify_shapes(largest: int, query_lens: Sequence[int]) -> list[tuple[int, int]]:
    """Return the shapes (sequences, tokens of each sequence) of the steps with drafts that are captured, the
    smallest first."""
    sizes = [size for size in ladder(largest) if size & (size - 1) == 0 or size == largest]
    shapes = [(size, n) for n in query_lens if n > 1 for size in sizes if size * n <= MAX_SAMPLES]
    return sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape))


def smallest_shape(shapes: Iterable[tuple[int, int]], rows: int, width: int) -> tuple[int, int] | None:
    """Return the smallest captured shape (rows, tokens or drafts of each) that fits; None if none fits."""
    fitting = (shape for shape in shapes if shape[0] >= rows and shape[1] >= width)
    return min(fitting, key=lambda shape: shape[0] * shape[1], default=None)


class Graphs:
    """CUDA graphs of decode steps for a series of batch sizes (`quire.memory.ladder`), and of some steps with
    prompts. If LoRA is on, there is a second graph with adapters for each. All graphs share one memory
    pool."""

    def __init__(
        self,
        block_tables: Tensor,
        receive_buffer: ReceiveBuffer = lambda size: None,
        in_flight: int = IN_FLIGHT,
        query_lens: Sequence[int] = (),
        axes: int = 0,
        make_embeds_buffer: MakeEmbedsBuffer | None = None,
    ) -> None:
        """Set the parameters of all graphs. `query_lens` are the tokens per sequence of the steps with
        drafts, whose inputs the device computes; empty without drafts. `axes` is the number of M-RoPE
        positions per token in steps without media."""
        self.block_tables = block_tables
        self.receive_buffer = receive_buffer
        self.in_flight = in_flight
        self.query_lens = query_lens
        self.axes = axes
        self.make_embeds_buffer = make_embeds_buffer
        self.pool: Any = None
        """Memory pool of all graphs; None before the first capture."""
        self._by_size: dict[tuple[int, bool], Graph] = {}
        self._sizes: list[int] = []
        self._verify_graphs: dict[bool, dict[tuple[int, int], Graph]] = {False: {}, True: {}}
        """Graphs of steps with drafts, by whether rows have adapters, then by sequences and query length."""
        self._mixed_graphs: dict[bool, list[Graph]] = {False: [], True: []}
        """Graphs of steps with prompts, by whether rows have adapters, the smallest first."""

    def capture(
        self,
        compute: Compute,
        largest: int,
        lora_variants: Sequence[bool] = (False,),
        *,
        seconds: float,
        mixed_shapes: Sequence[tuple[int, int]] = (),
        verify: AfterForward | None = None,
        resample: AfterForward | None = None,
    ) -> None:
        """Capture the decode batch sizes of `ladder` up to `largest`, the largest first, since smaller graphs
        reuse its memory. Sizes that are not captured within `seconds` run eagerly. Each step is captured
        without and with adapters if `lora_variants` has both values. `mixed_shapes` are the steps with
        prompts: the most sequences and samples, and the number of tokens. `verify` and `resample` are
        captured as separate graphs after each step."""
        started, self.pool = time.monotonic(), torch.cuda.graph_pool_handle()
        buffers = self.block_tables, self.pool, self.in_flight
        captured = partial(Graph, compute, *buffers, verify=verify, resample=resample)
        for (size, query_len), adapters in product(
            reversed(verify_shapes(largest, self.query_lens)), lora_variants
        ):
            if time.monotonic() - started < seconds / 2:
                shape = GraphShape(size, query_len, adapters, self.axes)
                self._verify_graphs[adapters][size, query_len] = captured(shape)
        for size in reversed(ladder(largest)):
            intermediate_tensors, query_len = self.receive_buffer(size), min(self.query_lens, default=0)
            for adapters in lora_variants:
                shape = GraphShape(size, query_len, adapters, self.axes)
                self._by_size[size, adapters] = captured(shape, intermediate_tensors=intermediate_tensors)
            if time.monotonic() - started > seconds:
                log.warning(
                    "Capturing CUDA graphs took too long and stops: batches smaller than %d run without a "
                    "graph",
                    size,
                )
                break
        self._sizes = sorted({size for size, _ in self._by_size})
        for (size, tokens), adapters in product(reversed(mixed_shapes), lora_variants):
            if time.monotonic() - started < seconds:
                axes = 3 if self.axes and self.make_embeds_buffer is not None else self.axes
                shape = GraphShape(size, 0, adapters, axes, tokens, drafts=bool(self.query_lens))
                embeds = None if self.make_embeds_buffer is None else self.make_embeds_buffer(tokens)
                self._mixed_graphs[adapters].insert(0, captured(shape, embeds_buffer=embeds))

    def forget(self) -> None:
        """Drop all graphs, since they contain addresses of weights and cache, which will change."""
        self._by_size, self._sizes = {}, []
        self._verify_graphs, self._mixed_graphs = {False: {}, True: {}}, {False: [], True: []}

    def find(self, plan: StepPlan, *, adapters: bool = False) -> "Graph | None":
        """Return the smallest graph that fits a plan, with or without adapters; None if no graph fits."""
        if len(plan.rows) and not plan.is_decode:
            if plan.counts:
                return None
            only_draws = plan.total_tokens == len(plan.logit_rows)
            return self._find_verify(plan, adapters) if only_draws else self._find_mixed(plan, adapters)
        count = max(plan.counts, default=len(plan.rows))
        if not self._sizes or count > self._sizes[-1]:
            return None
        return self._by_size[self.size_for(count), adapters]

    def _find_verify(self, plan: StepPlan, adapters: bool) -> "Graph | None":
        count, most = len(plan.rows), int(plan.num_drafts.max()) + 1
        shape = smallest_shape(self._verify_graphs[adapters], count, most)
        return None if shape is None else self._verify_graphs[adapters][shape]

    def _find_mixed(self, plan: StepPlan, adapters: bool) -> "Graph | None":
        for graph in self._mixed_graphs[adapters]:
            fits = plan.total_tokens < graph.sizes.tokens and len(plan.rows) < graph.sizes.seqs
            if fits and len(plan.logit_rows) <= graph.sizes.samples:
                return graph
        return None

    def size_for(self, count: int) -> int:
        """Return the size of the smallest graph for `count` tokens, or `count` if none is large enough."""
        if not self._sizes or count > self._sizes[-1]:
            return count
        return self._sizes[bisect_left(self._sizes, count)]


class GraphShape(NamedTuple):
    """The shape of the steps that a graph computes."""

    size: int
    """Number of sequences."""
    query_len: int = 0
    """Tokens of each sequence if the device computes inputs of the step (for drafts); otherwise 0."""
    adapters: bool = False
    axes: int = 0
    """Number of M-RoPE positions of each token: 1, or 3; 0 without M-RoPE."""
    tokens: int = 0
    """Number of tokens, with padding, in a step with prompts; 0 for a step of decodes."""
    drafts: bool = False
    """Whether the device computes the inputs of the decodes in a step with prompts, since they have
    drafts."""


class Graph:
    """A captured step of up to `GraphShape.size` sequences: of decodes, or also of prompts if
    `GraphShape.tokens` is set. The graph reads its inputs at fixed addresses."""

    intermediate_tensors: Tensor | None = None
    """Buffer for the output of the previous pipeline stage; None in the first stage."""
    is_mixed = False
    """Whether the graph is for steps with prompts."""
    _embeds_buffer: EmbedsBuffer | None = None

    def __init__(
        self,
        compute: Compute,
        block_tables: Tensor,
        pool: Any,
        in_flight: int,
        shape: GraphShape,
        *,
        intermediate_tensors: Tensor | None = None,
        verify: AfterForward | None = None,
        resample: AfterForward | None = None,
        embeds_buffer: EmbedsBuffer | None = None,
    ) -> None:
        size, query_len, adapters, axes, tokens, drafts = shape
        num_groups, num_rows, width = block_tables.shape
        num_samples, num_changes = size * max(query_len, 1), 2 * size * num_groups
        self.is_mixed = tokens > 0
        self.sizes = BufferSizes(
            *(tokens or num_samples, size + self.is_mixed, num_samples, num_changes, num_groups),
            adapters=adapters,
            drafts=drafts or query_len > 0,
            query_len=query_len,
            axes=axes,
        )
        self.pad_row = num_rows - 1
        self._pad_place = self.pad_row * width
        self._host_buffers = cycle(
            [StepBuffers(part, self.sizes) for part in pinned(in_flight, bytes_of(self.sizes))]
        )
        self._memory = torch.empty(bytes_of(self.sizes), dtype=torch.uint8, device=block_tables.device)
        self._inputs = tensors(self._memory, self.sizes)
        buffers = next(self._host_buffers)
        self._blank(buffers, 0)
        self._memory.copy_(buffers.memory)
        lens = np.full(self.sizes.seqs, max(query_len, tokens, 1), np.int32)
        kind = {"are_decodes": not self.is_mixed, "are_mixed": self.is_mixed}
        batch = batch_of(self._inputs, block_tables, lens, lens, **kind)
        batch.intermediate_tensors = self.intermediate_tensors = intermediate_tensors
        self._embeds_buffer = embeds_buffer
        if embeds_buffer is not None:
            batch.embeds = embeds_buffer.tokens, embeds_buffer.vectors

        def run() -> ForwardResult | IntermediateTensors:
            batch.angles.clear()  # the capture must not reuse what the first run computed
            return compute(batch, self._inputs)

        self._graph, self._output = capture(run, pool)
        if isinstance(self._output, ForwardResult):
            output = self._output
            more = [function and _capture_after(function, output, pool) for function in (verify, resample)]
            self._output = output._replace(replay_verify=more[0], resample=more[1])
        self._output_for: dict[int, ForwardResult | IntermediateTensors] = {}

    def _blank(self, buffers: StepBuffers, first: int) -> None:
        query_len = self.sizes.query_len
        first = 0 if query_len or self.is_mixed else first
        blank(buffers.arrays, first, self.pad_row, self._pad_place, max(query_len, 1))
        if self.is_mixed:
            buffers.arrays["query_starts"][:] = 0
            pad(buffers.arrays, 0)

    @property
    def takes_embeds(self) -> bool:
        """Whether the graph reads embeddings of images, videos and audio from a buffer."""
        return self._embeds_buffer is not None

    def load(
        self,
        plan: StepPlan,
        all_rows: Rows,
        places: Int64s,
        ids: Ints,
        embeds: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        buffers = next(self._host_buffers)
        if not buffers.holds(plan, all_rows):
            self._blank(buffers, len(plan.rows))
        buffers.write(plan, all_rows, places, ids)
        if self.is_mixed:
            pad(buffers.arrays, len(plan.rows))
        buffers.arrays["block_places"][len(ids) :] = self._pad_place
        self._memory.copy_(buffers.memory, non_blocking=True)
        if self._embeds_buffer is not None:
            self._embeds_buffer.load(embeds)

    def replay(self, count: int) -> ForwardResult | IntermediateTensors:
        """Replay the graph and return the results of the first `count` sampled positions. They are valid
        until the next replay of any graph."""
        self._graph.replay()
        output = self._output_for.get(count)
        if output is None:
            output = self._output_for[count] = _first(self._output, count, all_states=self.is_mixed)
        return output


def _capture_after(verify: AfterForward, output: ForwardResult, pool: Any) -> Callable[[], Tensor]:
    graph, result = capture(lambda: verify(output), pool)

    def play() -> Tensor:
        graph.replay()
        return result

    return play


def _first(
    output: ForwardResult | IntermediateTensors, count: int, *, all_states: bool
) -> ForwardResult | IntermediateTensors:
    if not isinstance(output, ForwardResult):
        return output[0][:count], output[1][:count]
    assert output.token_ids is not None and output.sampling is not None and output.rows is not None
    first = output._replace(
        logits=output.logits[:count],
        token_ids=output.token_ids[:count],
        sampling=type(output.sampling)(*(column[:count] for column in output.sampling)),
        rows=output.rows[:count],
    )
    if output.verify_inputs is not None or all_states:
        return first
    aux_hidden_states = tuple(states[:count] for states in output.aux_hidden_states)
    return first._replace(hidden=output.hidden[:count], aux_hidden_states=aux_hidden_states)

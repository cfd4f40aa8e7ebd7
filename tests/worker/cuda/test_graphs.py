"""Tests of the inputs and outputs of captured graphs, without a GPU."""

import random
from collections import deque
from itertools import cycle

import numpy as np
import torch

from quire.data.params import SamplingParams
from quire.data.request import Request
from quire.data.step_plan import StepPlan, StepResult
from quire.sampling.rows import SamplingRows
from quire.sched.kv_manager import KVManager
from quire.sched.scheduler import Scheduler
from quire.worker.cuda.graphs import IN_FLIGHT, Graph, Graphs
from quire.worker.device import ForwardResult, NewTokens
from quire.worker.input_buffers import BufferSizes, StepBuffers, blank, bytes_of, sampling_tensors, tensors
from quire.worker.multimodal.embeds import EmbedsBuffer
from quire.worker.rows import Rows

CPU = torch.device("cpu")
MAX_LEN, BLOCK, ROWS, VOCAB = 96, 4, 8, 50


class NoGraph:
    replays = 0

    def replay(self) -> None:
        self.replays += 1


def stand_in(size: int, block_tables: torch.Tensor) -> Graph:
    """Return a graph that was never captured."""
    graph = object.__new__(Graph)
    num_groups = len(block_tables)
    graph.sizes = BufferSizes(size, size, size, 2 * size * num_groups, num_groups)
    graph.pad_row, graph._pad_place = ROWS, ROWS * block_tables.shape[2]
    memory = torch.full((IN_FLIGHT, bytes_of(graph.sizes)), 7, dtype=torch.uint8)
    graph._host_buffers = cycle([StepBuffers(part, graph.sizes) for part in memory])
    graph._memory = torch.zeros(bytes_of(graph.sizes), dtype=torch.uint8)
    graph._inputs = tensors(graph._memory, graph.sizes)
    graph._graph = NoGraph()  # type: ignore[assignment]
    columns = sampling_tensors(graph._inputs), graph._inputs["logit_rows"]
    graph._output = ForwardResult(
        torch.randn(size, 3), torch.randn(size, VOCAB), torch.arange(size), *columns
    )
    graph._output_for = {}
    return graph


class Traffic:
    """Requests that arrive, end and decode, with a step planned before the last tokens are known."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        windows = [None, 7][: 1 + seed % 2]
        kv = KVManager(num_blocks=120, block_size=BLOCK, max_rows=ROWS, share_prefixes=False, windows=windows)
        self.scheduler = Scheduler(kv=kv, max_num_seqs=ROWS, max_num_batched_tokens=64, max_model_len=MAX_LEN)
        self.all_rows = Rows(
            max_rows=ROWS,
            max_len=MAX_LEN,
            block_size=BLOCK,
            sampling=SamplingRows(ROWS, VOCAB, CPU),
            num_groups=len(windows),
        )
        self.tables = torch.zeros(len(windows), ROWS + 1, MAX_LEN // BLOCK, dtype=torch.int32)
        sizes = [1, 2, 4, 8]
        self.graphs = Graphs(self.tables)
        self.graphs._by_size, self.graphs._sizes = (
            {(n, False): stand_in(n, self.tables) for n in sizes},
            sizes,
        )
        self.in_flight: deque[tuple[StepPlan, NewTokens]] = deque()
        self.num_added = self.num_decodes = self.num_kept = 0

    def arrive(self) -> None:
        self.num_added += 1
        length = self.rng.randint(1, 20)
        params = SamplingParams(
            temperature=self.rng.random(),
            top_k=self.rng.randint(0, 9),
            top_p=self.rng.random(),
            min_p=self.rng.random() / 2,
            max_tokens=self.rng.randint(1, 40),
            ignore_eos=True,
        )
        assert params.max_tokens is not None
        self.scheduler.add(
            Request(
                id=str(self.num_added),
                tokens=[self.rng.randrange(VOCAB) for _ in range(length)],
                params=params,
                prompt_len=length,
                limit=length + params.max_tokens,
                seed=self.num_added,
            )
        )

    def step(self) -> None:
        if self.rng.random() < 0.2:
            self.arrive()
        if self.scheduler.requests and self.rng.random() < 0.02:
            self.scheduler.abort(self.rng.choice(list(self.scheduler.requests)))
        plan = self.scheduler.plan() if len(self.in_flight) < 2 else None
        if plan is not None:
            self.all_rows.apply(plan)
            graph = self.graphs.find(plan)
            assert (graph is not None) == plan.is_decode
            if graph is not None:
                self.check(graph, plan)
            self.in_flight.append((plan, NewTokens.of(plan)))
            self.all_rows.advance(plan)
        if self.in_flight and (plan is None or len(self.in_flight) == 2):
            plan, new = self.in_flight.popleft()
            ids = np.array([self.rng.randrange(VOCAB) for _ in plan.sampling_rows], np.int32)
            self.all_rows.append_sampled(*new, ids)
            self.scheduler.update(plan, StepResult(ids))

    def check(self, graph: Graph, plan: StepPlan) -> None:
        """Check that the device inputs equal those of a newly built page."""
        self.num_decodes += 1
        changed = self.rng.randint(0, 2)
        places, ids = np.array([3, 5], np.int64)[:changed], np.array([8, 9], np.int32)[:changed]
        fresh = StepBuffers(torch.full((bytes_of(graph.sizes),), 7, dtype=torch.uint8), graph.sizes)
        blank(fresh.arrays, len(plan.rows), graph.pad_row, graph._pad_place)
        fresh.write(plan, self.all_rows, places, ids)
        pages = [next(graph._host_buffers) for _ in range(IN_FLIGHT)]
        self.num_kept += pages[0].holds(plan, self.all_rows)
        graph.load(plan, self.all_rows, places, ids)
        for name, expected in tensors(fresh.memory, graph.sizes).items():
            end = len(ids) if name == "block_ids" else None
            assert torch.equal(graph._inputs[name][:end], expected[:end]), (plan.step, name)


def test_reused_input_pages_are_correct() -> None:
    """Check for stale columns of another request, stale padding, late tokens and blocks changed by an
    earlier step.
    """
    kept = decodes = 0
    for seed in range(6):
        traffic = Traffic(seed)
        for _ in range(250):
            traffic.step()
        kept, decodes = kept + traffic.num_kept, decodes + traffic.num_decodes
    assert decodes > 500
    assert decodes / 10 < kept < decodes


def test_last_token_of_a_chunk_is_not_a_decode() -> None:
    """Check one token of an unfinished prompt, after which a graph would sample."""
    traffic, none, ones = Traffic(0), np.empty(0, np.int32), np.ones(2, np.int32)
    for samples in ([True, True], [True, False]):
        plan = StepPlan(1, [], [], none, none, np.arange(2, dtype=np.int32), ones, np.array(samples))
        assert (traffic.graphs.find(plan) is not None) == all(samples)
        assert plan.sampling_rows.tolist() == [row for row in range(2) if samples[row]]


def test_smaller_batch_gets_the_first_outputs() -> None:
    graph = stand_in(8, torch.zeros(1, ROWS + 1, 4, dtype=torch.int32))
    for count in (3, 8, 3):
        done = graph.replay(count)
        assert done.token_ids is not None and done.sampling is not None and done.rows is not None
        assert done.token_ids.tolist() == list(range(count))
        assert torch.equal(done.logits, graph._output.logits[:count])
        assert [len(column) for column in (done.hidden, done.rows, *done.sampling)] == [count] * 8
    assert graph.replay(3).token_ids is graph.replay(3).token_ids
    assert graph._graph.replays == 5  # type: ignore[attr-defined]


def test_engines_in_lockstep_choose_the_same_graph_size() -> None:
    """Check another engine with more rows, and a prompt beside decodes, which uses no graph."""
    graphs = object.__new__(Graphs)
    named = {(1, False): "one", (4, False): "four", (8, False): "eight"}
    graphs._by_size, graphs._sizes = named, [1, 4, 8]  # type: ignore[assignment]
    step = StepPlan.idle(0)
    for counts, actual in (((0, 1), "one"), ((3, 0), "four"), ((0, 5), "eight"), ((0, 9), None)):
        step.counts = counts
        assert graphs.find(step) == actual
        assert graphs.size_for(max(counts)) == {"one": 1, "four": 4, "eight": 8, None: 9}[actual]


def test_embeddings_of_a_step_are_cleared_for_the_next() -> None:
    """Check that the unused positions point to the last token, which is padding."""
    room = EmbedsBuffer(6, 4, torch.float32, CPU)

    def embedded() -> list[list[float]]:
        x = torch.zeros(6, 4)
        x.index_copy_(0, room.tokens, room.vectors)
        return x[:-1].tolist()

    nothing, one = [0.0] * 4, [1.0] * 4
    room.load((torch.tensor([1, 3, 4]), torch.ones(3, 4)))
    assert embedded() == [nothing, one, nothing, one, one]
    room.load((torch.tensor([0]), torch.ones(1, 2)))
    assert embedded() == [[1.0, 1.0, 0.0, 0.0], *[nothing] * 4]
    room.load(None)
    assert embedded() == [nothing] * 5

"""The device whose results come late: its bookkeeping on the CPU, all of it on a GPU."""

import weakref
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuda_on_cpu import NEEDS_KERNELS, OnCPU, WithGraphs, WithPrompts, pretend_graphs
from oracle import make_tiny, run_hf
from staged import Engine
from threads import groups, run_threads
from torch import Tensor

from quire.config.engine import EngineConfig
from quire.config.parallel import Rank
from quire.config.speculation import SpecFacts
from quire.configure import configure
from quire.core.build import build_scheduler
from quire.core.engine_core import EngineCore
from quire.data.params import SamplingParams
from quire.data.plan import Admission, Masks, Pending, StepPlan
from quire.data.request import Request
from quire.memory import GRAPH_BYTES, CacheSize, ladder
from quire.parallel.world import World
from quire.sampling.random import SamplingTensors
from quire.sampling.rows import (
    ALLOWED,
    BANNED,
    BIASED,
    HELD,
    LIMITED,
    LOGPROBS,
    PENALTIES,
    RANDOM,
    TIMED,
    SamplingRows,
)
from quire.sampling.sampler import Sampled, Sampler
from quire.worker.cuda.device import CudaDevice
from quire.worker.cuda.graphs import Graph
from quire.worker.device import Model
from quire.worker.input_buffers import BufferSizes, blank, bytes_of, host_arrays
from quire.worker.memory import Needs
from quire.worker.rows import Rows
from quire.worker.runner import Runner
from quire.worker.worker import Worker

PROMPTS = {3: [5, 9, 30, 31, 32], 1: [7, 8], 0: list(range(40, 51))}
TABLES = {3: [17, 4], 1: [9, 10], 0: [30, 2, 6]}
NONE = np.empty(0, np.int32)


def best(logits: Tensor, asked: SamplingTensors, constrained: object = None) -> Tensor:
    return logits.argmax(-1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    return make_tiny("qwen3", tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def worker(tiny: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> Worker:
    return started(OnCPU, tiny, monkeypatch)


def use(kind: type[CudaDevice], monkeypatch: pytest.MonkeyPatch) -> None:
    def open_device(
        model: Model, all_rows: Rows, device: torch.device, drafts: SpecFacts | None
    ) -> CudaDevice:
        return kind(model, all_rows, best, device, drafts)

    monkeypatch.setattr("quire.worker.loaded_model.open_device", open_device)


def started(
    kind: type[CudaDevice], tiny: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch, num_blocks: int = 80
) -> Worker:
    use(kind, monkeypatch)
    given = {"model": str(tiny[0]), "dtype": "float32", "block_size": 4, "max_num_seqs": 4}
    made = Worker(configure(given | {"use_tqdm_on_load": False, "num_gpu_blocks_override": num_blocks}))
    made.start()
    return made


def admission(row: int, token_ids: list[int], block_ids: list[int], **params: Any) -> Admission:
    asked = SamplingParams(**({"temperature": 0} | params))
    return Admission(row, str(row), token_ids, len(token_ids), 0, [block_ids], asked, seed=0)


def plan(step: int, counts: dict[int, int], **changes: Any) -> StepPlan:
    rows, nums = np.array(list(counts), np.int32), np.array(list(counts.values()), np.int32)
    rest: dict[str, Any] = {"released": [], "admitted": [], "block_rows": NONE, "block_ids": NONE}
    rest["samples"] = np.ones(len(rows), np.bool_)
    return StepPlan(step=step, rows=rows, num_tokens=nums, **(rest | changes))


def grown(row: int, block: int) -> dict[str, Any]:
    return {"block_rows": np.array([row], np.int32), "block_ids": np.array([[block]], np.int32)}


def greedy(hf: Any, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(run_hf(hf, ids)[-1].argmax()))
    return ids[len(prompt) :]


def test_a_step_reads_the_tokens_of_the_one_before_from_the_device(tiny: Any, worker: Worker) -> None:
    """The host plans on without knowing the values."""
    new = [admission(row, PROMPTS[row], TABLES[row]) for row in (3, 1, 0)]
    pending = [worker.submit(plan(1, {row: len(PROMPTS[row]) for row in (3, 1, 0)}, admitted=new))]
    pending.append(worker.submit(plan(2, {3: 1, 1: 1, 0: 1})))
    found = [pending.pop(0).wait().token_ids.tolist()]
    pending.append(worker.submit(plan(3, {3: 1, 1: 1, 0: 1})))
    found += [step.wait().token_ids.tolist() for step in pending]
    for place, row in enumerate((3, 1, 0)):
        assert [step[place] for step in found] == greedy(tiny[1], PROMPTS[row], 3)


def test_a_late_token_does_not_land_in_a_row_with_a_new_owner(tiny: Any, worker: Worker) -> None:
    first = worker.submit(plan(1, {1: 2}, admitted=[admission(1, [7, 8], [9])]))
    second = worker.submit(plan(2, {1: 1}))
    other = [20, 21, 22, 23, 24]
    unfinished = np.zeros(1, np.bool_)
    third = worker.submit(
        plan(3, {1: 2}, released=[1], admitted=[admission(1, other, [11, 12])], samples=unfinished)
    )
    first.wait(), second.wait(), third.wait()
    fourth = worker.submit(plan(4, {1: 3}))
    fifth = worker.submit(plan(5, {1: 1}))
    found = [fourth.wait().token_ids.item(), fifth.wait().token_ids.item()]
    assert found == greedy(tiny[1], other, 2)


def test_rows_that_ask_for_more_than_a_plain_sample_leave_their_token_for_the_next_step(
    tiny: Any, worker: Worker
) -> None:
    """A biased row: what the kernel sampled in passing is not what the row gets."""
    prompt, forced = PROMPTS[3], 77
    new = [admission(3, prompt, TABLES[3], logit_bias={forced: 100.0}), admission(1, PROMPTS[1], TABLES[1])]
    first = worker.submit(plan(1, {3: 5, 1: 2}, admitted=new))
    second = worker.submit(plan(2, {3: 1, 1: 1}))
    assert first.wait().token_ids.tolist()[0] == second.wait().token_ids.tolist()[0] == forced
    assert worker._runner is not None
    assert worker._runner.all_rows.tokens[3, 5:7].tolist() == [forced, forced]
    assert worker._runner.all_rows.tokens[1, 2:4].tolist() == greedy(tiny[1], PROMPTS[1], 2)


def test_it_goes_when_nobody_holds_it(worker: Worker) -> None:
    """Catches a circle: what it holds, the model, would stay until the collector comes."""
    assert isinstance(worker._runner, Runner)
    device = weakref.ref(worker._runner.device)
    worker.close()
    assert device() is None


def only(row: int, token_id: int) -> Masks:
    bits = np.zeros((1, 40), np.uint32)
    bits[0, token_id // 32] = 1 << token_id % 32
    return Masks(np.array([row], np.int32), bits)


@pytest.mark.parametrize("with_graphs", [False, pytest.param(True, marks=NEEDS_KERNELS)])
def test_a_step_is_drawn_once_the_one_before_is_known(
    with_graphs: bool, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks that come late: the layers of a step run before, and those of the next read what was drawn."""
    if with_graphs:
        pretend_graphs(monkeypatch)
    worker = started(WithGraphs if with_graphs else OnCPU, tiny, monkeypatch)
    new, constrained = [admission(row, PROMPTS[row], TABLES[row]) for row in (3, 1)], np.array([3], np.int32)
    first = worker.submit(plan(1, {3: 5, 1: 2}, admitted=new, constrained=constrained))
    worker.draw(only(3, 77))
    found, steps = [], [first]
    for step, forced in enumerate((78, 79, 80), start=2):
        steps.append(worker.submit(plan(step, {3: 1, 1: 1}, constrained=constrained)))
        found.append(steps[-2].wait().token_ids.tolist())
        worker.draw(only(3, forced))
    steps.append(worker.submit(plan(5, {3: 1, 1: 1}, constrained=constrained)))
    found.append(steps[-2].wait().token_ids.tolist())
    worker.draw(Masks())
    found.append(steps[-1].wait().token_ids.tolist())
    said = [token_ids[0] for token_ids in found]
    assert said[:4] == [77, 78, 79, 80] and said[4:] == greedy(tiny[1], PROMPTS[3] + said[:4], 1)
    assert [token_ids[1] for token_ids in found] == greedy(tiny[1], PROMPTS[1], 5)


def test_blocks_that_rows_gain_reach_the_device(tiny: Any, worker: Worker) -> None:
    prompt = list(range(40, 48))
    steps = [worker.submit(plan(1, {0: 8}, admitted=[admission(0, prompt, [30, 2])]))]
    steps.append(worker.submit(plan(2, {0: 1}, **grown(0, 61))))
    assert [step.wait().token_ids.item() for step in steps] == greedy(tiny[1], prompt, 2)


@NEEDS_KERNELS
def test_steps_with_prompts_through_graphs(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes beside whole prompts and parts of them, in steps that leave more room and less."""
    pretend_graphs(monkeypatch)
    worker = started(WithPrompts, tiny, monkeypatch)
    played: list[tuple[int, int]] = []
    replay = Graph.replay

    def counted(self: Graph, count: int) -> Any:
        played.append((self.sizes.tokens, count))
        return replay(self, count)

    monkeypatch.setattr(Graph, "replay", counted)
    prompts = PROMPTS | {2: list(range(60, 84))}
    part = np.array([True, False])
    steps = [plan(1, {3: 5}, admitted=[admission(3, prompts[3], TABLES[3])])]
    steps += [plan(2, {3: 1, 1: 2}, admitted=[admission(1, prompts[1], TABLES[1])])]
    steps += [plan(3, {1: 1, 0: 4}, admitted=[admission(0, prompts[0], TABLES[0])], samples=part)]
    steps += [plan(4, {3: 1, 0: 7, 1: 1})]
    late = admission(2, prompts[2], [50, 51, 52, 53, 54, 55, 56])
    steps += [plan(5, {0: 1, 2: 24, 3: 1}, admitted=[late]), plan(6, {0: 1, 1: 1, 2: 1, 3: 1})]
    found: dict[int, list[int]] = {row: [] for row in prompts}
    for step in steps:
        tokens = worker.submit(step).wait().token_ids.tolist()
        for row, token in zip(step.sampling_rows.tolist(), tokens, strict=True):
            found[row].append(token)
    for row, tokens in found.items():
        assert tokens == greedy(tiny[1], prompts[row], len(tokens)), row
    assert played == [(32, 1), (32, 2), (32, 1), (32, 3), (32, 3), (4, 4)]


@NEEDS_KERNELS
def test_steps_of_changing_rows_through_graphs(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding that is taken for a sequence, inputs of an earlier step or of a row's earlier request."""
    pretend_graphs(monkeypatch)
    worker = started(WithGraphs, tiny, monkeypatch)
    prompts = dict(PROMPTS)
    found: dict[int, list[int]] = {row: [] for row in prompts}
    new = [admission(row, prompts[row], TABLES[row]) for row in prompts]
    steps = [plan(1, {row: len(prompts[row]) for row in prompts}, admitted=new)]
    three, two = {3: 1, 1: 1, 0: 1}, {3: 1, 0: 1}
    steps += [plan(2, three), plan(3, three, **grown(0, 40))]  # in a graph for four
    steps += [plan(4, two, released=[1]), plan(5, two, **grown(3, 20))]
    prompts[11] = [33, 34, 35, 36, 37, 38]  # row 1 again, for another request
    again = admission(1, prompts[11], [11, 12])
    steps += [plan(6, {1: 6}, admitted=[again]), plan(7, three), plan(8, three, **grown(0, 41))]
    steps += [plan(9, {0: 1})]
    found[11] = []
    pending: deque[tuple[StepPlan, Pending]] = deque()
    for step in [*steps, None, None]:
        if step is not None:
            pending.append((step, worker.submit(step)))
        if len(pending) == 2 or step is None and pending:
            done, landing = pending.popleft()
            for row, token in zip(done.rows.tolist(), landing.wait().token_ids.tolist(), strict=True):
                found[11 if row == 1 and done.step > 5 else row].append(token)
    for row, tokens in found.items():
        assert tokens == greedy(tiny[1], prompts[row], len(tokens)), row
    assert [len(found[row]) for row in (3, 1, 0, 11)] == [7, 3, 8, 3]


@pytest.mark.parametrize("kind", [OnCPU, pytest.param(WithGraphs, marks=[NEEDS_KERNELS, pytest.mark.slow])])
def test_each_group_of_layers_has_blocks_of_its_own(
    kind: type[CudaDevice], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks or slots of another group, blocks that were given back while a step was in flight."""
    layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    windows = {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 5}
    tiny = make_tiny("qwen3", tmp_path, layer_types=layer_types, **windows)
    if kind is WithGraphs:
        pretend_graphs(monkeypatch)
    worker = started(kind, tiny, monkeypatch, num_blocks=200)
    size = CacheSize(60, 256, 0, worker.loaded.layout.windows)
    core = EngineCore(worker, build_scheduler(worker.config, size), depth=2)  # type: ignore[arg-type]
    prompts = [list(range(start, start + length)) for start, length in ((5, 9), (40, 14), (40, 2), (60, 11))]
    for number, tokens in enumerate(prompts):
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        core.add(
            Request(
                id=str(number),
                tokens=tokens,
                params=params,
                prompt_len=len(tokens),
                limit=len(tokens) + 12 - number,
                seed=0,
            )
        )
    found: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    while core.has_work:
        step = core.step()
        assert step is not None
        for id, token in zip(step.request_ids, step.token_ids, strict=True):
            found[id].append(token)
    assert core.scheduler.kv.windows == (None, 5, 5)
    for number, tokens in enumerate(prompts):
        assert found[str(number)] == greedy(tiny[1], tokens, 12 - number), number


@pytest.mark.slow
@pytest.mark.parametrize("kind", [OnCPU, pytest.param(WithGraphs, marks=NEEDS_KERNELS)])
def test_stages_of_a_pipeline(
    kind: type[CudaDevice], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a stage before sent is read where a graph was captured with it, and is not overwritten before it
    has been sent on; the values of tokens come with the plans."""
    tiny = make_tiny("qwen3", tmp_path, num_hidden_layers=3)
    if kind is WithGraphs:
        pretend_graphs(monkeypatch)
    use(kind, monkeypatch)
    engine = Engine(tiny[0], in_threads=False, pipeline_parallel_size=3, max_num_seqs=4)
    prompts = [list(range(start, start + length)) for start, length in ((5, 9), (40, 14), (40, 2), (60, 11))]
    for number, tokens in enumerate(prompts):
        engine.add(str(number), tokens, count=7)
    engine.run()
    assert not engine.executor.errors
    for number, tokens in enumerate(prompts):
        assert engine.tokens[str(number)] == greedy(tiny[1], tokens, 7), number


def among(counts: tuple[int, ...], own: StepPlan | None = None) -> StepPlan:
    """A plan of one of several engines; without one of its own it takes part in that of the others."""
    own = StepPlan.idle(-1) if own is None else own
    own.counts = counts
    return own


@pytest.mark.parametrize("backend", ["allgather_reducescatter", "all2all"])
def test_engines_with_experts_of_each_other(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step for the sake of the other one in between, room as for a graph that the other replays."""
    path, twin = make_tiny("qwen3_moe", tmp_path)
    use(OnCPU, monkeypatch)
    monkeypatch.setattr("quire.worker.cuda.graphs.Graphs.size_for", lambda self, count: -(-count // 8) * 8)
    given = {"model": str(path), "dtype": "float32", "block_size": 4, "max_num_seqs": 4}
    given |= {"use_tqdm_on_load": False, "num_gpu_blocks_override": 80, "all2all_backend": backend}
    given |= {"enable_expert_parallel": True, "data_parallel_size": 2}
    made = [World(Rank(dp=rank), ep=group) for rank, group in enumerate(groups(2))]
    workers = [Worker(configure(given), world) for world in made]
    for worker in workers:
        worker.start()
    new = [admission(row, PROMPTS[row], TABLES[row]) for row in (3, 0)]
    steps = [
        [among((5, 0), plan(1, {3: 5}, admitted=new[:1])), among((5, 0))],
        [among((1, 11), plan(2, {3: 1})), among((1, 11), plan(1, {0: 11}, admitted=new[1:]))],
        [among((0, 1)), among((0, 1), plan(2, {0: 1}))],
        [among((1, 1), plan(3, {3: 1})), among((1, 1), plan(3, {0: 1}))],
    ]

    def run(world: World) -> list[int]:
        rank = world.rank.dp
        under_way = [workers[rank].submit(step[rank]) for step in steps]
        return [token for each in under_way for token in each.wait().token_ids.tolist()]

    found = run_threads(2, run, worlds=lambda _: made)
    assert found == [greedy(twin, PROMPTS[row], 3) for row in (3, 0)]


class Measured(OnCPU):
    """Asks a device that has no memory of its own."""

    def needs(self, config: EngineConfig, weights: int, sampler: Sampler, bound: int = 0) -> Needs:
        self.dummies.compile = lambda *asked: None  # type: ignore[method-assign]
        return CudaDevice.needs(self, config, weights, sampler, bound)

    def _captures(self, config: EngineConfig) -> bool:
        return False


def test_the_step_that_is_measured_asks_for_everything(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache took the memory that penalties, logprobs or a prompt's logprobs ask for later."""
    said: list[Any] = []
    call = Sampler.__call__

    def watched(
        self: Sampler, logits: Tensor, rows: Any, state: SamplingRows, *rest: Any, **more: Any
    ) -> Sampled:
        said.append((len(rows), int(np.bitwise_and.reduce(state.flags[rows]))))
        return call(self, logits, rows, state, *rest, **more)

    monkeypatch.setattr(Sampler, "__call__", watched)
    answers = {"memory_allocated": 100, "max_memory_allocated": 700, "mem_get_info": (5000, 9000)}
    for name in ("reset_peak_memory_stats", "synchronize", "empty_cache", *answers):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: said.append(name) or answers.get(name))
    worker = started(Measured, tiny, monkeypatch)
    every = RANDOM | LIMITED | PENALTIES | ALLOWED | BANNED | HELD | BIASED | LOGPROBS | TIMED
    assert said[:4] == ["reset_peak_memory_stats", "memory_allocated", (1, every), (4, every)]
    assert said.index("max_memory_allocated") > 3
    assert worker._runner is not None and worker._runner.sampler.counts is None
    needs = worker._runner.device.needs(worker.config, 1000, worker._runner.sampler)
    assert (needs.activations, needs.counts, needs.other, needs.total) == (600, 0, 3000, 4600)
    # 1, 2 and 4 sequences are captured: the largest is measured, and each keeps its logits and states.
    monkeypatch.setattr(Measured, "_captures", lambda *_: True)
    needs = worker._runner.device.needs(worker.config, 1000, worker._runner.sampler)
    facts = worker.config.checkpoint.facts
    assert needs.graphs == 3 * GRAPH_BYTES + 600 + (1 + 2) * (facts.vocab + facts.hidden) * 4


def test_states_of_rows_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the measured step has are no part of what others take, and make way for the cache."""
    path, _ = make_tiny("granitemoehybrid", tmp_path)
    use(Measured, monkeypatch)
    worker = Worker(configure({"model": str(path), "dtype": "float32", "use_tqdm_on_load": False}))
    worker.load()
    others, total = 3000, 1 << 30

    def held() -> int:
        """Bytes of the cache that the layers have."""
        tensors = [
            vars(module)[name]
            for module in worker.model.modules()
            for name in ("k_cache", "v_cache", "conv_state", "state")
            if name in vars(module)
        ]
        storages = {each.data_ptr(): each.nbytes() for each in (t.untyped_storage() for t in tensors)}
        return sum(storages.values())

    answers = {"memory_allocated": 100, "max_memory_allocated": 700}
    for name in ("reset_peak_memory_stats", "synchronize", "empty_cache", *answers):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: answers.get(name))
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda: (total - others - worker.loaded.num_bytes - held(), total)
    )
    worker.measure()
    needs, states = worker._needs, worker.loaded.layout.row_bytes(4)
    assert needs is not None and needs.other == others
    assert held() < 2 * states + (1 << 12), "one row for padding, and a block"


def test_a_stage_before_the_last_measures_its_layers_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has neither head nor sampler; what it sends and keeps of its graphs is x and residual."""
    path, _ = make_tiny("qwen3", tmp_path, num_hidden_layers=2)
    answers = {"memory_allocated": 100, "max_memory_allocated": 700, "mem_get_info": (5000, 9000)}
    for name in ("reset_peak_memory_stats", "synchronize", "empty_cache", *answers):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: answers.get(name))
    monkeypatch.setattr(Measured, "_captures", lambda *_: True)
    use(Measured, monkeypatch)
    engine = Engine(path, in_threads=False, pipeline_parallel_size=2, max_num_seqs=4)
    needs = engine.executor.workers[0]._needs
    facts, tokens = engine.config.checkpoint.facts, engine.config.scheduler.max_num_batched_tokens
    assert needs is not None and needs.activations == 600 + 2 * 3 * tokens * facts.hidden * 4
    assert needs.graphs == 2 * GRAPH_BYTES + 600 + 1 * 2 * facts.hidden * 4  # of 1 and 2, half of all


@pytest.mark.parametrize("largest", [1, 3, 8, 100, 256, 1024])
def test_the_ladder_ends_at_what_can_run(largest: int) -> None:
    sizes = ladder(largest)
    assert sizes[0] == 1 and sizes[-1] == largest and sizes == sorted(set(sizes))


def test_padding_reads_and_writes_nothing() -> None:
    sizes = BufferSizes(4, 4, 4, 8, groups=2)
    arrays = host_arrays(torch.full((bytes_of(sizes),), 7, dtype=torch.uint8), sizes)
    blank(arrays, 1, 9, 90)
    assert arrays["slots"][1:].tolist() == arrays["slots1"][1:].tolist() == [-1] * 3
    assert arrays["seq_lens"][1:].tolist() == [0] * 3
    assert arrays["rows"][1:].tolist() == [9] * 3 and arrays["block_places"][2:].tolist() == [90] * 6
    assert arrays["query_starts"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("num_tokens", "num_seqs"), [(1000, 1), (256, 4), (257, 1), (3, 8)])
def test_a_blank_step_stays_within_the_block_tables(worker: Worker, num_tokens: int, num_seqs: int) -> None:
    """A made-up sequence longer than any real one reads beyond its table."""
    assert worker._runner is not None
    device = worker._runner.device
    assert isinstance(device, CudaDevice)
    batch, sheet = device.dummies.make(device.dummies.split(num_tokens, num_seqs))
    longest = device.block_tables.shape[2] * 4
    assert batch.seq_lens.max() <= longest and int(batch.seq_lens.sum()) == num_tokens
    assert int(batch.query_starts[-1]) == num_tokens and (sheet["slots"] == -1).all()
    assert len(batch.logit_tokens) == len(batch.seq_lens)

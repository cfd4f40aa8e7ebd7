"""Tests of the asynchronous device: its bookkeeping on the CPU, all of it on a GPU."""

import weakref
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuda_on_cpu import NEEDS_KERNELS, OnCPU, WithGraphs, WithPrompts, use_fake_graphs
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
from quire.data.request import Request
from quire.data.step_plan import Admission, Masks, Pending, StepPlan
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


def best(logits: Tensor, sampling: SamplingTensors, constrained: object = None) -> Tensor:
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
    base_settings = {"model": str(tiny[0]), "dtype": "float32", "block_size": 4, "max_num_seqs": 4}
    made = Worker(
        configure(base_settings | {"use_tqdm_on_load": False, "num_gpu_blocks_override": num_blocks})
    )
    made.start()
    return made


def admission(row: int, token_ids: list[int], block_ids: list[int], **params: Any) -> Admission:
    sampling_params = SamplingParams(**({"temperature": 0} | params))
    return Admission(row, str(row), token_ids, len(token_ids), 0, [block_ids], sampling_params, seed=0)


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


def test_step_reads_previous_tokens_from_the_device(tiny: Any, worker: Worker) -> None:
    """Check plans that the host makes before it has the token values."""
    new = [admission(row, PROMPTS[row], TABLES[row]) for row in (3, 1, 0)]
    pending = [worker.submit(plan(1, {row: len(PROMPTS[row]) for row in (3, 1, 0)}, admitted=new))]
    pending.append(worker.submit(plan(2, {3: 1, 1: 1, 0: 1})))
    actual = [pending.pop(0).wait().token_ids.tolist()]
    pending.append(worker.submit(plan(3, {3: 1, 1: 1, 0: 1})))
    actual += [step.wait().token_ids.tolist() for step in pending]
    for place, row in enumerate((3, 1, 0)):
        assert [step[place] for step in actual] == greedy(tiny[1], PROMPTS[row], 3)


def test_late_token_does_not_reach_a_reused_row(tiny: Any, worker: Worker) -> None:
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
    actual = [fourth.wait().token_ids.item(), fifth.wait().token_ids.item()]
    assert actual == greedy(tiny[1], other, 2)


def test_rows_with_logits_processors_pass_their_token_to_the_next_step(tiny: Any, worker: Worker) -> None:
    """Check a row with logit bias, whose token differs from the one that the fused kernel sampled."""
    prompt, forced = PROMPTS[3], 77
    new = [admission(3, prompt, TABLES[3], logit_bias={forced: 100.0}), admission(1, PROMPTS[1], TABLES[1])]
    first = worker.submit(plan(1, {3: 5, 1: 2}, admitted=new))
    second = worker.submit(plan(2, {3: 1, 1: 1}))
    assert first.wait().token_ids.tolist()[0] == second.wait().token_ids.tolist()[0] == forced
    assert worker._runner is not None
    assert worker._runner.all_rows.tokens[3, 5:7].tolist() == [forced, forced]
    assert worker._runner.all_rows.tokens[1, 2:4].tolist() == greedy(tiny[1], PROMPTS[1], 2)


def test_device_is_freed_without_garbage_collection(worker: Worker) -> None:
    """Check that no reference cycle keeps the model alive."""
    assert isinstance(worker._runner, Runner)
    device = weakref.ref(worker._runner.device)
    worker.close()
    assert device() is None


def only(row: int, token_id: int) -> Masks:
    bits = np.zeros((1, 40), np.uint32)
    bits[0, token_id // 32] = 1 << token_id % 32
    return Masks(np.array([row], np.int32), bits)


@pytest.mark.parametrize("with_graphs", [False, pytest.param(True, marks=NEEDS_KERNELS)])
def test_masked_step_is_sampled_after_the_step_before(
    with_graphs: bool, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check late masks: a step's layers run before them, and the next step reads the sampled tokens."""
    if with_graphs:
        use_fake_graphs(monkeypatch)
    worker = started(WithGraphs if with_graphs else OnCPU, tiny, monkeypatch)
    new, constrained = [admission(row, PROMPTS[row], TABLES[row]) for row in (3, 1)], np.array([3], np.int32)
    first = worker.submit(plan(1, {3: 5, 1: 2}, admitted=new, constrained=constrained))
    worker.sample_tokens(only(3, 77))
    actual, steps = [], [first]
    for step, forced in enumerate((78, 79, 80), start=2):
        steps.append(worker.submit(plan(step, {3: 1, 1: 1}, constrained=constrained)))
        actual.append(steps[-2].wait().token_ids.tolist())
        worker.sample_tokens(only(3, forced))
    steps.append(worker.submit(plan(5, {3: 1, 1: 1}, constrained=constrained)))
    actual.append(steps[-2].wait().token_ids.tolist())
    worker.sample_tokens(Masks())
    actual.append(steps[-1].wait().token_ids.tolist())
    output = [token_ids[0] for token_ids in actual]
    assert output[:4] == [77, 78, 79, 80] and output[4:] == greedy(tiny[1], PROMPTS[3] + output[:4], 1)
    assert [token_ids[1] for token_ids in actual] == greedy(tiny[1], PROMPTS[1], 5)


def test_new_blocks_of_rows_reach_the_device(tiny: Any, worker: Worker) -> None:
    prompt = list(range(40, 48))
    steps = [worker.submit(plan(1, {0: 8}, admitted=[admission(0, prompt, [30, 2])]))]
    steps.append(worker.submit(plan(2, {0: 1}, **grown(0, 61))))
    assert [step.wait().token_ids.item() for step in steps] == greedy(tiny[1], prompt, 2)


@NEEDS_KERNELS
def test_steps_with_prompts_use_graphs(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check decodes beside whole prompts and chunks, with more and less padding."""
    use_fake_graphs(monkeypatch)
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
    actual: dict[int, list[int]] = {row: [] for row in prompts}
    for step in steps:
        tokens = worker.submit(step).wait().token_ids.tolist()
        for row, token in zip(step.sampling_rows.tolist(), tokens, strict=True):
            actual[row].append(token)
    for row, tokens in actual.items():
        assert tokens == greedy(tiny[1], prompts[row], len(tokens)), row
    assert played == [(32, 1), (32, 2), (32, 1), (32, 3), (32, 3), (4, 4)]


@NEEDS_KERNELS
def test_graph_steps_with_changing_rows(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check for padding taken for a sequence, and for inputs of an earlier step or request."""
    use_fake_graphs(monkeypatch)
    worker = started(WithGraphs, tiny, monkeypatch)
    prompts = dict(PROMPTS)
    actual: dict[int, list[int]] = {row: [] for row in prompts}
    new = [admission(row, prompts[row], TABLES[row]) for row in prompts]
    steps = [plan(1, {row: len(prompts[row]) for row in prompts}, admitted=new)]
    three, two = {3: 1, 1: 1, 0: 1}, {3: 1, 0: 1}
    steps += [plan(2, three), plan(3, three, **grown(0, 40))]  # in a graph for four sequences
    steps += [plan(4, two, released=[1]), plan(5, two, **grown(3, 20))]
    prompts[11] = [33, 34, 35, 36, 37, 38]  # row 1 again, for another request
    second = admission(1, prompts[11], [11, 12])
    steps += [plan(6, {1: 6}, admitted=[second]), plan(7, three), plan(8, three, **grown(0, 41))]
    steps += [plan(9, {0: 1})]
    actual[11] = []
    pending: deque[tuple[StepPlan, Pending]] = deque()
    for step in [*steps, None, None]:
        if step is not None:
            pending.append((step, worker.submit(step)))
        if len(pending) == 2 or step is None and pending:
            done, landing = pending.popleft()
            for row, token in zip(done.rows.tolist(), landing.wait().token_ids.tolist(), strict=True):
                actual[11 if row == 1 and done.step > 5 else row].append(token)
    for row, tokens in actual.items():
        assert tokens == greedy(tiny[1], prompts[row], len(tokens)), row
    assert [len(actual[row]) for row in (3, 1, 0, 11)] == [7, 3, 8, 3]


@pytest.mark.parametrize("kind", [OnCPU, pytest.param(WithGraphs, marks=[NEEDS_KERNELS, pytest.mark.slow])])
def test_each_cache_group_has_its_own_blocks(
    kind: type[CudaDevice], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check for blocks or slots of another group, and for blocks freed while a step is in flight."""
    layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    windows = {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 5}
    tiny = make_tiny("qwen3", tmp_path, layer_types=layer_types, **windows)
    if kind is WithGraphs:
        use_fake_graphs(monkeypatch)
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
    actual: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    while core.has_work:
        step = core.step()
        assert step is not None
        for id, token in zip(step.request_ids, step.token_ids, strict=True):
            actual[id].append(token)
    assert core.scheduler.kv.windows == (None, 5, 5)
    for number, tokens in enumerate(prompts):
        assert actual[str(number)] == greedy(tiny[1], tokens, 12 - number), number


@pytest.mark.slow
@pytest.mark.parametrize("kind", [OnCPU, pytest.param(WithGraphs, marks=NEEDS_KERNELS)])
def test_pipeline_stages_on_the_device(
    kind: type[CudaDevice], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that received tensors are copied to the addresses of the captured graph.

    They must not be overwritten before they are sent on; token values come with the plans.
    """
    tiny = make_tiny("qwen3", tmp_path, num_hidden_layers=3)
    if kind is WithGraphs:
        use_fake_graphs(monkeypatch)
    use(kind, monkeypatch)
    engine = Engine(tiny[0], in_threads=False, pipeline_parallel_size=3, max_num_seqs=4)
    prompts = [list(range(start, start + length)) for start, length in ((5, 9), (40, 14), (40, 2), (60, 11))]
    for number, tokens in enumerate(prompts):
        engine.add(str(number), tokens, count=7)
    engine.run()
    assert not engine.executor.errors
    for number, tokens in enumerate(prompts):
        assert engine.tokens[str(number)] == greedy(tiny[1], tokens, 7), number


def data_parallel_plan(counts: tuple[int, ...], own_plan: StepPlan | None = None) -> StepPlan:
    """Return the plan of one of several engines; an idle engine takes part in the others' step."""
    own_plan = StepPlan.idle(-1) if own_plan is None else own_plan
    own_plan.counts = counts
    return own_plan


@pytest.mark.parametrize("backend", ["allgather_reducescatter", "all2all"])
def test_expert_parallel_engines(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a step that runs only for the other engine, padded to the graph that the other replays."""
    path, twin = make_tiny("qwen3_moe", tmp_path)
    use(OnCPU, monkeypatch)
    monkeypatch.setattr("quire.worker.cuda.graphs.Graphs.size_for", lambda self, count: -(-count // 8) * 8)
    settings = {"model": str(path), "dtype": "float32", "block_size": 4, "max_num_seqs": 4}
    settings |= {"use_tqdm_on_load": False, "num_gpu_blocks_override": 80, "all2all_backend": backend}
    settings |= {"enable_expert_parallel": True, "data_parallel_size": 2}
    made = [World(Rank(dp=rank), ep=group) for rank, group in enumerate(groups(2))]
    workers = [Worker(configure(settings), world) for world in made]
    for worker in workers:
        worker.start()
    new = [admission(row, PROMPTS[row], TABLES[row]) for row in (3, 0)]
    steps = [
        [data_parallel_plan((5, 0), plan(1, {3: 5}, admitted=new[:1])), data_parallel_plan((5, 0))],
        [
            data_parallel_plan((1, 11), plan(2, {3: 1})),
            data_parallel_plan((1, 11), plan(1, {0: 11}, admitted=new[1:])),
        ],
        [data_parallel_plan((0, 1)), data_parallel_plan((0, 1), plan(2, {0: 1}))],
        [data_parallel_plan((1, 1), plan(3, {3: 1})), data_parallel_plan((1, 1), plan(3, {0: 1}))],
    ]

    def run(world: World) -> list[int]:
        rank = world.rank.dp
        under_way = [workers[rank].submit(step[rank]) for step in steps]
        return [token for item in under_way for token in item.wait().token_ids.tolist()]

    actual = run_threads(2, run, worlds=lambda _: made)
    assert actual == [greedy(twin, PROMPTS[row], 3) for row in (3, 0)]


class FakeMemoryDevice(OnCPU):
    """A device with simulated memory."""

    def needs(self, config: EngineConfig, weights: int, sampler: Sampler, bound: int = 0) -> Needs:
        self.dummy_batches.compile = lambda *args: None  # type: ignore[method-assign]
        return CudaDevice.needs(self, config, weights, sampler, bound)

    def _captures(self, config: EngineConfig) -> bool:
        return False


def test_profiling_step_uses_all_features(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check penalties, logprobs and prompt logprobs, which need memory that the cache must not take."""
    output: list[Any] = []
    call = Sampler.__call__

    def watched(
        self: Sampler, logits: Tensor, rows: Any, state: SamplingRows, *rest: Any, **more: Any
    ) -> Sampled:
        output.append((len(rows), int(np.bitwise_and.reduce(state.flags[rows]))))
        return call(self, logits, rows, state, *rest, **more)

    monkeypatch.setattr(Sampler, "__call__", watched)
    answers = {"memory_allocated": 100, "max_memory_allocated": 700, "mem_get_info": (5000, 9000)}
    for name in ("reset_peak_memory_stats", "synchronize", "empty_cache", *answers):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: output.append(name) or answers.get(name))
    worker = started(FakeMemoryDevice, tiny, monkeypatch)
    every = RANDOM | LIMITED | PENALTIES | ALLOWED | BANNED | HELD | BIASED | LOGPROBS | TIMED
    assert output[:4] == ["reset_peak_memory_stats", "memory_allocated", (1, every), (4, every)]
    assert output.index("max_memory_allocated") > 3
    assert worker._runner is not None and worker._runner.sampler.counts is None
    needs = worker._runner.device.needs(worker.config, 1000, worker._runner.sampler)
    assert (needs.activations, needs.counts, needs.other, needs.total) == (600, 0, 3000, 4600)
    # 1, 2 and 4 sequences are captured: the largest is measured, and each keeps its logits and hidden states.
    monkeypatch.setattr(FakeMemoryDevice, "_captures", lambda *_: True)
    needs = worker._runner.device.needs(worker.config, 1000, worker._runner.sampler)
    facts = worker.config.checkpoint.facts
    assert needs.graphs == 3 * GRAPH_BYTES + 600 + (1 + 2) * (facts.vocab + facts.hidden) * 4


def test_states_of_rows_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the SSM states of the profiling step are not counted and are freed before the cache is
    allocated.
    """
    path, _ = make_tiny("granitemoehybrid", tmp_path)
    use(FakeMemoryDevice, monkeypatch)
    worker = Worker(configure({"model": str(path), "dtype": "float32", "use_tqdm_on_load": False}))
    worker.load()
    others, total = 3000, 1 << 30

    def held() -> int:
        """Return the number of cache bytes bound to the layers."""
        tensors = [
            vars(module)[name]
            for module in worker.model.modules()
            for name in ("k_cache", "v_cache", "conv_state", "state")
            if name in vars(module)
        ]
        storages = {item.data_ptr(): item.nbytes() for item in (t.untyped_storage() for t in tensors)}
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


def test_stage_before_the_last_measures_only_its_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a stage without head and sampler; its graphs keep x and residual."""
    path, _ = make_tiny("qwen3", tmp_path, num_hidden_layers=2)
    answers = {"memory_allocated": 100, "max_memory_allocated": 700, "mem_get_info": (5000, 9000)}
    for name in ("reset_peak_memory_stats", "synchronize", "empty_cache", *answers):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: answers.get(name))
    monkeypatch.setattr(FakeMemoryDevice, "_captures", lambda *_: True)
    use(FakeMemoryDevice, monkeypatch)
    engine = Engine(path, in_threads=False, pipeline_parallel_size=2, max_num_seqs=4)
    needs = engine.executor.workers[0]._needs
    facts, tokens = engine.config.checkpoint.facts, engine.config.scheduler.max_num_batched_tokens
    assert needs is not None and needs.activations == 600 + 2 * 3 * tokens * facts.hidden * 4
    # for 1 and 2 sequences, half of all
    assert needs.graphs == 2 * GRAPH_BYTES + 600 + 1 * 2 * facts.hidden * 4


@pytest.mark.parametrize("largest", [1, 3, 8, 100, 256, 1024])
def test_capture_sizes_end_at_the_largest_batch(largest: int) -> None:
    sizes = ladder(largest)
    assert sizes[0] == 1 and sizes[-1] == largest and sizes == sorted(set(sizes))


def test_padding_reads_and_writes_no_block() -> None:
    sizes = BufferSizes(4, 4, 4, 8, groups=2)
    arrays = host_arrays(torch.full((bytes_of(sizes),), 7, dtype=torch.uint8), sizes)
    blank(arrays, 1, 9, 90)
    assert arrays["slots"][1:].tolist() == arrays["slots1"][1:].tolist() == [-1] * 3
    assert arrays["seq_lens"][1:].tolist() == [0] * 3
    assert arrays["rows"][1:].tolist() == [9] * 3 and arrays["block_places"][2:].tolist() == [90] * 6
    assert arrays["query_starts"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("num_tokens", "num_seqs"), [(1000, 1), (256, 4), (257, 1), (3, 8)])
def test_dummy_step_stays_within_the_block_tables(worker: Worker, num_tokens: int, num_seqs: int) -> None:
    """Check that no dummy sequence is longer than max_model_len, which would read beyond its table."""
    assert worker._runner is not None
    device = worker._runner.device
    assert isinstance(device, CudaDevice)
    batch, inputs = device.dummy_batches.make(device.dummy_batches.split(num_tokens, num_seqs))
    longest = device.block_tables.shape[2] * 4
    assert batch.seq_lens.max() <= longest and int(batch.seq_lens.sum()) == num_tokens
    assert int(batch.query_starts[-1]) == num_tokens and (inputs["slots"] == -1).all()
    assert len(batch.logit_tokens) == len(batch.seq_lens)

"""Tests of a worker with LoRA adapters: loaded in the background, copied into slots, used by rows."""

import gc
import shutil
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cuda_on_cpu import NEEDS_KERNELS, WithGraphs, use_fake_graphs
from lora_oracle import save_adapter
from oracle import make_tiny, run_hf
from torch import Tensor

from quire.configure import configure
from quire.data.lora import LoRARequest
from quire.data.params import SamplingParams
from quire.data.step_plan import Admission, LoRAAssignment, StepPlan
from quire.errors import ConfigError, RequestError
from quire.kernels.cpu import native
from quire.worker import lora as adapters
from quire.worker.cpu import CpuDevice
from quire.worker.device import Model
from quire.worker.lora import check_slots
from quire.worker.rows import Rows
from quire.worker.worker import Worker

PROMPTS = [[5, 9, 30, 31, 32], [7, 8], list(range(40, 51)), [11, 12, 13]]
NAMES = ["q_proj", "v_proj", "down_proj", "lm_head"]
STEPS = 6
NONE = np.empty(0, np.int32)


class Tiny:
    """A base model, three adapters, and the tokens that PEFT generates with each."""

    def __init__(self, folder: Path) -> None:
        self.path, hf = make_tiny("qwen3", folder)
        self.adapters: list[LoRARequest] = []
        self.expected: dict[tuple[int, int], list[int]] = {}
        for number in (0, 1, 2):
            name = f"a{number}"
            settings = {"target_modules": NAMES, "r": 4, "lora_alpha": 16}
            adapted = save_adapter(hf, folder / name, number, **settings)
            self.adapters.append(LoRARequest(name, number + 1, str(folder / name)))
            for row, prompt in enumerate(PROMPTS):
                self.expected[row, number] = self._tokens(adapted, prompt)
            hf = adapted.unload()
        for row, prompt in enumerate(PROMPTS):
            self.expected[row, -1] = self._tokens(hf, prompt)

    def _tokens(self, model: Any, prompt: list[int]) -> list[int]:
        ids = list(prompt)
        for _ in range(STEPS):
            ids.append(int(run_hf(model, ids)[-1].argmax()))
        return ids[len(prompt) :]

    def start(self, **settings: Any) -> Worker:
        base_settings = {"model": str(self.path), "dtype": "float32", "block_size": 32, "max_num_seqs": 4}
        base_settings |= {"use_tqdm_on_load": False, "num_gpu_blocks_override": 20}
        base_settings |= {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 2, "max_lora_rank": 8}
        worker = Worker(configure(base_settings | settings))
        worker.start()
        return worker


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("adapters"))


def admission(row: int, slot: int, **params: Any) -> Admission:
    return Admission(
        row=row,
        request_id=str(row),
        token_ids=PROMPTS[row],
        prompt_len=len(PROMPTS[row]),
        num_computed=0,
        block_ids=[[row + 1]],
        params=SamplingParams(temperature=0, **params),
        seed=0,
        adapter=slot,
    )


def step(worker: Worker, rows: list[int], counts: list[int], **changes: Any) -> Any:
    plan = StepPlan(
        step=1,
        released=[],
        admitted=changes.pop("admitted", []),
        block_rows=NONE,
        block_ids=NONE,
        rows=np.array(rows, np.int32),
        num_tokens=np.array(counts, np.int32),
        samples=np.full(len(rows), True),
        **changes,
    )
    return worker.submit(plan).wait()


def generate(worker: Worker, slots: dict[int, int], adapters: list[LoRAAssignment]) -> dict[int, list[int]]:
    """Generate tokens for these rows, each with the adapter of its slot."""
    rows = list(slots)
    admitted = [admission(row, slot) for row, slot in slots.items()]
    lens = [len(PROMPTS[row]) for row in rows]
    actual = [step(worker, rows, lens, admitted=admitted, adapters=adapters).token_ids]
    actual += [step(worker, rows, [1] * len(rows)).token_ids for _ in range(STEPS - 1)]
    return {row: np.stack(actual)[:, place].tolist() for place, row in enumerate(rows)}


def test_rows_of_one_batch_use_their_own_adapters(tiny: Tiny) -> None:
    """Check for swapped slots, tapes recorded for other rows, and slots that keep an old adapter."""
    worker = tiny.start()
    facts = [worker.fetch_adapter(lora) for lora in tiny.adapters[:2]]
    assert [fact.rank for fact in facts] == [4, 4] and facts[0].digest != facts[1].digest
    put = [LoRAAssignment(slot, tiny.adapters[slot]) for slot in (0, 1)]
    slots = {3: -1, 0: 1, 2: 0, 1: 1}
    actual = generate(worker, slots, put)
    assert actual == {row: tiny.expected[row, slot] for row, slot in slots.items()}
    second = {0: -1, 1: -1, 2: -1, 3: -1}
    assert generate(worker, second, []) == {row: tiny.expected[row, -1] for row in second}
    worker.fetch_adapter(tiny.adapters[2])
    actual = generate(worker, {1: 1, 0: 0}, [LoRAAssignment(1, tiny.adapters[2])])
    assert actual == {1: tiny.expected[1, 2], 0: tiny.expected[0, 0]}


@pytest.mark.skipif(native.library() is None, reason="there are no native kernels here")
def test_decodes_with_adapters_use_tapes(tiny: Tiny) -> None:
    """Check that no torch operation among the kernels prevents recording."""
    worker = tiny.start()
    generate(worker, {0: 0, 1: -1}, [LoRAAssignment(0, tiny.adapters[0])])
    generate(worker, {0: -1, 1: -1}, [])
    device: Any = worker._runner
    assert isinstance(device.device, CpuDevice)
    tapes = device.device._tapes._tapes
    assert len(tapes) == 2 and all(tape is not None for tape in tapes.values())


def test_drafts_are_computed_without_adapters(tiny: Tiny) -> None:
    """Check that the drafter does not get the head with the adapters of other tokens."""
    worker = tiny.start()
    device: Any = worker._runner
    seen: list[object] = []

    class Drafts:
        observes = True

        def observe(self, batch: Any, states: Any) -> None:
            seen.append(batch.lora)
            worker.model.logits(torch.zeros(7, 64))

        def propose(self, ends: Any, most: int) -> Tensor:
            return torch.zeros(len(ends.rows), most, dtype=torch.int64)

    device.device.drafter = Drafts()
    put = [LoRAAssignment(0, tiny.adapters[0])]
    step(worker, [0], [len(PROMPTS[0])], admitted=[admission(0, 0)], adapters=put)
    assert len(seen) == 1 and seen[0] is not None, "the target's own step has adapters"


@pytest.mark.slow
@NEEDS_KERNELS
def test_graphs_with_and_without_adapters(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check for a row with adapter in a graph without, slots of the step before, and padding with a slot."""

    def open_device(model: Model, all_rows: Rows, device: torch.device, *drafts: Any) -> WithGraphs:
        return WithGraphs(model, all_rows, lambda logits, *args: logits.argmax(-1), device)

    use_fake_graphs(monkeypatch)
    monkeypatch.setattr("quire.worker.loaded_model.open_device", open_device)
    worker, put = tiny.start(), [LoRAAssignment(slot, tiny.adapters[slot]) for slot in (0, 1)]
    for slots in ({3: -1, 0: 1, 2: 0}, {3: -1, 0: -1}, {2: 1}):
        actual = generate(worker, slots, put)
        assert actual == {row: tiny.expected[row, slot] for row, slot in slots.items()}


def test_prompt_logprobs_use_the_adapter(tiny: Tiny) -> None:
    """Check that the head uses the slots of all prompt rows, not only of the sampled ones."""
    worker = tiny.start()
    changes = {
        "admitted": [admission(2, 0, prompt_logprobs=1)],
        "adapters": [LoRAAssignment(0, tiny.adapters[1])],
    }
    first = step(worker, [2], [len(PROMPTS[2])], **changes)
    actual = [logprob.logprobs[0] for logprob in first.prompt_logprobs[2]]
    plain = step(tiny.start(), [2], [11], admitted=[admission(2, -1, prompt_logprobs=1)])
    assert not np.allclose(actual, [logprob.logprobs[0] for logprob in plain.prompt_logprobs[2]], atol=1e-2)
    assert first.token_ids.tolist() == tiny.expected[2, 1][:1]


def test_host_cache_keeps_recent_adapters_and_those_in_slots(tiny: Tiny) -> None:
    """Check that adapters of running requests stay and that the cache is bounded."""
    worker = tiny.start()
    adapters = worker.adapters
    assert adapters is not None
    adapters.max_cached = 2
    one, two, three = tiny.adapters
    worker.fetch_adapter(one)
    adapters.put(0, one)
    for lora in (two, three):
        worker.fetch_adapter(lora)
    assert set(adapters._cached) == {"a0", "a2"}
    worker.drop_adapter("a0")
    assert set(adapters._cached) == {"a2"}


def test_inplace_load_reads_the_adapter_again(tiny: Tiny, tmp_path: Path) -> None:
    worker = tiny.start()
    place = tmp_path / "changing"
    shutil.copytree(tiny.adapters[0].path, place)
    first = worker.fetch_adapter(LoRARequest("x", 1, str(place)))
    shutil.copytree(tiny.adapters[1].path, place, dirs_exist_ok=True)
    assert worker.fetch_adapter(LoRARequest("x", 1, str(place))) == first
    changed = worker.fetch_adapter(LoRARequest("x", 1, str(place), load_inplace=True))
    assert changed == worker.fetch_adapter(tiny.adapters[1]) != first


def test_slots_are_refilled_after_sleep(tiny: Tiny) -> None:
    worker = tiny.start()
    generate(worker, {0: 0}, [LoRAAssignment(0, tiny.adapters[0])])
    worker.sleep(2)
    worker.wake_up(["weights", "kv_cache"])
    worker.warm_up()
    assert generate(worker, {0: 0, 1: 0}, []) == {row: tiny.expected[row, 0] for row in (0, 1)}


def test_closed_worker_frees_weights_and_slots(tiny: Tiny) -> None:
    worker, dropped = tiny.start(), []
    assert worker.adapters is not None
    generate(worker, {0: 0}, [LoRAAssignment(0, tiny.adapters[0])])
    memory = worker.adapters.slots._memory
    assert memory is not None
    held = [weakref.ref(item) for item in (worker.model, memory)]
    worker._offloaded = SimpleNamespace(drop=lambda: dropped.append(True))  # type: ignore[assignment]
    worker.balancer = SimpleNamespace(layers=[worker.model])  # type: ignore[assignment]
    del memory
    worker.close()
    gc.collect()
    assert dropped == [True] and [item() for item in held] == [None, None]


def test_pinned_memory_thread_ends_with_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that no thread keeps the slots of the device alive."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(adapters, "_QUIET_S", 0.01)
    kept, done = list[tuple[int, int]](), threading.Event()

    class Slots:
        device, dtype, slot_size = torch.device("cuda", 0), torch.float16, 7

        def pin_spares(self, count: int, size: int) -> None:
            kept.append((count, size))
            done.set()

    spares = adapters._Spares(Slots(), max_cached=3)  # type: ignore[arg-type]
    assert done.wait(60)
    spares.end()
    spares.join(60)
    assert not spares.is_alive() and kept == [(3, 7)]


def test_lora_is_not_built_unless_enabled(tiny: Tiny) -> None:
    worker = tiny.start(enable_lora=False)
    assert all(getattr(module, "lora_layer", None) is None for module in worker.model.modules())
    with pytest.raises(RequestError, match="LoRA is not enabled"):
        worker.fetch_adapter(tiny.adapters[0])


def test_slots_that_do_not_fit_are_rejected(tiny: Tiny) -> None:
    worker = tiny.start()
    assert worker.adapters is not None and worker._needs is not None
    slots = worker.adapters.slots
    assert worker._needs.adapters == slots.num_bytes == 2 * slots.slot_size * torch.float32.itemsize
    with pytest.raises(ConfigError, match="2 slots for adapters of rank 8 take .* lower max_loras"):
        check_slots(slots, slots.num_bytes - 1)

"""Drafts on a device that runs ahead of the host: outputs are those without any."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuda_on_cpu import OnCPU, WithGraphs, pretend_graphs
from drafted import Eager
from oracle import make_tiny
from torch import Tensor

from quire.attention.backend import choose
from quire.attention.batch import Batch
from quire.capacity import CacheSize
from quire.config.speculation import SpecFacts
from quire.core.build import build_scheduler
from quire.core.engine_core import EngineCore
from quire.data.params import SamplingParams
from quire.data.request import Request
from quire.errors import ConfigError
from quire.kernels.triton import drafts
from quire.prepare import configure
from quire.sampling.chance import Asked, sample, uniform
from quire.sched.drafting import Drafting
from quire.worker.cuda import Cuda
from quire.worker.device import Model
from quire.worker.drafter import check_ahead
from quire.worker.rows import Rows
from quire.worker.worker import Worker

DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a window, so that there are two groups of layers."""
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
    windows = {"use_sliding_window": True, "sliding_window": 9}
    return make_tiny("qwen3", tmp_path_factory.mktemp("drafts"), **kinds, **windows)[0]


def draw(shown: int, logits: Tensor, asked: Asked) -> Tensor:
    """By the numbers of seeds and positions, one of so many tokens: with few of them much is repeated."""
    numbers = uniform(asked.seeds.numpy().view(np.uint64), asked.positions.numpy().astype(np.int32))
    logits = logits[:, :shown]
    heat = asked.temperature.clamp(min=1e-3)[:, None]
    by_chance = sample(logits.float() / heat, torch.from_numpy(numbers))
    return torch.where(asked.temperature > 0, by_chance, logits.argmax(-1))


def hidden(self: Model, batch: Batch) -> Any:
    for group in batch.groups:
        group.seq_lens_host = batch.seq_lens.numpy().copy()
        self.attention.plan(group)
    return self.forward(batch)


def core_of(
    kind: type[Cuda],
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pace: Eager | None,
    num_blocks: int,
    asked: dict[str, Any] = DRAFTS,
    shown: int = 6,
) -> EngineCore:
    def open_device(model: Model, all_rows: Rows, device: torch.device, drafts: SpecFacts | None) -> Cuda:
        return kind(model, all_rows, partial(draw, shown), device, drafts)

    pretend_graphs(monkeypatch)
    # Lengths that a GPU's attention would read there.
    monkeypatch.setattr("quire.worker.worker.choose", choose)
    # Kernels are held against these elsewhere, and take their time on a CPU.
    here = "quire.worker.speculation."
    monkeypatch.setattr(here + "derive", drafts.derive_reference)
    monkeypatch.setattr(here + "verify", lambda *given: drafts.verify_reference(*given[:3]))
    monkeypatch.setattr(
        here + "look_up", lambda known, step, _, least: drafts.look_up_reference(known, step, least)
    )
    monkeypatch.setattr("quire.worker.device.Model.hidden", hidden)
    monkeypatch.setattr("quire.worker.worker.open_device", open_device)
    given: dict[str, Any] = {"model": str(path), "dtype": "float32", "block_size": 4, "max_num_seqs": 4}
    given |= {"max_num_batched_tokens": 24, "use_tqdm_on_load": False, "max_model_len": 64}
    given |= {"num_gpu_blocks_override": 200, "enable_prefix_caching": True}
    worker = Worker(configure(given | ({} if pace is None else {"speculative_config": asked})))
    worker.start()
    size = CacheSize(num_blocks, 64, 0, worker.layout.windows)
    scheduler = build_scheduler(worker.config, size)
    if pace is not None:
        scheduler.admitter.drafting = Drafting(pace, None, most=3, ahead=True, max_draws=512)
    return EngineCore(worker, scheduler, depth=2)  # type: ignore[arg-type]


PARAMS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.6, "top_k": 4, "logprobs": 1},
    {"temperature": 0, "stop_token_ids": list(range(0, 128, 3)), "min_tokens": 9},
    {"temperature": 0.5, "logit_bias": {7: 2.0}, "top_p": 0.9},
    {"temperature": 0, "bad_words_token_ids": [[5, 6]]},
    {"temperature": 0.4, "min_p": 0.2},
    {"temperature": 0, "stop_token_ids": [11]},
]


def outputs(core: EngineCore) -> dict[str, Any]:
    """Prompts that repeat themselves, one that fills the longest sequence, two that begin alike."""
    for number, asked in enumerate(PARAMS):
        tokens = ([5, 6, 7, 8] * 9)[: 7 + 4 * number] + [number]
        params = SamplingParams(max_tokens=20, ignore_eos=True, **asked)
        core.add(
            Request(
                id=str(number),
                tokens=tokens,
                params=params,
                prompt_len=len(tokens),
                limit=min(len(tokens) + 14 + 6 * (number % 3), 64),
                seed=number,
            )
        )
    found: dict[str, Any] = {str(number): [] for number in range(len(PARAMS))}
    while core.has_work:
        step = core.step()
        assert step is not None
        for id, tokens in step.by_request():
            found[id] += tokens
        for id, logprobs in step.logprobs.items():
            found.setdefault(f"logprobs {id}", []).extend(one.token_ids[0] for one in logprobs)
    return found


@pytest.fixture(scope="module")
def plain(tiny: Path) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patched:
        return outputs(core_of(OnCPU, tiny, patched, None, 60))


@pytest.mark.parametrize("kind", [OnCPU, WithGraphs])
def test_a_model_drafts(kind: type[Cuda], tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target itself, so that greedy rows accept most. Catches a draft that sees other tokens."""
    asked = {"method": "draft_model", "model": str(tiny), "num_speculative_tokens": 3}
    pace = Eager()
    plain = outputs(core_of(OnCPU, tiny, monkeypatch, None, 60, shown=128))
    assert outputs(core_of(kind, tiny, monkeypatch, pace, 60, asked, shown=128)) == plain
    assert pace.num_held > 0.3 * pace.num_drafts


@pytest.mark.parametrize(("kind", "num_blocks"), [(OnCPU, 60), (WithGraphs, 60), (WithGraphs, 38)])
def test_outputs_are_those_without_drafts(
    kind: type[Cuda], num_blocks: int, tiny: Path, plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths that the host knows too late, drafts beside prompts, a padded place that counts, a draw by the
    number of another position; the last run has too few blocks for all."""
    pace = Eager()
    core = core_of(kind, tiny, monkeypatch, pace, num_blocks)
    assert outputs(core) == plain
    assert plain["logprobs 1"] == plain["1"]
    assert pace.num_held > 10 and pace.num_held < pace.num_drafts
    assert (core.scheduler.num_preemptions > 0) == (num_blocks == 38)


@pytest.mark.parametrize(
    "given, words",
    [(("FLASHINFER", 4, False), "TRITON_ATTN"), (("TRITON_ATTN", 8, True), "num_speculative_tokens=8")],
)
def test_attention_that_plans_on_the_host_has_no_drafts(given: tuple[str, int, bool], words: str) -> None:
    backend, num_drafts, latent = given
    with pytest.raises(ConfigError, match=words):
        check_ahead(backend, num_drafts, latent=latent)
    check_ahead("TRITON_ATTN", num_drafts, latent=False)

"""Tests of draft tokens on a device that runs ahead of the host: outputs match those without drafts."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuda_on_cpu import NEEDS_KERNELS, OnCPU, WithGraphs, WithPrompts, use_fake_graphs
from drafted import EagerPolicy
from heads import HIDDEN, layer_weights, norm_weights, save_head
from oracle import make_tiny
from spec_reference import derive_reference, look_up_reference, verify_reference
from torch import Tensor

from quire.attention.backend import choose
from quire.attention.batch import Batch
from quire.config.speculation import SpecFacts
from quire.configure import configure
from quire.core.build import build_scheduler
from quire.core.engine_core import EngineCore
from quire.data.params import SamplingParams
from quire.data.request import Request
from quire.data.step_plan import StepOutput, StepPlan
from quire.errors import ConfigError
from quire.kernels.cpu import native
from quire.memory import CacheSize
from quire.sampling.counts import Counts
from quire.sampling.random import SamplingTensors, sample, uniform
from quire.sched.spec import Drafting
from quire.worker.cuda.device import CudaDevice
from quire.worker.cuda.graphs import Graph
from quire.worker.device import Model
from quire.worker.rows import Rows
from quire.worker.spec.drafter import check_ahead
from quire.worker.worker import Worker

DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with a sliding window, so that there are two cache groups."""
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
    windows = {"use_sliding_window": True, "sliding_window": 9}
    return make_tiny("qwen3", tmp_path_factory.mktemp("drafts"), **kinds, **windows)[0]


def draw(shown: int, logits: Tensor, sampling: SamplingTensors, constrained: object = None) -> Tensor:
    """Sample by seed and position from few tokens, so that outputs repeat often."""
    numbers = uniform(sampling.seeds.numpy().view(np.uint64), sampling.positions.numpy().astype(np.int32))
    logits = logits[:, :shown]
    heat = sampling.temperature.clamp(min=1e-3)[:, None]
    by_chance = sample(logits.float() / heat, torch.from_numpy(numbers))
    return torch.where(sampling.temperature > 0, by_chance, logits.argmax(-1))


def hidden(self: Model, batch: Batch) -> Any:
    for group in batch.groups:
        group.seq_lens_host = batch.seq_lens.numpy().copy()
        group.query_lens_host = np.diff(batch.query_starts.numpy())
        self.attention.plan(group)
    return self.forward(batch)


def core_of(
    kind: type[CudaDevice],
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pace: EagerPolicy | None,
    num_blocks: int,
    speculative: dict[str, Any] = DRAFTS,
    shown: int = 6,
) -> EngineCore:
    def open_device(
        model: Model, all_rows: Rows, device: torch.device, drafts: SpecFacts | None
    ) -> CudaDevice:
        return kind(model, all_rows, partial(draw, shown), device, drafts)

    if native.library() is None:
        pytest.skip("needs the C kernels")
    use_fake_graphs(monkeypatch)
    # Lengths that a GPU's attention kernel would read there.
    monkeypatch.setattr("quire.worker.loaded_model.choose", choose)
    # The kernels are tested elsewhere and are slow on a CPU.
    here = "quire.worker.cuda.draft_verify."
    monkeypatch.setattr(here + "derive", derive_reference)
    monkeypatch.setattr(here + "verify", lambda *settings: verify_reference(*settings[:3], *settings[5:]))
    monkeypatch.setattr(here + "look_up", lambda known, step, _, least: look_up_reference(known, step, least))
    monkeypatch.setattr("quire.worker.device.Model.hidden", hidden)
    monkeypatch.setattr("quire.worker.loaded_model.open_device", open_device)
    settings: dict[str, Any] = {"model": str(path), "dtype": "float32", "block_size": 4, "max_num_seqs": 4}
    settings |= {"max_num_batched_tokens": 24, "use_tqdm_on_load": False, "max_model_len": 64}
    settings |= {"num_gpu_blocks_override": 200, "enable_prefix_caching": True}
    worker = Worker(configure(settings | ({} if pace is None else {"speculative_config": speculative})))
    worker.start()
    size = CacheSize(num_blocks, 64, 0, worker.loaded.layout.windows)
    scheduler = build_scheduler(worker.config, size)
    if pace is not None:
        scheduler.admitter.drafting = Drafting(pace, None, max_drafts=3, ahead=True, max_samples=512)
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


ALIKE: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.6}, {"temperature": 1.0}] * 2
"""Greedy outputs, which a draft model with the same seeds and positions samples too."""


def outputs(core: EngineCore, params: list[dict[str, Any]] = PARAMS) -> dict[str, Any]:
    """Generate for repetitive prompts, one of max_model_len, and two with a common prefix."""
    for number, fields in enumerate(params):
        tokens = ([5, 6, 7, 8] * 9)[: 7 + 4 * number] + [number]
        wanted = SamplingParams(max_tokens=20, ignore_eos=True, **fields)
        core.add(
            Request(
                id=str(number),
                tokens=tokens,
                params=wanted,
                prompt_len=len(tokens),
                limit=min(len(tokens) + 14 + 6 * (number % 3), 64),
                seed=number,
            )
        )
    actual: dict[str, Any] = {str(number): [] for number in range(len(params))}
    while core.has_work:
        step = core.step()
        assert step is not None
        for id, tokens in step.by_request():
            actual[id] += tokens
        for id, logprobs in step.logprobs.items():
            actual.setdefault(f"logprobs {id}", []).extend(one.token_ids[0] for one in logprobs)
    return actual


@pytest.fixture(scope="module")
def plain(tiny: Path) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patched:
        return outputs(core_of(OnCPU, tiny, patched, None, 60))


class Pausing(EagerPolicy):
    """Sometimes gives no row drafts, so that a draft model has to catch up."""

    def lengths(self, rows: Any, available: Any, budget: int) -> Any:
        actual = super().lengths(rows, available, budget)
        return actual * (self.num_steps % 7 < 4)


def noted(step: Callable[[], StepOutput | None], num_drafted: list[int]) -> StepOutput | None:
    output = step()
    num_drafted.append(0 if output is None else sum(output.drafted.values()))
    return output


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model without windows, whose draft model may lag behind."""
    return make_tiny("llama", tmp_path_factory.mktemp("full"))[0]


@pytest.mark.parametrize(
    ("kind", "windows", "method"),
    [(WithGraphs, True, "greedy"), (OnCPU, False, "greedy"), (WithPrompts, False, "probabilistic")],
)
def test_draft_model_on_device(
    kind: type[CudaDevice],
    windows: bool,
    method: str,
    tiny: Path,
    full: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check the target as its own draft model, so that all drafts sampled in the same way are accepted.

    A draft model must compute every token once; rows with too many missing tokens get no drafts for a step.
    """
    path, pace = tiny if windows else full, Pausing()
    speculative = {"model": str(path), "num_speculative_tokens": 3, "draft_sample_method": method}
    params = ALIKE if method == "probabilistic" else ALIKE[:1] * len(ALIKE)
    plain = outputs(core_of(OnCPU, path, monkeypatch, None, 60, shown=128), params)
    core, num_drafted = core_of(kind, path, monkeypatch, pace, 60, speculative, shown=128), list[int]()
    monkeypatch.setattr(core, "step", partial(noted, core.step, num_drafted))
    assert outputs(core, params) == plain
    assert pace.num_held == sum(num_drafted) > 30
    assert (pace.num_drafts > pace.num_held) != windows, "no row was late, or one that must not be"


def test_draft_head_on_device(full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that drafts, which depend on the hidden states of each step, are equal with and
    without graphs.
    """
    torch.manual_seed(1)
    norms = norm_weights("midlayer.input_layernorm", "midlayer.hidden_norm", "norm")
    weights = layer_weights("midlayer", 2 * HIDDEN) | norms
    weights["fc.weight"] = 0.2 * torch.randn(HIDDEN, 3 * HIDDEN)
    named = {"architectures": ["LlamaForCausalLMEagle3"], "eagle_aux_hidden_state_layer_ids": [0, 1, 1]}
    speculative = {"model": str(save_head(tmp_path / "head", weights, **named)), "num_speculative_tokens": 3}
    plain = outputs(core_of(OnCPU, full, monkeypatch, None, 60))
    paces = {kind: EagerPolicy() for kind in (OnCPU, WithGraphs, WithPrompts)}
    for kind, pace in paces.items():
        assert outputs(core_of(kind, full, monkeypatch, pace, 60, speculative)) == plain
        assert 3 < pace.num_held < pace.num_drafts
    assert len({(pace.num_held, pace.num_drafts) for pace in paces.values()}) == 1


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of sequences of each prompt step that a graph runs."""
    actual: list[int] = []
    load = Graph.load

    def counted(self: Graph, plan: StepPlan, *settings: Any) -> None:
        if self.is_mixed:
            actual.append(len(plan.rows))
        load(self, plan, *settings)

    monkeypatch.setattr(Graph, "load", counted)
    return actual


@pytest.mark.parametrize(
    ("kind", "num_blocks"), [(OnCPU, 60), (WithGraphs, 60), (WithGraphs, 34), (WithPrompts, 60)]
)
def test_outputs_match_outputs_without_drafts(
    kind: type[CudaDevice],
    num_blocks: int,
    tiny: Path,
    plain: dict[str, Any],
    short: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check late lengths, drafts beside prompts, padded positions and random numbers; one run has too few
    blocks.
    """
    pace = EagerPolicy()
    core = core_of(kind, tiny, monkeypatch, pace, num_blocks)
    assert outputs(core) == plain
    assert plain["logprobs 1"] == plain["1"]
    assert pace.num_held > 10 and pace.num_held < pace.num_drafts
    assert (core.scheduler.num_preemptions > 0) == (num_blocks == 34)
    assert (kind is WithPrompts) == (len(set(short)) > 1)


@NEEDS_KERNELS
def test_penalties_count_accepted_drafts(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a vocabulary of four tokens, so that many drafts are accepted and many rejected."""
    few: dict[str, Any] = {"allowed_token_ids": [3, 4, 5, 6]}
    params = [
        few | {"temperature": 0, "repetition_penalty": 1.3},
        few | {"temperature": 0.7, "frequency_penalty": 0.4, "presence_penalty": 0.2},
        few | {"temperature": 0.5},
    ]
    actual, pace = [], EagerPolicy()
    for item in (None, pace):
        core = core_of(WithGraphs, full, monkeypatch, item, 60, shown=128)
        sampler = core.executor._runner.sampler  # type: ignore[attr-defined]
        sampler.counts = Counts(4, 128, torch.device("cpu"))
        actual.append(outputs(core, params))
    assert actual[0] == actual[1] and 5 < pace.num_held < pace.num_drafts


@pytest.mark.parametrize(
    "settings, words",
    [(("FLASHINFER", 4, False), "TRITON_ATTN"), (("TRITON_ATTN", 8, True), "num_speculative_tokens=8")],
)
def test_host_planned_attention_disables_drafts(settings: tuple[str, int, bool], words: str) -> None:
    backend, num_drafts, latent = settings
    with pytest.raises(ConfigError, match=words):
        check_ahead(backend, num_drafts, uses_mla=latent)
    check_ahead("TRITON_ATTN", num_drafts, uses_mla=False)

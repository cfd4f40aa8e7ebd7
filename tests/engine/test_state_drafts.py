"""Tests of drafts in models with SSM states: answers with drafts equal those without them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_on_cpu import NEEDS_KERNELS, use_fake_device
from heads import HIDDEN, add_prediction, norm_weights
from oracle import make_tiny
from test_draft_models import AlwaysDraft, draft_of
from test_drafts import ReplayProposer
from test_state_caching import EVERY_8, KINDS, WITH_STATES
from tiny import check_against, generate, generate_preempted, open_tiny, prompts_of

from quire import LLM, SamplingParams
from quire.data.outputs import RequestOutput
from quire.kernels.cpu import native
from quire.kernels.triton.ssm import TritonStateOps
from quire.sched.spec import Drafting

MOST = 4
"""Most drafts of a step; the five states of a row do not divide the lengths of cached prefixes."""
METHODS: dict[str, dict[str, Any]] = {
    "replayed": {"method": "ngram"},
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "suffix": {"method": "suffix", "suffix_decoding_min_token_prob": 0.0},
    "draft_model": {"method": "draft_model"},
    "eagle3": {"method": "eagle3"},
}
"""Draft methods; `replayed` proposes the answer itself with some mistakes."""
SETTINGS = EVERY_8 | {"max_num_batched_tokens": 20, "max_num_seqs": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=18, ignore_eos=True)
SAMPLED = SamplingParams(
    temperature=1.0, seed=5, top_p=0.9, repetition_penalty=1.1, max_tokens=12, ignore_eos=True
)
MTP = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
}


def repeating() -> list[list[int]]:
    """Return prompts with repetitions, so that lookups find drafts."""
    return [(prompt * 6)[:27] for prompt in prompts_of(5, 7, 9, 6)]


def open_drafting(path: Path, config: dict[str, Any], **settings: Any) -> tuple[LLM, AlwaysDraft]:
    """Open an engine that drafts whatever it costs, and return it with the counts of its drafts."""
    llm = open_tiny(path, speculative_config={"num_speculative_tokens": MOST} | config, **SETTINGS)
    pace = AlwaysDraft()
    drafting = llm.llm_engine.core.scheduler.admitter.drafting
    assert drafting is not None
    drafting._draft_length = pace
    return llm, pace


def answers(llm: LLM) -> list[list[int]]:
    """Generate for prompts in chunks, and once more with a filled prefix cache. Return all tokens."""
    prompts, hits, texts = repeating(), [], []
    for _ in range(2):
        outputs: list[RequestOutput] = llm.generate(prompts, [GREEDY, SAMPLED] * 2, use_tqdm=False)
        hits.append(sum(output.num_cached_tokens or 0 for output in outputs))
        texts += [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
    assert hits == [0, 24 * len(prompts)]
    return texts


def with_draft(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the settings with a draft model of random weights, if they need one."""
    kind = {"draft_model": "another", "eagle3": "a head"}.get(config["method"])
    return config if kind is None else config | draft_of(kind, folder, folder)


@pytest.fixture(scope="module")
def plain() -> dict[str, list[list[int]]]:
    """Return the answers without drafts, by family."""
    return {}


QUICK = [("Qwen3NextForCausalLM", method) for method in ("ngram", "suffix", "draft_model")]


def is_quick(family: str, method: str) -> bool:
    return family in KINDS and method == "replayed" or (family, method) in QUICK


@pytest.mark.skipif(native.library() is None, reason="torch's sums depend on the number of rows")
@pytest.mark.parametrize(
    ("family", "method"),
    [
        pytest.param(family, method, marks=[] if is_quick(family, method) else pytest.mark.slow)
        for family in WITH_STATES
        for method in METHODS
    ],
)
def test_drafts_do_not_change_answers(
    family: str, method: str, tmp_path: Path, plain: dict[str, list[list[int]]]
) -> None:
    path, _ = make_tiny(family, tmp_path / "target")
    if family not in plain:
        plain[family] = answers(open_tiny(path, **SETTINGS))
    llm, pace = open_drafting(path, with_draft(METHODS[method], tmp_path), **SETTINGS)
    if method == "replayed":
        llm.llm_engine.core.scheduler.admitter.drafting._proposer = ReplayProposer(plain[family])
    assert answers(llm) == plain[family]
    assert pace.num_drafts
    if method in ("replayed", "draft_model", "eagle3"):
        assert pace.num_drafts > pace.num_held, "a test of rejected drafts needs some"
    if method in ("replayed", "suffix"):
        assert pace.num_held, "a test of accepted drafts needs some"


@pytest.mark.parametrize("family", ["qwen3_next", pytest.param("qwen3_5_text", marks=pytest.mark.slow)])
def test_mtp_of_a_model_with_states(family: str, tmp_path: Path) -> None:
    path, _ = make_tiny(family, tmp_path, **MTP)
    torch.manual_seed(3)
    weights = norm_weights("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
    weights["mtp.fc.weight"] = 0.2 * torch.randn(HIDDEN, 2 * HIDDEN)
    add_prediction(path, ["mtp.layers.0", "model.layers.2"], weights)
    llm, pace = open_drafting(path, {"method": "mtp"}, **SETTINGS)
    assert answers(llm) == answers(open_tiny(path, **SETTINGS))
    assert pace.num_drafts > pace.num_held


def test_preempted_request_continues_after_drafts(tmp_path: Path) -> None:
    """Check against transformers: the oldest request loses its row between steps with drafts."""
    path, hf_model = make_tiny("qwen3_next", tmp_path)
    llm, pace = open_drafting(path, METHODS["ngram"], max_num_batched_tokens=16, max_num_seqs=4, **EVERY_8)
    check_against(hf_model, generate_preempted(llm, repeating()[:3], count=12, at=(3, 6, 8)))
    assert pace.num_drafts > pace.num_held


@NEEDS_KERNELS
@pytest.mark.parametrize(
    ("method", "in_triton"),
    [
        ("ngram", False),
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in ("ngram", "draft_model")),
    ],
)
def test_drafts_ahead_of_the_host(
    method: str, in_triton: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check graphs of steps that are planned before the number of accepted drafts is known to the host."""
    path, hf_model = make_tiny("qwen3_next", tmp_path / "target")
    config = with_draft(METHODS[method], tmp_path)
    use_fake_device(monkeypatch)
    if in_triton:
        monkeypatch.setattr("quire.layers.ssm.choose", lambda device, dtype: TritonStateOps())
    sizes = {"max_model_len": 64, "max_num_seqs": 4, "num_gpu_blocks_override": 200}
    llm, pace = open_drafting(path, config, max_num_batched_tokens=24, **sizes, **EVERY_8)
    core = llm.llm_engine.core
    core.scheduler.admitter.drafting = Drafting(pace, None, max_drafts=MOST, ahead=True, max_samples=512)
    core.step_queue.depth = 2
    for hits in (0, 24):
        outputs = generate(llm, repeating()[:3], count=10)
        check_against(hf_model, outputs)
        assert [output.num_cached_tokens for output in outputs] == [hits] * 3
    assert pace.num_drafts > pace.num_held

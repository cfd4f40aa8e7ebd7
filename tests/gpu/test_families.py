"""Every architecture on a GPU: in float32 as transformers, in bfloat16 the same with graphs and without."""

from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from on_gpu import COUNTS, ROUNDING, answers, distances, opened
from oracle import make_tiny
from tiny import check_against, expected_of, logits_of
from zoo import ZOO

from quire.checkpoint.layout import cache_specs, has_ssm_state
from quire.data.outputs import RequestOutput
from quire.worker.cuda.graphs import Graph, Graphs

pytestmark = pytest.mark.gpu
NOISE = 0.5
"""What two ways to round may make of that logit in any step, likewise."""
Tiny = tuple[Path, Any]


@pytest.fixture(scope="module", params=ZOO)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(request.param, tmp_path_factory.mktemp(request.param))


def test_float32_logits_are_transformers(tiny: Tiny) -> None:
    assert torch.get_float32_matmul_precision() == "highest", "TF32 is another type"
    path, hf_model = tiny
    check_against(hf_model, answers(opened(path, "float32")), tolerance=5e-3, ties=5e-3)


def test_bfloat16_decodes_are_the_same_from_graphs(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a graph has read when it was captured, or does to the rows that pad it."""
    path, hf_model = tiny
    llm, sizes, replay = opened(path, "bfloat16"), set[int](), Graph.replay

    def counted(self: Graph, count: int) -> Any:
        sizes.add(count)
        return replay(self, count)

    monkeypatch.setattr(Graph, "replay", counted)
    played = answers(llm)
    assert sizes == {1, 2, 3, 4}, "a decode that ran without a graph"
    monkeypatch.setattr(Graphs, "find", lambda graphs, plan, *, adapters=False: None)
    sizes.clear()
    eager = answers(llm)
    assert not sizes
    facts = llm.config.checkpoint.facts
    rough = facts.moe is not None or has_ssm_state(cache_specs(facts))
    alike = sum(num_alike(*pair, strict=not rough) for pair in zip(played, eager, strict=True))
    assert alike > 0.6 * sum(COUNTS)
    off = [distances(logits_of(output), expected_of(hf_model, output)) for output in (*played, *eager)]
    assert median(chain.from_iterable(off)) < ROUNDING


def num_alike(played: RequestOutput, eager: RequestOutput, *, strict: bool) -> int:
    """The steps before a near tie went the other way: of tokens, or, unless `strict`, of experts or in what a
    state adds up."""
    ours, theirs = logits_of(played), logits_of(eager)
    said = [output.outputs[0].token_ids for output in (played, eager)]
    for step, apart in enumerate(distances(ours, theirs)):
        if apart > NOISE:
            assert not strict, f"step {step}: logits differ by {apart} deviations"
            return step
        if said[0][step] != said[1][step]:
            best, second = theirs[step].topk(2).values.tolist()
            assert best - second < 2 * NOISE * theirs[step].std(), f"step {step}: {said}"
            return step + 1
    return len(ours)

"""Tests of every architecture on a GPU: float32 against transformers, bfloat16 with and without graphs."""

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
"""Limit of that error in any step between two ways of rounding, in the same units."""
Tiny = tuple[Path, Any]


@pytest.fixture(scope="module", params=ZOO)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(request.param, tmp_path_factory.mktemp(request.param))


def test_float32_logits_match_transformers(tiny: Tiny) -> None:
    assert torch.get_float32_matmul_precision() == "highest", "TF32 is another type"
    path, hf_model = tiny
    check_against(hf_model, answers(opened(path, "float32")), tolerance=5e-3, ties=5e-3)


def test_bfloat16_decodes_match_with_and_without_graphs(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check for values read at capture, and for effects of padding rows."""
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
    """Return the number of steps before a near tie goes the other way.

    Near ties are of tokens or, unless `strict`, of experts or accumulated states.
    """
    actual, expected = logits_of(played), logits_of(eager)
    outputs = [output.outputs[0].token_ids for output in (played, eager)]
    for step, apart in enumerate(distances(actual, expected)):
        if apart > NOISE:
            assert not strict, f"step {step}: logits differ by {apart} deviations"
            return step
        if outputs[0][step] != outputs[1][step]:
            best, second = expected[step].topk(2).values.tolist()
            assert best - second < 2 * NOISE * expected[step].std(), f"step {step}: {outputs}"
            return step + 1
    return len(actual)

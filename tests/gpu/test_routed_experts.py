"""Tests of returned experts on a GPU: in graphs, eagerly and with drafts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from on_gpu import answers, opened
from oracle import make_tiny
from router_oracle import experts_of

pytestmark = pytest.mark.gpu
LEAST_EQUAL = 0.98
"""Share of equal experts: the logits of the router differ by rounding, and so may their order."""


@pytest.mark.parametrize(
    "settings",
    [{}, {"enforce_eager": True}, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}],
    ids=["graphs", "eager", "drafts"],
)
def test_experts_are_those_of_transformers(settings: dict[str, Any], tmp_path: Path) -> None:
    path, hf_model = make_tiny("qwen3_moe", tmp_path)
    llm = opened(path, "float32", enable_return_routed_experts=True, **settings)
    for output in answers(llm):
        expected = experts_of(hf_model, [*(output.prompt_token_ids or ()), *output.outputs[0].token_ids])[:-1]
        actual = output.outputs[0].routed_experts
        assert actual is not None and actual.shape == expected.shape
        assert (np.sort(actual) == np.sort(expected)).mean() > LEAST_EQUAL
    llm.llm_engine.close()

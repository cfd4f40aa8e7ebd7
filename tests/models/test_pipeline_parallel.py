"""Tests of every decoder in pipeline stages against the whole model."""

import logging
from pathlib import Path

import pytest
import torch
from oracle import load_tiny, make_tiny, run_paged
from torch import Tensor, nn
from zoo import ZOO

from quire.attention.batch import Batch
from quire.checkpoint.model import read_checkpoint
from quire.config.parallel import Stage
from quire.errors import ConfigError
from quire.models import MODELS
from quire.models.decoder import Decoder

PROMPTS = [[5, 9, 30, 31, 32, 2, 8], [7, 8, 11]]
STEPS = [[4, 0], [2, 3], [1, 0]]
SHARING = (
    "Gemma3nForCausalLM",
    "Gemma4ForCausalLM",
    "LongcatFlashForCausalLM",
    "OuroForCausalLM",
    "Zamba2ForCausalLM",
)
"""Models whose layers share keys and values, or weights, between stages."""
BY_CLASS = {
    MODELS[name]: name
    for name in reversed(ZOO)
    if name in MODELS and issubclass(MODELS[name], Decoder) and name not in SHARING
}
"""One architecture per model class: the class, not the settings, decides what a stage holds."""


class Chained(nn.Module):
    """Stages run in sequence in one thread."""

    def __init__(self, stages: list[nn.Module]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def forward(self, batch: Batch) -> Tensor:
        for stage in self.stages[:-1]:
            batch.intermediate_tensors = torch.stack(stage(batch))
        out: Tensor = self.stages[-1](batch)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.stages[-1].logits(hidden)
        return out


@pytest.mark.parametrize("architecture", SHARING)
def test_models_with_shared_layers_have_one_stage(architecture: str, tmp_path: Path) -> None:
    path, _ = make_tiny(architecture, tmp_path)
    with pytest.raises(ConfigError, match="pipeline_parallel_size > 1 is not supported"):
        load_tiny(path, stage=Stage(0, 2))


@pytest.mark.parametrize("architecture", BY_CLASS.values())
def test_decoder_in_two_stages(architecture: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, _ = make_tiny(architecture, tmp_path)
    layers = len(read_checkpoint(path).facts.layers)
    full = load_tiny(path)
    logging.getLogger("quire").addHandler(caplog.handler)
    stages = [load_tiny(path, stage=Stage(n, 2, f"1,{layers - 1}")) for n in range(2)]
    logging.getLogger("quire").removeHandler(caplog.handler)
    assert not [record for record in caplog.records if "not used" in record.message]
    assert [len(stage.layers) for stage in stages] == [1, layers - 1]  # type: ignore[attr-defined]
    sizes = [sum(weight.numel() for weight in model.parameters()) for model in (full, *stages)]
    assert max(sizes[1:]) < sizes[0]
    for actual, expected in zip(
        run_paged(Chained(stages), PROMPTS, STEPS),  # type: ignore[arg-type]
        run_paged(full, PROMPTS, STEPS),
        strict=True,
    ):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_layers_that_share_kv_stay_in_one_stage(tmp_path: Path) -> None:
    path, _ = make_tiny("Gemma3nForCausalLM", tmp_path)
    with pytest.raises(ConfigError, match="pipeline_parallel_size > 1 is not supported with Gemma 3n"):
        load_tiny(path, stage=Stage(0, 2))


def test_stage_does_not_begin_with_a_layer_that_reuses_indices(tmp_path: Path) -> None:
    path, _ = make_tiny("GlmMoeDsaForCausalLM", tmp_path, indexer_types=["full", "shared"])
    with pytest.raises(ConfigError, match=r"a pipeline stage cannot begin with layer 1.*pp_layer_partition"):
        load_tiny(path, stage=Stage(1, 2, "1,1"))

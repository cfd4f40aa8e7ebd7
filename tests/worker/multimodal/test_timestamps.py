"""Tests of token timestamps in audio against transformers' dynamic time warping."""

import numpy as np
import pytest
import torch

from quire.kernels.cpu import dtw, native
from quire.worker.multimodal.timestamps import dynamic_time_warping, smooth_weights


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (6, 1), (5, 40), (40, 5), (17, 17)])
def test_cheapest_path_matches_transformers(shape: tuple[int, int]) -> None:
    """Check equal costs too, for which the order of choices matters."""
    from transformers.models.whisper.generation_whisper import _dynamic_time_warping

    random = np.random.default_rng(shape)
    for costs in (random.standard_normal(shape), random.integers(-1, 2, shape).astype(np.float64)):
        tokens, states = _dynamic_time_warping(costs)
        begins = [int(states[tokens == token].min()) for token in range(shape[0])]
        assert dynamic_time_warping(costs) == begins and all(
            type(begin) is int for begin in dynamic_time_warping(costs)
        )
        assert native.library() is None or dtw.align(costs) == begins


@pytest.mark.parametrize("num_states", [2, 3, 4, 50])
def test_median_filter_matches_transformers(num_states: int) -> None:
    from transformers.models.whisper.generation_whisper import _median_filter

    weights = torch.rand(3, 6, num_states, generator=torch.Generator().manual_seed(0)).softmax(-1)
    spread = torch.std(weights, dim=-2, keepdim=True, unbiased=False)
    expected = _median_filter((weights - weights.mean(-2, keepdim=True)) / spread, 7)
    torch.testing.assert_close(smooth_weights(weights), expected)
    assert torch.isfinite(smooth_weights(weights[:, :1])).all()  # a single token has no peak

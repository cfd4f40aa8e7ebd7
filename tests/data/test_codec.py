"""Tests of plans and results as bytes: the round trip preserves them."""

from typing import Any

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quire.data.codec import (
    Outcome,
    decode_masks,
    decode_outcome,
    decode_plan,
    encode_masks,
    encode_outcome,
    encode_plan,
)
from quire.data.params import SamplingParams
from quire.data.pooling import Pooled, PoolingParams
from quire.data.step_plan import Admission, Masks, RowLogprobs, StepPlan, StepResult

INTS = st.integers(0, 2**31 - 1)
LOGPROBS = st.builds(
    RowLogprobs, st.lists(INTS, max_size=3), st.lists(st.floats(allow_nan=False), max_size=3), INTS
)


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    num_rows, num_blocks, groups = draw(st.integers(0, 40)), draw(st.integers(0, 9)), draw(st.integers(1, 3))
    random = np.random.default_rng(draw(INTS))

    def ints(*shape: int) -> Any:
        return random.integers(0, 2**31 - 1, shape, np.int32)

    admitted = [
        Admission(
            row=row,
            request_id=draw(st.text(max_size=8)),
            token_ids=draw(st.lists(INTS, max_size=20)),
            prompt_len=draw(INTS),
            num_computed=draw(INTS),
            block_ids=ints(groups, 2).tolist(),
            params=SamplingParams(temperature=draw(st.floats(0, 2)), stop_token_ids=[3], logit_bias={7: 1.5}),
            seed=draw(st.integers(0, 2**63 - 1)),
            stop_ids=(2, 9),
            pooling=draw(st.sampled_from([None, PoolingParams(task="embed")])),
        )
        for row in range(draw(st.integers(0, 3)))
    ]
    return StepPlan(
        step=draw(INTS),
        released=draw(st.lists(INTS, max_size=4)),
        admitted=admitted,
        block_rows=ints(num_blocks),
        block_ids=ints(groups, num_blocks),
        rows=ints(num_rows),
        num_tokens=random.integers(1, 9, num_rows, np.int32),
        samples=random.integers(0, 2, num_rows).astype(np.bool_),
        values=ints(2, draw(st.integers(0, 3))),
        constrained=ints(draw(st.integers(0, 3))),
        counts=tuple(draw(st.lists(INTS, max_size=3))),
    )


def plain(value: Any) -> Any:
    """Return a comparable form with the dtype and shape of arrays."""
    return msgspec.to_builtins(
        value, enc_hook=lambda array: (str(array.dtype), list(array.shape), array.tolist())
    )


@given(plans())
def test_plans(plan: StepPlan) -> None:
    actual = decode_plan(encode_plan(plan))
    assert plain(actual) == plain(plan)
    actual.rows[:] = 0  # the receiver may modify it


@given(st.integers(0, 4), st.integers(0, 9))
def test_masks(count: int, words: int) -> None:
    bits = np.random.default_rng(count).integers(0, 2**32, (count, words), np.uint32)
    for masks in (Masks(np.arange(count, dtype=np.int32), bits), Masks()):
        assert plain(decode_masks(encode_masks(masks))) == plain(masks)


@given(st.lists(INTS, max_size=40), st.dictionaries(INTS, LOGPROBS, max_size=3), st.text())
def test_outcomes(token_ids: list[int], logprobs: dict[int, RowLogprobs], error: str) -> None:
    pooled = {3: Pooled.of(np.ones((2, 2), np.float32))}
    prompt = {row: [item, item] for row, item in logprobs.items()}
    counts = np.array([len(token_ids), 1], np.int32)
    item = {row: [actual] for row, actual in logprobs.items()}
    result = StepResult(np.array(token_ids, np.int32), counts, item, prompt, pooled)
    for outcome in (Outcome(7, result), Outcome(8, error=error)):
        assert plain(decode_outcome(encode_outcome(outcome))) == plain(outcome)

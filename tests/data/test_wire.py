"""Tests of messages: they round-trip, and a prompt is sent once."""

import numpy as np
import pytest

from quire.checkpoint.pooling import PoolingFacts
from quire.data.params import SamplingParams
from quire.data.pooling import Pooled, PoolingParams
from quire.data.step_plan import FinishReason, StepOutput
from quire.data.wire import Add, StepDone, decode_from_core, decode_to_core, encode
from quire.frontend.inputs import InputProcessor, Prompt


def requests(n: int, **fields: object) -> Add:
    inputs = InputProcessor(
        tokenizer=None, vocab=100, max_model_len=99999, eos_ids=(2,), max_logprobs=20, seed=0
    )
    params = SamplingParams(n=n, seed=5, **fields)  # type: ignore[arg-type]
    return Add.of(inputs.requests("a", Prompt([7] * 5000), params))


@pytest.mark.parametrize("fields", [{}, {"prompt_logprobs": 1}])
def test_samples_of_one_prompt_round_trip(fields: dict[str, object]) -> None:
    sent = requests(3, **fields)
    message = decode_to_core(encode(sent))
    assert isinstance(message, Add)
    arrived = message.all()
    assert [(item.id, item.seed) for item in arrived] == [("0_a", 5), ("1_a", 6), ("2_a", 7)]
    assert all(item.tokens is arrived[0].tokens for item in arrived), "stored once"
    assert len({id(item.block_keys) for item in arrived}) == 3, "but each has its own block keys"
    wanted = [item.params.prompt_logprobs for item in arrived]
    assert wanted == ([1, None, None] if fields else [None] * 3)
    assert {item.limit for item in arrived} == {arrived[0].limit}


def test_prompt_is_sent_once_for_n_samples() -> None:
    assert len(encode(requests(128))) < 1.5 * len(encode(requests(1)))


def test_pooling_request_and_vectors_round_trip() -> None:
    inputs = InputProcessor(
        tokenizer=None, vocab=100, max_model_len=8, eos_ids=(2,), max_logprobs=20, seed=0,
        pooling=PoolingFacts(task="embed", type="LAST", size=4, token_types=2),
    )  # fmt: skip
    prompt = inputs.parse({"prompt_token_ids": [7] * 8, "token_type_ids": [0] * 5 + [1] * 3})
    message = decode_to_core(encode(Add([inputs.pooling_request("a", prompt, PoolingParams())])))
    assert isinstance(message, Add)
    (request,) = message.all()
    assert request.pooling == PoolingParams(
        use_activation=True, task="embed", skip_reading_prefix_cache=False, second_start=5
    )
    matrix = np.random.default_rng(0).random((3, 4), np.float32)
    sent = StepOutput([], [], finished={"a": FinishReason("stop")}, pooled={"a": Pooled.of(matrix)})
    arrived = decode_from_core(encode(StepDone(sent)))
    assert isinstance(arrived, StepDone)
    assert (arrived.output.pooled["a"].array() == matrix).all()

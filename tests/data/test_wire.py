"""Messages come through as they were sent, and a prompt goes over the wire once."""

import pytest

from quire.data.params import SamplingParams
from quire.data.wire import Add, decode_to_core, encode
from quire.frontend.inputs import InputProcessor, Prompt


def requests(n: int, **fields: object) -> Add:
    inputs = InputProcessor(
        tokenizer=None, vocab=100, max_model_len=99999, eos_ids=(2,), max_logprobs=20, seed=0
    )
    params = SamplingParams(n=n, seed=5, **fields)  # type: ignore[arg-type]
    return Add.of(inputs.requests("a", Prompt([7] * 5000), params))


@pytest.mark.parametrize("fields", [{}, {"prompt_logprobs": 1}])
def test_siblings_arrive_as_they_were_made(fields: dict[str, object]) -> None:
    sent = requests(3, **fields)
    message = decode_to_core(encode(sent))
    assert isinstance(message, Add)
    arrived = message.all()
    assert [(each.id, each.seed) for each in arrived] == [("0_a", 5), ("1_a", 6), ("2_a", 7)]
    assert all(each.tokens is arrived[0].tokens for each in arrived), "stored once"
    assert len({id(each.block_keys) for each in arrived}) == 3, "but each has its own notes"
    wanted = [each.params.prompt_logprobs for each in arrived]
    assert wanted == ([1, None, None] if fields else [None] * 3)
    assert {each.limit for each in arrived} == {arrived[0].limit}


def test_a_prompt_travels_once_however_many_continue_it() -> None:
    assert len(encode(requests(128))) < 1.5 * len(encode(requests(1)))

"""Tests of output processing: core steps become user-visible outputs for any tokens."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_text import TOKENS, VOCAB, text_model

from quire.data.outputs import RequestOutput
from quire.data.params import RequestOutputKind, SamplingParams
from quire.data.request import Request
from quire.data.routed_experts import RoutedRows
from quire.data.step_plan import FinishReason, FirstRun, RowLogprobs, StepOutput
from quire.frontend.inputs import InputProcessor, Prompt
from quire.frontend.outputs import OutputProcessor, ProcessedOutputs
from quire.text.tokenizer import Tokenizer, load_tokenizer

KINDS = list(RequestOutputKind)
DELTA, CUMULATIVE, FINAL = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(text_model(tmp_path_factory.getbasetemp()).path, "hf")


def expecting(tokenizer: Tokenizer | None, id: str = "a", **fields: Any) -> OutputProcessor:
    """Return a processor that expects one request."""
    outputs = OutputProcessor(tokenizer)
    add(outputs, id, **fields)
    return outputs


def add(outputs: OutputProcessor, id: str, put_text: Any = None, **fields: Any) -> None:
    inputs = InputProcessor(
        tokenizer=outputs.tokenizer, vocab=VOCAB, max_model_len=999, eos_ids=(2,), max_logprobs=20, seed=0
    )
    prompt = Prompt([1, 40], "x")
    requests = inputs.requests(id, prompt, SamplingParams(**fields), arrived_at=1.0)
    outputs.add(id, prompt, requests, put_text)


def step(tokens: dict[str, int], at: float = 1.0, **fields: Any) -> StepOutput:
    return StepOutput(request_ids=list(tokens), token_ids=list(tokens.values()), at=at, **fields)


def feed(outputs: OutputProcessor, token_ids: list[int], last: FinishReason) -> list[RequestOutput]:
    """Feed one step per token; the last ends the request unless a stop string did."""
    seen: list[RequestOutput] = []
    for place, id in enumerate(token_ids):
        finished = {"a": last} if place == len(token_ids) - 1 else {}
        seen += outputs.process(step({"a": id}, finished=finished)).outputs
    return seen


@settings(max_examples=60)
@given(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=25), st.data())
def test_all_output_kinds_are_consistent(tokenizer: Tokenizer, token_ids: list[int], data: Any) -> None:
    """Check that deltas join to the final output and cumulative outputs end with it, for any bytes and stop
    strings.
    """
    text = tokenizer.decode([id for id in token_ids if id < TOKENS])
    pieces = [text[i : i + n] for i in range(len(text)) for n in (1, 2, 5)]
    stop = data.draw(st.lists(st.sampled_from(pieces or ["zz"]), max_size=2))
    seen = {
        kind: feed(expecting(tokenizer, output_kind=kind, stop=stop), token_ids, FinishReason("length"))
        for kind in KINDS
    }
    (final,) = seen[FINAL]
    full = final.outputs[0]
    deltas = [output.outputs[0] for output in seen[DELTA]]
    assert "".join(delta.text for delta in deltas) == full.text == seen[CUMULATIVE][-1].outputs[0].text
    assert [id for delta in deltas for id in delta.token_ids] == full.token_ids
    assert deltas[-1].stop_reason == full.stop_reason
    if full.finish_reason == "length":
        assert full.token_ids == token_ids and full.text == text
    else:
        assert full.stop_reason in stop and str(full.stop_reason) not in full.text


def test_matched_stop_string_aborts_the_request_in_the_core(tokenizer: Tokenizer) -> None:
    """Check that the core does not continue a finished request."""
    dog = tokenizer.encode(" dog", add_special_tokens=False)
    outputs = expecting(tokenizer, stop="dog")
    *_, processed = [outputs.process(step({"a": id})) for id in dog]
    assert processed.stopped == ["a"] and processed.outputs[0].outputs[0].stop_reason == "dog"
    assert outputs.process(step({"a": 50})).outputs == [], "tokens after the stop are dropped"
    assert len(outputs) == 0


def test_stop_string_in_the_last_token_needs_no_abort(tokenizer: Tokenizer) -> None:
    (star,) = tokenizer.encode("*", add_special_tokens=False)
    processed = expecting(tokenizer, stop="*").process(
        step({"a": star}, finished={"a": FinishReason("length")})
    )
    assert processed.stopped == []
    assert processed.outputs[0].outputs[0].finish_reason == "stop"


def test_stop_token_text_is_included_only_if_requested(tokenizer: Tokenizer) -> None:
    for include, text in ((False, ""), (True, "*")):
        (star,) = tokenizer.encode("*", add_special_tokens=False)
        outputs = expecting(tokenizer, stop_token_ids=[star], include_stop_str_in_output=include)
        (output,) = outputs.process(step({"a": star}, finished={"a": FinishReason("stop", star)})).outputs
        assert output.outputs[0].text == text and output.outputs[0].token_ids == [star]


def finish_of(processed: ProcessedOutputs) -> list[list[tuple[int, str | None]]]:
    return [[(item.index, item.finish_reason) for item in output.outputs] for output in processed.outputs]


def test_several_samples_end_one_by_one(tokenizer: Tokenizer) -> None:
    outputs = expecting(tokenizer, n=2)
    assert outputs.sequences_of(["a", "unknown"]) == ["0_a", "1_a"]
    assert finish_of(outputs.process(step({"0_a": 50, "1_a": 51}))) == [[(0, None), (1, None)]]
    half = outputs.process(step({"0_a": 50, "1_a": 51}, finished={"1_a": FinishReason("length")}))
    assert finish_of(half) == [[(0, None), (1, "length")]] and not half.outputs[0].finished
    end = outputs.process(step({"0_a": 50}, finished={"0_a": FinishReason("stop")}))
    assert finish_of(end) == [[(0, "stop")]] and end.outputs[0].finished and "a" not in outputs


def test_final_only_waits_for_the_last_sample(tokenizer: Tokenizer) -> None:
    outputs = expecting(tokenizer, n=2, output_kind=FINAL)
    assert outputs.process(step({"0_a": 50}, finished={"0_a": FinishReason("stop")})).outputs == []
    end = outputs.process(step({"1_a": 51}, finished={"1_a": FinishReason("length")}))
    assert finish_of(end) == [[(0, "stop"), (1, "length")]]


def test_logprobs_reach_their_request_with_ranks(tokenizer: Tokenizer) -> None:
    outputs = expecting(tokenizer, logprobs=2)
    add(outputs, "b")
    actual = RowLogprobs([50, 60, 61], [-3.0, -0.5, -1.0], rank=7)
    first, second = outputs.process(step({"a": 50, "b": 51}, logprobs={"a": [actual]})).outputs
    assert second.outputs[0].logprobs is None and second.outputs[0].cumulative_logprob is None
    (position,) = first.outputs[0].logprobs or []
    assert position is not None
    assert {id: (entry.logprob, entry.rank) for id, entry in position.items()} == {
        50: (-3.0, 7),
        60: (-0.5, 1),
        61: (-1.0, 2),
    }
    assert first.outputs[0].cumulative_logprob == -3.0


def test_times_and_cached_tokens(tokenizer: Tokenizer) -> None:
    outputs = expecting(tokenizer)
    first = outputs.process(step({"a": 50}, at=5.0, admitted={"a": FirstRun(16, 2.0, 3.0)}))
    assert len(first.stats.first_token_s) == 1 and first.stats.between_tokens_s == []
    second = outputs.process(step({"a": 50}, at=5.5))
    assert second.stats.between_tokens_s == [0.5]
    last = outputs.process(step({"a": 50}, at=7.0, finished={"a": FinishReason("length")}))
    (output,) = last.outputs
    assert output.num_cached_tokens == 16 and output.metrics is not None
    times = output.metrics
    assert (times.queued_ts, times.scheduled_ts, times.first_token_ts, times.last_token_ts) == (2, 3, 5, 7)
    (ended,) = last.stats.finished
    assert (ended.num_prompt_tokens, ended.num_output_tokens, ended.num_cached) == (2, 3, 16)


def test_shares_and_preemptions_are_summed_for_any_finish(tokenizer: Tokenizer) -> None:
    """Check a stop string, which is matched here without the core."""
    outputs = expecting(tokenizer, n=2, stop="*")
    (star,) = tokenizer.encode("*", add_special_tokens=False)
    outputs.process(step({}, shares={"0_a": 0.5}))
    outputs.process(step({"0_a": star, "1_a": 50}, shares={"0_a": 0.25, "1_a": 1.0}, resumed={"1_a": 2.0}))
    last = outputs.process(step({"1_a": star}, shares={"1_a": 1.0}, resumed={"1_a": 3.0, "gone": 1.0}))
    times = last.outputs[0].metrics
    assert times is not None and last.outputs[0].finished
    assert (times.step_share_s, times.preempted_s, times.num_preemptions) == (2.75, 5.0, 2)
    assert times.latency > 0


def test_abort_releases_held_back_text(tokenizer: Tokenizer) -> None:
    outputs = expecting(tokenizer, stop="a very long stop string", output_kind=DELTA)
    (star,) = tokenizer.encode("*", add_special_tokens=False)
    (held,) = outputs.process(step({"a": star})).outputs
    (last,) = outputs.process(step({}, finished={"a": FinishReason("abort")})).outputs
    assert (held.outputs[0].text, last.outputs[0].text) == ("", "*")
    assert last.outputs[0].token_ids == [] and last.outputs[0].finish_reason == "abort"


@pytest.mark.parametrize(
    ("interval", "default", "sizes"),
    [(None, 1, [1] * 7), (3, 1, [1, 3, 3]), (2, 3, [1, 3, 3]), (5, 1, [1, 5, 1])],
)
def test_stream_interval_gathers_tokens_except_first_and_last(
    interval: int | None, default: int, sizes: list[int]
) -> None:
    processor = OutputProcessor(None, stream_interval=default)
    params = SamplingParams(
        max_tokens=7, output_kind=RequestOutputKind.DELTA, stream_interval=interval, detokenize=False
    )
    request = Request(id="a", tokens=[1], params=params, prompt_len=1, limit=8, seed=0)
    processor.add("a", Prompt([1]), [request])
    seen = []
    for token in range(7):
        finished = {"a": FinishReason("length")} if token == 6 else {}
        for output in processor.process(StepOutput(["a"], [token], finished=finished)).outputs:
            seen.append(list(output.outputs[0].token_ids))
    assert [len(ids) for ids in seen] == sizes
    assert [id for ids in seen for id in ids] == list(range(7))


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_logprobs_come_with_the_first_sample_output(tokenizer: Tokenizer, kind: Any) -> None:
    """Check that they come from the first sequence, which may be the last to sample."""
    outputs = expecting(tokenizer, n=2, prompt_logprobs=0, output_kind=kind)
    early = outputs.process(step({"1_a": 51}, finished={"1_a": FinishReason("length")}))
    assert early.outputs == [] and early.stats.num_tokens == 1
    actual = RowLogprobs([40], [-1.5], 3)
    late = outputs.process(
        step({"0_a": 50}, prompt_logprobs={"0_a": [actual]}, finished={"0_a": FinishReason("length")})
    )
    (output,) = late.outputs
    assert sorted(item.index for item in output.outputs) == [0, 1] and output.finished
    assert output.prompt_logprobs is not None and output.prompt_logprobs[1][40].logprob == -1.5


def test_steps_between_two_flushes_make_one_delta(tokenizer: Tokenizer) -> None:
    """Check steps that arrive while a front end is busy, with a stop string at its exact token."""
    dog = tokenizer.encode(" dog sleeps", add_special_tokens=False)
    outputs = expecting(tokenizer, stop="dog", output_kind=DELTA)
    add(outputs, "b", output_kind=DELTA)
    for at, id in enumerate(dog):
        outputs.add_step(step({"a": id, "b": id}, at=1.0 + at))
    processed = outputs.flush()
    a, b = processed.outputs
    assert b.outputs[0].token_ids == dog and b.outputs[0].text == tokenizer.decode(dog)
    assert a.outputs[0].stop_reason == "dog" and len(a.outputs[0].token_ids) < len(dog)
    assert processed.stopped == ["a"] and a.finished and not b.finished
    assert processed.stats.num_tokens == len(a.outputs[0].token_ids) + len(dog)
    assert outputs.flush().outputs == []


def test_long_unread_output_is_detokenized_in_pieces(tokenizer: Tokenizer) -> None:
    """Check that the end of a request does not wait for all of its text at once."""
    ids = tokenizer.encode("the dog sleeps on. " * 60, add_special_tokens=False)
    outputs = expecting(tokenizer, output_kind=FINAL)
    read = [outputs.process(step({"a": id})) and outputs._sequences["a"].num_read for id in ids]
    assert len(set(read)) >= len(ids) // 64
    (output,) = outputs.process(step({"a": 50}, finished={"a": FinishReason("length")})).outputs
    assert output.outputs[0].text == tokenizer.decode([*ids, 50])


@pytest.mark.parametrize("kind", KINDS)
def test_request_fails_if_one_of_its_samples_fails(tokenizer: Tokenizer, kind: Any) -> None:
    """Check that this holds if other samples end normally and later."""
    outputs = expecting(tokenizer, n=2, output_kind=kind)
    first = outputs.process(step({"1_a": 51}, finished={"0_a": FinishReason("error")}))
    last = outputs.process(step({"1_a": 51}, finished={"1_a": FinishReason("stop")}))
    assert set(last.failed) == {"a"} and set(first.failed) == (set() if kind is FINAL else {"a"})


@settings(max_examples=40)
@given(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20), st.integers(1, 4))
def test_plain_text_path_gives_the_same_text(tokenizer: Tokenizer, token_ids: list[int], item: int) -> None:
    """Check that the fast path for plain text is complete and counts every token, however many
    come at once.
    """
    plain, short = OutputProcessor(tokenizer), OutputProcessor(tokenizer)
    answer: list[tuple[str, int]] = []
    add(plain, "a", output_kind=DELTA)
    add(short, "a", output_kind=DELTA, put_text=lambda text, count: answer.append((text, count)))
    texts: dict[int, list[str]] = {0: [], 1: []}
    for place, id in enumerate(token_ids):
        last = place == len(token_ids) - 1
        for number, outputs in enumerate((plain, short)):
            outputs.add_step(step({"a": id}, finished={"a": FinishReason("length")} if last else {}))
            if last or place % item == 0:
                texts[number] += [output.outputs[0].text for output in outputs.flush().outputs]
    assert len(texts[1]) <= 2, "the first and the last output"
    first, last = texts[1][0], texts[1][1:]
    assert "".join([first, *(text for text, _ in answer), *last]) == "".join(texts[0])
    assert not answer or sum(count for _, count in answer) <= len(token_ids) - 2


@pytest.mark.parametrize("fields", [{"n": 2}, {"logprobs": 1}, {"stop": "zz"}, {"stream_interval": 2}])
def test_requests_beyond_plain_text_skip_the_fast_path(tokenizer: Tokenizer, fields: dict[str, Any]) -> None:
    def never(*_: object) -> None:
        raise AssertionError

    outputs = OutputProcessor(tokenizer)
    add(outputs, "a", output_kind=DELTA, put_text=never, **fields)
    id = "0_a" if "n" in fields else "a"
    logprobs = {id: [RowLogprobs([50, 51], [-1.0, -2.0], 1)]} if "logprobs" in fields else {}
    seen = [outputs.process(step({id: 50}, logprobs=dict(logprobs))).outputs for _ in range(5)]
    assert sum(map(len, seen)) >= 2


@pytest.mark.parametrize("kind", KINDS)
def test_experts_of_tokens_behind_a_stop_string_are_dropped(kind: Any, tokenizer: Tokenizer) -> None:
    """A step with drafts may compute tokens behind a stop string."""
    ids = tokenizer.encode("quick brown fox", add_special_tokens=False)
    outputs = expecting(tokenizer, output_kind=kind, stop=["brown"], max_tokens=99)
    rows = np.arange(len(ids) + 1, dtype=np.uint16).reshape(-1, 1, 1)
    done = StepOutput(["a"], ids, counts=[len(ids)], routed={"a": RoutedRows.of(rows)})
    (output,) = outputs.process(done).outputs
    completion = output.outputs[0]
    assert completion.finish_reason == "stop" and len(completion.token_ids) < len(ids)
    routed = completion.routed_experts
    assert routed is not None and routed.dtype == np.uint16
    assert routed.ravel().tolist() == list(range(2 + len(completion.token_ids) - 1))


@pytest.mark.parametrize("kind", KINDS)
def test_masks_are_aligned_with_the_tokens_of_each_output(kind: Any, tokenizer: Tokenizer) -> None:
    outputs = expecting(tokenizer, output_kind=kind, stop=["zz"], max_tokens=9)
    seen = []
    for token_id in (40, 41, 42):
        finished = {"a": FinishReason("length")} if token_id == 42 else {}
        kept = {"a": [[token_id, token_id + 100]]}
        seen += outputs.process(step({"a": token_id}, sampling_masks=kept, finished=finished)).outputs
    for output in seen:
        completion = output.outputs[0]
        assert completion.sampling_mask is not None
        assert [ids[0] for ids in completion.sampling_mask.token_ids] == list(completion.token_ids)

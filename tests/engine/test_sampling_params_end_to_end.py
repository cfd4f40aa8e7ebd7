"""Tests of every sampling parameter in the whole engine against transformers' logits."""

from typing import Any

import pytest
import torch
from tiny_text import EOS, IM_END, TOKENS, VOCAB, TextModel, open_text, text_model

from quire import LLM, RequestOutputKind, SamplingParams
from quire.data.outputs import CompletionOutput, FlatLogprobs, RequestOutput
from quire.errors import RequestError

PROMPT = [1, 40, 300, 77, 310, 90]
OTHER = [1, 55, 56, 57]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return text_model(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def llm(model: TextModel) -> LLM:
    return open_text(model, max_logprobs=-1)


@pytest.fixture(scope="module")
def plain(llm: LLM) -> list[int]:
    """Return ids of plain ASCII tokens, each of which adds its own characters."""
    table = llm.get_tokenizer().token_bytes
    assert table is not None
    return [id for id in range(5, TOKENS) if table[id].isascii() and table[id].decode().isprintable()]


def ask(llm: LLM, prompt: Any = None, **fields: Any) -> CompletionOutput:
    fields = {"temperature": 0, "max_tokens": 8, "ignore_eos": True} | fields
    outputs: list[RequestOutput] = llm.generate(prompt or PROMPT, SamplingParams(**fields), use_tqdm=False)
    return outputs[0].outputs[0]


def drawn(llm: LLM, count: int = 40, prompt: Any = None, **fields: Any) -> list[int]:
    return list(ask(llm, prompt, temperature=1.5, max_tokens=count, **fields).token_ids)


# ---- stop conditions


def test_eos_ends_without_stop_reason_and_text(llm: LLM, plain: list[int]) -> None:
    held: dict[str, Any] = {"ignore_eos": False, "min_tokens": 3, "logit_bias": {EOS: 100}}
    held["allowed_token_ids"] = [EOS, *plain]
    answer = ask(llm, **held)
    assert answer.token_ids[3:] == [EOS] and EOS not in answer.token_ids[:3], "min_tokens holds eos back"
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
    assert "</s>" not in answer.text
    assert ask(llm, **held, skip_special_tokens=False).text == answer.text
    kept = ask(llm, **held, skip_special_tokens=False, include_stop_str_in_output=True)
    assert kept.text == answer.text + "</s>"


def test_additional_eos_ids_are_reported_as_stop_reason(llm: LLM) -> None:
    answer = ask(llm, ignore_eos=False, min_tokens=2, logit_bias={IM_END: 100})
    assert list(answer.token_ids[2:]) == [IM_END]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", IM_END)


def test_ignore_eos_continues_after_eos(llm: LLM) -> None:
    for eos in (EOS, IM_END):
        answer = ask(llm, logit_bias={eos: 100})
        assert list(answer.token_ids) == [eos] * 8 and answer.finish_reason == "length"


def test_stop_token_ids_respect_min_tokens(llm: LLM, model: TextModel) -> None:
    output = model.greedy(PROMPT, 8)
    answer = ask(llm, stop_token_ids=[output[3]])
    assert list(answer.token_ids) == output[: output.index(output[3]) + 1]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", output[3])
    late = ask(llm, stop_token_ids=[output[3]], min_tokens=6)
    assert output[3] not in late.token_ids[:6] and len(late.token_ids) >= 6


def test_max_tokens_ends_with_length_and_none_fills_the_context(llm: LLM) -> None:
    assert ask(llm, max_tokens=1).finish_reason == "length"
    assert len(ask(llm, [9] * 250, max_tokens=None).token_ids) == 6
    assert len(ask(llm, [9] * 250, max_tokens=50, min_tokens=50).token_ids) == 6


def test_repetition_detection_ends_a_loop(llm: LLM) -> None:
    detect = {"max_pattern_size": 2, "min_pattern_size": 1, "min_count": 4}
    answer = ask(llm, max_tokens=40, allowed_token_ids=[50], repetition_detection=detect)
    assert len(answer.token_ids) == 4
    assert (answer.finish_reason, answer.stop_reason) == ("repetition", "repetition_detected")


# ---- stop strings


@pytest.fixture(scope="module")
def whole(llm: LLM, plain: list[int]) -> CompletionOutput:
    """Return a long output of plain text."""
    return ask(llm, max_tokens=30, allowed_token_ids=plain, repetition_penalty=1.3)


def stopped(llm: LLM, plain: list[int], stop: Any, **fields: Any) -> CompletionOutput:
    long: dict[str, Any] = {"max_tokens": 30, "allowed_token_ids": plain, "repetition_penalty": 1.3}
    return ask(llm, stop=stop, **(long | fields))


def test_stop_string_across_tokens_truncates_the_text(
    llm: LLM, plain: list[int], whole: CompletionOutput
) -> None:
    tokenizer = llm.get_tokenizer()
    texts = [tokenizer.decode([id]) for id in whole.token_ids]
    stop = texts[10][-1] + texts[11] + texts[12][0]
    assert len(stop) >= 3
    at = whole.text.index(stop)
    answer = stopped(llm, plain, stop)
    assert answer.text == whole.text[:at]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]
    assert stop in tokenizer.decode(answer.token_ids) and stop not in tokenizer.decode(answer.token_ids[:-1])
    kept = stopped(llm, plain, [stop, "\0"], include_stop_str_in_output=True)
    assert kept.text == whole.text[: at + len(stop)] and kept.token_ids == answer.token_ids


def test_stop_strings_are_ignored_before_min_tokens(
    llm: LLM, plain: list[int], whole: CompletionOutput
) -> None:
    first = whole.text[0]
    assert stopped(llm, plain, first).text == ""
    late = stopped(llm, plain, first, min_tokens=5)
    assert len(late.token_ids) >= 5 and late.text.startswith(first)


def test_stop_string_completed_by_the_last_token_is_a_stop(
    llm: LLM, plain: list[int], whole: CompletionOutput
) -> None:
    texts = [llm.get_tokenizer().decode(whole.token_ids[:count]) for count in range(31)]
    count = next(i for i in range(3, 30) if texts[i][-2:] not in texts[i - 1])
    tail = texts[count][-2:]
    answer = stopped(llm, plain, tail, max_tokens=count)
    assert len(answer.token_ids) == count
    assert (answer.finish_reason, answer.stop_reason) == ("stop", tail)


def test_stop_string_frees_the_request_at_once(llm: LLM, plain: list[int], whole: CompletionOutput) -> None:
    stopped(llm, plain, whole.text[3], max_tokens=200)
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.llm_engine.core.scheduler.kv.pool.usage == 0.0


# ---- text


def test_detokenize_false_gives_ids_only(llm: LLM) -> None:
    answer = ask(llm, detokenize=False)
    assert answer.text == "" and len(answer.token_ids) == 8
    with pytest.raises(RequestError, match="stop"):
        SamplingParams(detokenize=False, stop="a")


def test_special_tokens_are_skipped_by_default(llm: LLM) -> None:
    fields = {"logit_bias": {3: 100}, "max_tokens": 2}
    assert ask(llm, **fields).text == ""
    assert ask(llm, **fields, skip_special_tokens=False).text == "<|im_start|>" * 2


def test_ids_beyond_the_tokenizer_have_no_text(llm: LLM) -> None:
    answer = ask(llm, allowed_token_ids=[TOKENS, VOCAB - 1], max_tokens=3, logprobs=1)
    assert answer.text == "" and set(answer.token_ids) <= {TOKENS, VOCAB - 1}


def stream(llm: LLM, kind: RequestOutputKind, **fields: Any) -> list[RequestOutput]:
    fields = {"temperature": 1.0, "seed": 5, "max_tokens": 30, "logprobs": 1, "output_kind": kind} | fields
    llm.reset_prefix_cache()  # torch's products depend on how many tokens are computed together
    llm.llm_engine.add_request("streamed", PROMPT, SamplingParams(**fields))
    outputs = []
    while llm.llm_engine.has_unfinished_requests():
        outputs += llm.llm_engine.step()
    return outputs


@pytest.mark.parametrize("fields", [{}, {"stop": ["the", " d", "e"]}, {"flat_logprobs": True}])
def test_deltas_join_to_the_final_output(llm: LLM, fields: dict[str, Any]) -> None:
    (final,) = stream(llm, RequestOutputKind.FINAL_ONLY, **fields)
    deltas = stream(llm, RequestOutputKind.DELTA, **fields)
    whole = final.outputs[0]
    pieces = [output.outputs[0] for output in deltas]
    assert len(pieces) > 1 and "".join(piece.text for piece in pieces) == whole.text
    assert [id for piece in pieces for id in piece.token_ids] == whole.token_ids
    assert whole.logprobs is not None
    assert [entry for piece in pieces for entry in piece.logprobs or ()] == list(whole.logprobs)
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    last = pieces[-1]
    assert (last.finish_reason, last.stop_reason) == (whole.finish_reason, whole.stop_reason)
    assert last.cumulative_logprob == whole.cumulative_logprob
    assert [output.finished for output in deltas] == [False] * (len(deltas) - 1) + [True]


@pytest.mark.parametrize("stop", [[], ["the quick"]])
def test_cumulative_outputs_only_grow(llm: LLM, stop: list[str]) -> None:
    """Check that text that may become part of a stop string is never shown and then removed."""
    (final,) = stream(llm, RequestOutputKind.FINAL_ONLY, stop=stop)
    outputs = [output.outputs[0] for output in stream(llm, RequestOutputKind.CUMULATIVE, stop=stop)]
    for before, after in zip(outputs, outputs[1:], strict=False):
        assert after.text.startswith(before.text) and len(after.token_ids) == len(before.token_ids) + 1
    tokenizer = llm.get_tokenizer()
    held = len(max(stop, key=len, default=".")) - 1
    for answer in outputs[:-1]:
        assert len(answer.text) <= max(len(tokenizer.decode(answer.token_ids)) - held, 0)
    assert outputs[-1].text == final.outputs[0].text


def test_cumulative_output_is_not_modified_by_later_steps(llm: LLM) -> None:
    lengths = [len(output.outputs[0].token_ids) for output in stream(llm, RequestOutputKind.CUMULATIVE)]
    assert lengths == list(range(1, len(lengths) + 1))


def test_aborted_request_returns_its_partial_output(llm: LLM) -> None:
    engine = llm.llm_engine
    engine.add_request("gone", PROMPT, SamplingParams(max_tokens=99, ignore_eos=True))
    for _ in range(3):
        engine.step()
    (output,) = engine.abort_request(["gone", "never was"])
    assert output.finished and output.outputs[0].finish_reason == "abort"
    assert len(output.outputs[0].token_ids) == 3 and engine.abort_request(["gone"]) == []
    with pytest.raises(RequestError, match="'twice' is in use"):
        for _ in range(2):
            engine.add_request("twice", PROMPT, SamplingParams())
    engine.abort_request("twice")
    assert not engine.has_unfinished_requests()


# ---- n


def test_n_samples_have_their_own_seeds_and_share_the_prompt(llm: LLM) -> None:
    assert llm.reset_prefix_cache()
    prompt = list(range(60, 81))
    params = SamplingParams(n=3, max_tokens=12, seed=41, ignore_eos=True)
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    answers = output.outputs
    assert [answer.index for answer in answers] == [0, 1, 2]
    assert len({tuple(answer.token_ids) for answer in answers}) == 3
    alone = [
        llm.generate(prompt, SamplingParams(max_tokens=12, seed=41 + k, ignore_eos=True), use_tqdm=False)
        for k in range(3)
    ]
    assert [list(answer.token_ids) for answer in answers] == [list(o[0].outputs[0].token_ids) for o in alone]
    assert output.metrics is not None and output.metrics.num_generation_tokens == 36


def test_n_samples_hold_the_prompt_blocks_once(llm: LLM) -> None:
    engine, pool = llm.llm_engine, llm.llm_engine.core.scheduler.kv.pool
    engine.add_request("many", [8] * 100, SamplingParams(n=8, max_tokens=9, ignore_eos=True))
    engine.step()
    engine.step()
    used = pool.num_usable - pool.num_free
    engine.abort_request(["many"])
    assert used <= 25 + 8 * 2, "25 blocks of the prompt, and two for the output of each"
    assert pool.usage == 0.0


def test_greedy_with_n_above_one_is_rejected() -> None:
    with pytest.raises(RequestError, match="n must be 1 when using greedy sampling"):
        SamplingParams(n=2, temperature=0)


# ---- logprobs


def test_logprobs_match_transformers(llm: LLM, model: TextModel) -> None:
    answer = ask(llm, temperature=1.2, seed=3, top_k=50, logprobs=4, repetition_penalty=1.5)
    assert answer.logprobs is not None and len(answer.logprobs) == 8
    expected = model.logprobs(PROMPT + list(answer.token_ids))[len(PROMPT) - 1 : -1]
    tokenizer, total = llm.get_tokenizer(), 0.0
    for id, position, row in zip(answer.token_ids, answer.logprobs, expected, strict=True):
        assert position is not None and len(position) in (4, 5) and next(iter(position)) == id
        best = row.topk(4)
        assert set(position) == {*best.indices.tolist(), id}
        for other, entry in position.items():
            assert entry.logprob == pytest.approx(row[other].item(), abs=1e-4)
            assert entry.rank == int((row > row[other]).sum()) + 1
            assert entry.decoded_token == tokenizer.decode([other], skip_special_tokens=False)
        total += row[id].item()
    assert answer.cumulative_logprob == pytest.approx(total, abs=1e-3)


@pytest.mark.parametrize("chunk", [4, 4096])
def test_prompt_logprobs_match_transformers(model: TextModel, chunk: int) -> None:
    """Check chunked prompts and cached prefixes too."""
    llm = open_text(model, max_num_batched_tokens=chunk, max_num_seqs=4)
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2)
    prompt = [1, *range(20, 41)]
    for _ in range(2):
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        actual = output.prompt_logprobs
        assert actual is not None and len(actual) == len(prompt) and actual[0] is None
        assert output.num_cached_tokens == 0
        for id, position, row in zip(prompt[1:], list(actual)[1:], model.logprobs(prompt), strict=False):
            assert position is not None and {id, *row.topk(2).indices.tolist()} == set(position)
            for other, entry in position.items():
                assert entry.logprob == pytest.approx(row[other].item(), abs=1e-4)
                assert entry.rank == int((row > row[other]).sum()) + 1


def test_prompt_logprobs_survive_preemption(model: TextModel) -> None:
    """Check that a preempted request, which computes its prompt again, reports no position twice."""
    llm = open_text(model, num_gpu_blocks_override=16, max_model_len=48)
    params = SamplingParams(temperature=0, max_tokens=24, prompt_logprobs=0, ignore_eos=True)
    outputs = llm.generate([[20 + i] * 11 for i in range(4)], params, use_tqdm=False)
    assert llm.llm_engine.core.scheduler.num_preemptions > 0
    assert [len(output.prompt_logprobs or ()) for output in outputs] == [11] * 4


def test_prompt_logprobs_come_once_with_n_samples(llm: LLM) -> None:
    params = SamplingParams(n=2, max_tokens=2, prompt_logprobs=1)
    (output,) = llm.generate(PROMPT, params, use_tqdm=False)
    assert len(output.prompt_logprobs or ()) == len(PROMPT) and len(output.outputs) == 2


def test_flat_logprobs_have_equal_content(llm: LLM) -> None:
    fields = {"logprobs": 3, "prompt_logprobs": 2, "max_tokens": 3, "temperature": 0}
    plain, flat = (
        llm.generate(PROMPT, SamplingParams(**fields, flat_logprobs=flag), use_tqdm=False)[0]
        for flag in (False, True)
    )
    assert isinstance(flat.prompt_logprobs, FlatLogprobs)
    assert list(flat.prompt_logprobs) == plain.prompt_logprobs
    assert isinstance(flat.outputs[0].logprobs, FlatLogprobs)
    assert list(flat.outputs[0].logprobs) == plain.outputs[0].logprobs


def test_logprob_token_ids_replace_the_top_logprobs(llm: LLM, model: TextModel) -> None:
    answer = ask(llm, logprob_token_ids=[7, 300, 12], max_tokens=3)
    assert answer.logprobs is not None
    expected = model.logprobs(PROMPT + list(answer.token_ids))[len(PROMPT) - 1 : -1]
    for id, position, row in zip(answer.token_ids, answer.logprobs, expected, strict=True):
        assert position is not None and set(position) == {id, 7, 300, 12}
        for other, entry in position.items():
            assert entry.logprob == pytest.approx(row[other].item(), abs=1e-4)


def test_logprobs_above_max_logprobs_are_rejected(model: TextModel, llm: LLM) -> None:
    with pytest.raises(RequestError, match="Requested prompt logprobs of 344.*max allowed: 20"):
        open_text(model).generate(PROMPT, SamplingParams(prompt_logprobs=-1))
    assert len((ask(llm, logprobs=-1, max_tokens=1).logprobs or [{}])[0] or ()) == VOCAB
    (only,) = ask(llm, logprobs=0, max_tokens=1).logprobs or []
    assert only is not None and len(only) == 1


# ---- randomness


def test_request_output_is_equal_alone_and_in_a_batch(llm: LLM) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=10, logprobs=2, ignore_eos=True),
        SamplingParams(seed=8, max_tokens=10, top_p=0.8, ignore_eos=True),
        SamplingParams(seed=9, max_tokens=10, frequency_penalty=1.0, logit_bias={50: 3.0}, ignore_eos=True),
    ]
    alone = [llm.generate(PROMPT, param, use_tqdm=False)[0].outputs[0].token_ids for param in params]
    crowd = [SamplingParams(max_tokens=4 + i, bad_words=["a"], min_p=0.1) for i in range(6)]
    prompts = [OTHER, PROMPT, OTHER, PROMPT, OTHER, OTHER, PROMPT, OTHER, [9]]
    mixed = [crowd[0], params[0], crowd[1], params[1], crowd[2], crowd[3], params[2], crowd[4], crowd[5]]
    together = llm.generate(prompts, mixed, use_tqdm=False)
    assert [together[i].outputs[0].token_ids for i in (1, 3, 6)] == alone


def test_seeds_are_reproducible_and_distinct(llm: LLM, model: TextModel) -> None:
    fresh = open_text(model, seed=99, max_num_batched_tokens=16)
    output = [drawn(llm, seed=seed) for seed in (1, 2, 2**63 - 1)]
    assert output == [drawn(fresh, seed=seed) for seed in (1, 2, 2**63 - 1)]
    assert len({tuple(ids) for ids in output}) == 3


def test_unseeded_requests_differ_but_repeat_with_the_engine_seed(model: TextModel) -> None:
    def run(seed: int) -> list[list[int]]:
        llm = open_text(model, seed=seed)
        return [drawn(llm, 12) for _ in range(3)]

    first = run(7)
    assert len({tuple(ids) for ids in first}) == 3
    assert run(7) == first and run(8) != first


def test_sampled_tokens_follow_the_models_probabilities(llm: LLM, model: TextModel) -> None:
    """Check that temperature is applied and that no other row's logits are used."""
    params = SamplingParams(n=1000, max_tokens=1, temperature=0.7, seed=1, top_k=5, detokenize=False)
    (output,) = llm.generate(PROMPT, params, use_tqdm=False)
    seen = torch.bincount(torch.tensor([answer.token_ids[0] for answer in output.outputs]), minlength=VOCAB)
    best = model.logits(PROMPT)[-1].topk(5)
    expected = torch.zeros(VOCAB).index_put((best.indices,), (best.values / 0.7).softmax(-1))
    assert (seen / 1000 - expected).abs().max() < 0.06


# ---- logits processors


def test_allowed_token_ids_restrict_sampling(llm: LLM) -> None:
    allowed = [30, 31, 99]
    assert set(drawn(llm, 200, allowed_token_ids=allowed, seed=1)) == set(allowed)


def test_top_k_and_min_p_keep_only_likely_tokens(llm: LLM, model: TextModel) -> None:
    output = drawn(llm, top_k=3)
    for row, id in zip(model.logits(PROMPT + output)[len(PROMPT) - 1 :], output, strict=False):
        assert id in row.topk(3).indices
    output = drawn(llm, min_p=0.3)
    for row, id in zip(model.logits(PROMPT + output)[len(PROMPT) - 1 :], output, strict=False):
        chances = (row / 1.5).softmax(-1)
        assert chances[id] >= 0.3 * chances.max() - 1e-6
    assert drawn(llm, 8, top_k=1) == model.greedy(PROMPT, 8)
    assert drawn(llm, 8, top_p=1e-6) == model.greedy(PROMPT, 8)


def test_logit_bias_forbids_and_forces_tokens(llm: LLM, model: TextModel) -> None:
    first = model.greedy(PROMPT, 1)[0]
    second = int(model.logits(PROMPT)[-1].topk(2).indices[1])
    assert ask(llm, logit_bias={first: -100}, max_tokens=1).token_ids == [second]
    assert set(ask(llm, logit_bias={77: 100}).token_ids) == {77}


@pytest.mark.parametrize("word", ["the", " the", "dog", "e"])
def test_bad_words_never_appear_with_or_without_leading_space(llm: LLM, word: str) -> None:
    tokenizer = llm.get_tokenizer()
    forms = (word.strip(), " " + word.strip())
    spellings = [tokenizer.encode(form, add_special_tokens=False) for form in forms]
    bias = {id: 12.0 for ids in spellings for id in ids}

    def count(ids: list[int]) -> int:
        return sum(ids[i : i + len(bad)] == bad for bad in spellings for i in range(len(ids)))

    assert count(drawn(llm, logit_bias=bias, seed=1)) > 0, "the word would appear"
    assert count(drawn(llm, logit_bias=bias, seed=1, bad_words=[word])) == 0


def test_penalties_reduce_repetition(llm: LLM) -> None:
    base = {"allowed_token_ids": list(range(50, 70)), "max_tokens": 20, "logit_bias": {55: 5.0}}
    loop = len(set(ask(llm, **base).token_ids))
    for penalty in ({"repetition_penalty": 5.0}, {"frequency_penalty": 2.0}, {"presence_penalty": 2.0}):
        assert len(set(ask(llm, **base, **penalty).token_ids)) > loop, penalty


def test_only_repetition_penalty_includes_the_prompt(llm: LLM, model: TextModel) -> None:
    prompts = ([id, *PROMPT] for id in range(5, VOCAB))
    prompt = next(prompt for prompt in prompts if model.greedy(prompt, 1)[0] in prompt)
    row = model.logits(prompt)[-1].clone()
    for penalty in ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0}):
        assert ask(llm, prompt, max_tokens=1, **penalty).token_ids == [int(row.argmax())]
    seen = torch.tensor(sorted(set(prompt)))
    row[seen] = torch.where(row[seen] > 0, row[seen] / 1.9, row[seen] * 1.9)
    assert int(row.argmax()) not in prompt
    assert ask(llm, prompt, max_tokens=1, repetition_penalty=1.9).token_ids == [int(row.argmax())]

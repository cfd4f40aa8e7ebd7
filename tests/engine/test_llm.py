"""Tests of LLM: each form of prompts and parameters gives the outputs of its prompts, in order."""

import io
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_text import EOS, IM_END, TextModel, open_text, text_model, variant
from tqdm import tqdm

from quire import (
    LLM,
    BeamSearchParams,
    EngineArgs,
    LoRARequest,
    RequestOutputKind,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from quire.data.outputs import RequestOutput
from quire.errors import ConfigError, RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
TEXT = "A page is"
TURN = [{"role": "user", "content": "One two"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return text_model(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def llm(model: TextModel) -> LLM:
    return open_text(model)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def check_idle(llm: LLM) -> None:
    """Check that there is no request and every block is free."""
    engine = llm.llm_engine
    assert not engine.has_unfinished_requests() and len(engine.outputs) == 0
    assert engine.core.scheduler.kv.pool.usage == 0.0
    assert llm.wait_for_completion(use_tqdm=False) == []


def interrupt(llm: LLM, monkeypatch: pytest.MonkeyPatch, at_step: int) -> None:
    """Raise KeyboardInterrupt while the worker computes the step with this number."""
    executor, steps = llm.llm_engine.core.executor, itertools.count(1)
    submit = executor.submit

    def interrupted(plan: Any) -> Any:
        if next(steps) == at_step:
            raise KeyboardInterrupt
        return submit(plan)

    monkeypatch.setattr(executor, "submit", interrupted)


# ---- prompts


FORMS: dict[str, Callable[[list[int]], Any]] = {
    "text": lambda ids: TEXT,
    "texts": lambda ids: [TEXT],
    "tuple of texts": lambda ids: (TEXT,),
    "ids": lambda ids: ids,
    "tuple of ids": lambda ids: tuple(ids),
    "lists of ids": lambda ids: [ids],
    "text dict": lambda ids: {"prompt": TEXT},
    "text prompt": lambda ids: TextPrompt(prompt=TEXT),
    "tokens prompts": lambda ids: [TokensPrompt(prompt_token_ids=ids, prompt=TEXT)],
    "salted": lambda ids: {"prompt": TEXT, "cache_salt": "mine"},
    "generator": lambda ids: (text for text in [TEXT]),
}


@pytest.mark.parametrize("form", FORMS)
def test_all_prompt_forms_are_equivalent(llm: LLM, model: TextModel, form: str) -> None:
    ids = llm.get_tokenizer().encode(TEXT)
    (output,) = llm.generate(FORMS[form](ids), GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == ids and ids[0] == 1
    assert output.prompt == (None if "ids" in form else TEXT)
    assert list(output.outputs[0].token_ids) == model.greedy(ids, 4)


def test_mixed_prompt_forms_in_one_call(llm: LLM, model: TextModel) -> None:
    ids = [9, 8, 7]
    outputs = llm.generate([TEXT, {"prompt_token_ids": ids}, ids], GREEDY, use_tqdm=False)
    assert outputs[1].outputs[0].token_ids == outputs[2].outputs[0].token_ids == model.greedy(ids, 4)


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == [] and llm.chat([]) == []


def test_add_special_tokens_can_be_disabled(llm: LLM) -> None:
    (output,) = llm.generate(TEXT, GREEDY, use_tqdm=False, tokenization_kwargs={"add_special_tokens": False})
    assert output.prompt_token_ids == llm.get_tokenizer().encode(TEXT)[1:]


def test_outputs_are_in_prompt_order_when_later_ones_end_first(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (9, 1, 5, 3)]
    prompts = [[10 + i] * (i + 1) for i in range(4)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(ids) for ids in tokens(outputs)] == [9, 1, 5, 3]
    ids = [int(output.request_id) for output in outputs]
    assert ids == list(range(ids[0], ids[0] + 4))


def test_all_output_fields(llm: LLM) -> None:
    (output,) = llm.generate(TEXT, GREEDY, use_tqdm=False)
    assert output.finished and output.prompt == TEXT and output.prompt_logprobs is None
    for absent in ("lora_request", "encoder_prompt", "encoder_prompt_token_ids", "kv_transfer_params"):
        assert getattr(output, absent) is None
    (answer,) = output.outputs
    assert answer.index == 0 and answer.finished()
    assert answer.finish_reason == "length" and answer.stop_reason is None
    assert answer.cumulative_logprob is None and answer.logprobs is None and answer.lora_request is None
    assert answer.text == llm.get_tokenizer().decode(answer.token_ids)
    times = output.metrics
    assert times is not None and times.num_generation_tokens == 4
    assert 0 < times.queued_ts <= times.scheduled_ts <= times.first_token_ts <= times.last_token_ts
    assert times.first_token_latency > 0 and times.arrival_time > 1e9


def test_cache_salt_separates_prefixes_and_second_run_hits(llm: LLM) -> None:
    prompt = list(range(20, 37))

    def cached(salt: str | None) -> int | None:
        inputs: Any = {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
        outputs: list[RequestOutput] = llm.generate(inputs, GREEDY, use_tqdm=False)
        return outputs[0].num_cached_tokens

    assert [cached(salt) for salt in (None, None, "a", "a", "b")] == [0, 16, 0, 16, 0]


# ---- parameters


def test_numbers_of_params_and_priorities_must_match_prompts(llm: LLM) -> None:
    with pytest.raises(RequestError, match=re.escape("prompts (3) and params (2) must be the same.")):
        llm.generate(["a", "b", "c"], [GREEDY, GREEDY])
    with pytest.raises(RequestError, match=re.escape("prompts (1) and priority (2) must be the same.")):
        llm.generate("a", GREEDY, priority=[1, 2])
    check_idle(llm)


@pytest.mark.parametrize("wrong", [{"temperature": 0}, "greedy", [GREEDY, 5], BeamSearchParams(2, 4)])
def test_params_of_a_wrong_type_are_named(llm: LLM, wrong: Any) -> None:
    with pytest.raises(RequestError, match="params must be of type SamplingParams, got (dict|str|int|Beam)"):
        llm.generate(["a", "b"], wrong)
    check_idle(llm)


def test_default_params_come_from_the_model(llm: LLM, model: TextModel) -> None:
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.7, top_k=20, max_tokens=5)
    params = SamplingParams(temperature=0.7, top_k=20, max_tokens=5)
    actual, expected = (
        open_text(model, seed=3).generate("Hi", item, use_tqdm=False) for item in (None, params)
    )
    assert tokens(actual) == tokens(expected)
    neutral = open_text(model, generation_config="vllm")
    assert neutral.get_default_sampling_params() == SamplingParams()


@pytest.mark.parametrize("skip_clone", [False, True])
def test_callers_params_are_not_modified(llm: LLM, skip_clone: bool) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, bad_words=["dog"], skip_clone=skip_clone)
    llm.generate("a", params, use_tqdm=False)
    assert params.output_kind is RequestOutputKind.CUMULATIVE
    assert params.stop_token_ids == [] and params.bad_words_token_ids is None


def test_urgent_requests_run_first(model: TextModel) -> None:
    llm = open_text(model, scheduling_policy="priority", max_num_seqs=1)
    outputs = llm.generate([[5], [6], [7]], GREEDY, priority=[2, 0, 1], use_tqdm=False)
    ends = [output.metrics.last_token_ts for output in outputs if output.metrics]
    assert ends[1] < ends[2] < ends[0]


def test_lora_request_needs_enable_lora(llm: LLM) -> None:
    """Check that a prompt is not silently answered by the base model."""
    one = LoRARequest("one", 1, "/nowhere")
    for call in (llm.generate, llm.chat):
        prompts: Any = ["a", "b"] if call == llm.generate else TURN
        with pytest.raises(ValueError, match="Got lora_request 'one' but LoRA is not enabled"):
            call(prompts, GREEDY, lora_request=one, use_tqdm=False)
        with pytest.raises(ValueError, match="lora_request must be of type LoRARequest, got dict"):
            call(prompts, GREEDY, lora_request={"x": 1}, use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=re.escape("prompts (2) and lora_request (3) must be the same.")):
        llm.generate(["a", "b"], GREEDY, lora_request=[one, None, one], use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()


def test_load_format_pt(model: TextModel, llm: LLM, tmp_path: Path) -> None:
    """Check that the load format reaches the loader."""
    for file in model.path.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).symlink_to(file)
    torch.save(model.hf.state_dict(), tmp_path / "pytorch_model.bin")
    pickled = open_text(TextModel(tmp_path, model.hf), load_format="pt")
    actual, expected = (item.generate([[5, 6, 7]], GREEDY, use_tqdm=False) for item in (pickled, llm))
    assert actual[0].outputs[0].token_ids == expected[0].outputs[0].token_ids


# ---- errors leave no requests


WRONG: dict[str, tuple[Any, str]] = {
    "no ids": ([], "cannot be empty"),
    "no ids in a dict": ({"prompt_token_ids": []}, "cannot be empty"),
    "too long": ([5] * 256, r"maximum context length is 256 tokens.*contains 256 input tokens"),
    "too long a text": ("word " * 300, r"maximum context length is 256 tokens"),
    "beyond the vocabulary": ([5, 344], r"Token id 344 is out of vocabulary.*0 to 343"),
    "negative": ([5, -1], r"Token id -1 is out of vocabulary"),
    "float id": ([5, 6.5], "token ids must be integers, got 6.5"),
    "bool id": ([True, 5], "token ids must be integers, got True"),
    "text among ids": ([5, "a"], "token ids must be integers, got 'a'"),
    "none": (None, "got NoneType"),
    "bytes": (b"abc", "got bytes"),
    "dict without keys": ({"text": "a"}, r"needs 'prompt' \(text\) or 'prompt_token_ids'; it has \['text'\]"),
    "ids of a wrong type": ({"prompt_token_ids": "abc"}, "must be a list of integers, got str"),
    "media": (
        {"prompt": "a", "multi_modal_data": {"image": 1}},
        "the type int is not supported",
    ),
    "embeddings": ({"prompt_embeds": [1.0]}, "You must set `--enable-prompt-embeds`"),
    "empty salt": ({"prompt": "a", "cache_salt": ""}, "cache_salt must be a non-empty string"),
    "half a surrogate pair": ("\ud800", "."),
}


@pytest.mark.parametrize("case", WRONG)
def test_invalid_prompt_among_valid_ones(llm: LLM, model: TextModel, case: str) -> None:
    """Check that the error names it, that no valid prompt stays queued, and that the engine still works."""
    wrong, message = WRONG[case]
    with pytest.raises(RequestError, match=message):
        llm.generate([[5, 6], wrong, [7]], GREEDY)
    check_idle(llm)
    assert tokens(llm.generate([[5, 6]], GREEDY, use_tqdm=False)) == [model.greedy([5, 6], 4)]


@pytest.mark.parametrize("wrong", [None, 5, 1.5, b"abc", object()])
def test_single_invalid_prompt(llm: LLM, wrong: Any) -> None:
    with pytest.raises(RequestError):
        llm.generate(wrong, GREEDY)
    check_idle(llm)


def test_invalid_params_among_valid_ones(llm: LLM) -> None:
    """Check that requests added before the failing one are removed."""
    with pytest.raises(RequestError, match="Requested sample logprobs of 21"):
        llm.generate([[5], [6], [7]], [GREEDY, SamplingParams(logprobs=21), GREEDY])
    check_idle(llm)


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_interrupt_leaves_no_state(model: TextModel, monkeypatch: pytest.MonkeyPatch, fails_at: int) -> None:
    """Check that no request and no cached prefix with unwritten blocks is left."""
    llm = open_text(model, max_num_batched_tokens=16)
    prompts = [list(range(30, 30 + length)) for length in (13, 21, 9)]

    llm.enqueue([[3, 4]], GREEDY)
    interrupt(llm, monkeypatch, fails_at)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, GREEDY, use_tqdm=False)
    check_idle(llm)
    assert tokens(llm.generate(prompts, GREEDY, use_tqdm=False)) == [model.greedy(ids, 4) for ids in prompts]


def test_plan_lost_in_an_interrupt_leaves_no_logprobs_in_its_rows(
    model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check rows that the worker did not release: their next requests have no logprobs."""
    llm = open_text(model)
    asking = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1, logprobs=1, logit_bias={9: 100.0})
    llm.generate([[5, 6, 7], [8, 9, 10]], asking, use_tqdm=False)
    interrupt(llm, monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([5, 6, 7], GREEDY, use_tqdm=False)
    outputs = llm.generate([[5, 6, 7], [8, 9, 10]], GREEDY, use_tqdm=False)
    assert tokens(outputs) == [model.greedy(ids, 4) for ids in ([5, 6, 7], [8, 9, 10])]
    assert [output.prompt_logprobs for output in outputs] == [None, None]


# ---- queues and progress


def test_enqueue_runs_only_when_waited_for(llm: LLM, model: TextModel) -> None:
    first, second = llm.enqueue([[5], [6]], GREEDY), llm.enqueue([7], GREEDY)
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == first + second
    assert tokens(outputs) == [model.greedy([id], 4) for id in (5, 6, 7)]
    check_idle(llm)


def test_generate_returns_only_its_own_outputs(llm: LLM, model: TextModel) -> None:
    """Check that requests queued before keep their place and their output."""
    llm.enqueue([[5]], GREEDY)
    assert tokens(llm.generate([[6]], GREEDY, use_tqdm=False)) == [model.greedy([6], 4)]
    beams = llm.beam_search([[7]], BeamSearchParams(1, 2))
    assert beams[0].sequences[0].tokens == [7, *model.greedy([7], 2)]
    assert tokens(llm.wait_for_completion(use_tqdm=False)) == [model.greedy([5], 4)]


def test_custom_tqdm_is_used(llm: LLM) -> None:
    shown, bars = io.StringIO(), list[Any]()

    def make(**settings: Any) -> Any:
        bars.append(tqdm(**({"file": shown} | settings)))
        return bars[-1]

    llm.generate([[5], [6, 7]], SamplingParams(n=2, max_tokens=3, ignore_eos=True), use_tqdm=make)
    (bar,) = bars
    assert (bar.desc, bar.total, bar.n) == ("Processed prompts", 2, 2)
    assert bar.disable, "the bar is not closed"
    assert re.fullmatch(r"est\. speed input: \d+\.\d\d toks/s, output: \d+\.\d\d toks/s", bar.postfix)
    num_in, num_out = (float(text) for text in re.findall(r"[\d.]+(?= toks/s)", bar.postfix))
    assert num_out == pytest.approx(2 * num_in, rel=0.01), "6 prompt tokens in, 12 tokens out"


def test_progress_bar_is_optional(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    one = SamplingParams(max_tokens=1)
    llm.generate([[5]] * 65, one, use_tqdm=False)
    assert capsys.readouterr().err == ""
    llm.generate([[5]] * 65, one)
    shown = capsys.readouterr().err
    assert "Rendering prompts" in shown and "Processed prompts" in shown and "est. speed input" in shown


# ---- chat


def prompt_of(llm: LLM, *args: Any, **settings: Any) -> str | None:
    outputs: list[RequestOutput] = llm.chat(*args, SamplingParams(max_tokens=1), use_tqdm=False, **settings)
    return outputs[0].prompt


def test_conversation_becomes_a_prompt(llm: LLM) -> None:
    (output,) = llm.chat(TURN, SamplingParams(max_tokens=1), use_tqdm=False)
    assert output.prompt == "<|im_start|>user\nOne two<|im_end|>\n<|im_start|>assistant\n"
    assert output.prompt_token_ids is not None
    assert output.prompt_token_ids[0] == 3, "one id per special token, and no <s> before the template's own"
    assert IM_END in output.prompt_token_ids


def test_several_conversations_are_answered_in_order(llm: LLM) -> None:
    turns = [[{"role": "user", "content": text}] for text in ("One", "two", "three")]
    outputs = llm.chat(turns, GREEDY, use_tqdm=False)
    assert ["One" in str(outputs[0].prompt), "three" in str(outputs[2].prompt)] == [True, True]
    assert tokens(outputs) == [tokens(llm.chat(turn, GREEDY, use_tqdm=False))[0] for turn in turns]


def test_chat_template_of_a_call_wins(llm: LLM, model: TextModel) -> None:
    shout = "{{ messages[0].content | upper }}"
    assert prompt_of(llm, TURN, chat_template=shout) == "ONE TWO"
    assert prompt_of(open_text(model, chat_template=shout), TURN) == "ONE TWO"


def test_final_message_can_be_continued(llm: LLM) -> None:
    turns = [*TURN, {"role": "assistant", "content": "three fo"}]
    prompt = prompt_of(llm, turns, add_generation_prompt=False, continue_final_message=True)
    assert prompt == "<|im_start|>user\nOne two<|im_end|>\n<|im_start|>assistant\nthree fo"
    with pytest.raises(RequestError, match="both `continue_final_message` and `add_generation_prompt`"):
        llm.chat(turns, continue_final_message=True)


def test_tools_reach_the_template(llm: LLM) -> None:
    tools = [{"type": "function", "function": {"name": "weather"}}]
    assert '"name": "weather"' in str(prompt_of(llm, TURN, tools=tools))


def test_template_kwargs_reach_the_template_but_cannot_replace_messages(llm: LLM) -> None:
    template = "{{ mood }}{{ messages[0].content }}{% if add_generation_prompt %}!{% endif %}"
    kwargs = {"mood": "gay ", "add_generation_prompt": False}
    assert prompt_of(llm, TURN, chat_template=template, chat_template_kwargs=kwargs) == "gay One two"
    with pytest.raises(RequestError, match="chat_template_kwargs may not contain messages"):
        llm.chat(TURN, chat_template_kwargs={"messages": []})


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        5,
        "hello",
        {"role": "user", "content": "a"},
        [5],
        ["hello"],
        [[]],
        [{"content": "a"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
        [TURN, None],
    ],
)
def test_invalid_messages_are_rejected(llm: LLM, wrong: Any) -> None:
    with pytest.raises(RequestError):
        llm.chat(wrong, GREEDY)
    check_idle(llm)


def test_chat_without_template_is_rejected(model: TextModel, tmp_path: Path) -> None:
    llm = open_text(variant(model, tmp_path, tokenizer_config={}))
    with pytest.raises(RequestError, match="no chat template; start with `--chat-template FILE`"):
        llm.chat(TURN)
    assert prompt_of(llm, TURN, chat_template="{{ messages[0].content }}") == "One two"


# ---- other methods


def test_without_tokenizer_ids_work_and_text_is_rejected(model: TextModel) -> None:
    llm = open_text(model, skip_tokenizer_init=True)
    (output,) = llm.generate([5], GREEDY, use_tqdm=False)
    assert output.outputs[0].text == "" and tokens([output]) == [model.greedy([5], 4)]
    refused: list[Callable[[], object]] = [
        lambda: llm.generate("a"),
        lambda: llm.chat(TURN),
        lambda: llm.generate([5], SamplingParams(stop="x")),
        lambda: llm.generate([5], SamplingParams(bad_words=["x"])),
        llm.get_tokenizer,
    ]
    for ask in refused:
        with pytest.raises(RequestError, match="skip_tokenizer_init is set"):
            ask()
    check_idle(llm)


def test_from_engine_args_and_sizes(model: TextModel) -> None:
    args = EngineArgs(model=str(model.path), dtype="float32", max_model_len=64, max_num_seqs=2)
    llm = LLM.from_engine_args(args)
    assert llm.llm_engine.max_model_len == 64 and llm.config.scheduler.max_num_seqs == 2
    assert llm.get_world_size() == llm.get_world_size(include_dp=False) == 1


def test_reset_prefix_cache_fails_while_blocks_are_held(model: TextModel) -> None:
    llm = open_text(model)
    prompt = list(range(20, 37))
    llm.generate(prompt, GREEDY, use_tqdm=False)
    assert llm.reset_prefix_cache()
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0
    llm.llm_engine.add_request("held", prompt, GREEDY)
    llm.llm_engine.step()
    assert not llm.reset_prefix_cache()
    llm.llm_engine.abort_request(["held"])
    assert llm.reset_prefix_cache()


def test_reset_prefix_cache_may_preempt_running_requests(model: TextModel) -> None:
    llm = open_text(model)
    prompts = [list(range(20, 37)), list(range(50, 59))]
    llm.enqueue(prompts, GREEDY, use_tqdm=False)
    llm.llm_engine.step()
    assert not llm.reset_prefix_cache()
    assert llm.reset_prefix_cache(reset_running_requests=True)
    assert llm.llm_engine.core.scheduler.kv.pool.usage == 0.0
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert tokens(outputs) == [model.greedy(prompt, 4) for prompt in prompts]


# ---- the size of the cache


def test_kv_cache_memory_bytes_sets_the_number_of_blocks(model: TextModel) -> None:
    """Check two layers of two heads of 16 float32: 512 bytes per token, 2048 per block of four."""

    def num_blocks(**settings: Any) -> int:
        llm = open_text(model, **({"num_gpu_blocks_override": None} | settings))
        return int(llm.llm_engine.core.scheduler.kv.pool.num_usable) + 1

    assert num_blocks(kv_cache_memory_bytes=100 * 2048 + 2047) == 100
    assert num_blocks(num_gpu_blocks_override=65) == 65
    assert num_blocks(max_num_seqs=2) == 2 * 256 // 4 + 1, "no more than all rows can fill"


def test_max_model_len_that_does_not_fit_is_reduced_or_rejected(model: TextModel) -> None:
    small: dict[str, Any] = {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 20 * 2048}
    with pytest.raises(ConfigError, match=r"[\d.]+ MiB is missing.*--max-model-len 76"):
        open_text(model, **small)
    llm = open_text(model, max_model_len="auto", **small)
    assert llm.llm_engine.max_model_len == 76
    with pytest.raises(RequestError, match="maximum context length is 76"):
        llm.generate([5] * 76, GREEDY)
    (output,) = llm.generate([5] * 70, SamplingParams(max_tokens=None, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 6, "the answer ends where the context does"


def test_memory_utilization_too_small_for_the_model_is_rejected(model: TextModel) -> None:
    with pytest.raises(ConfigError, match="--gpu-memory-utilization"):
        open_text(model, num_gpu_blocks_override=None, gpu_memory_utilization=1e-9)
    with pytest.raises(ConfigError, match="is more than the .* that are free"):
        open_text(model, num_gpu_blocks_override=None, kv_cache_memory_bytes=2**60)


def test_tokenizer_eos_has_no_stop_reason(model: TextModel, tmp_path: Path) -> None:
    config = {"eos_token": "<|im_end|>"}
    llm = open_text(variant(model, tmp_path, tokenizer_config=config))
    reasons = [
        llm.generate([5], SamplingParams(logit_bias={id: 100}), use_tqdm=False)[0].outputs[0].stop_reason
        for id in (IM_END, EOS)
    ]
    assert reasons == [None, EOS]

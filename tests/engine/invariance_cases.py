"""Cases of batch invariance: the same request alone and among others, compared bit by bit."""

import itertools
import random
from typing import Any

import torch
from tiny import logits_of, prompts_of
from torch import Tensor

from quire import LLM, SamplingParams
from quire.data.outputs import RequestOutput

NEEDLE = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=-1)
SAMPLED: dict[str, Any] = {"temperature": 0.6, "seed": 1234, "max_tokens": 8, "ignore_eos": True}


def check_needle(llm: LLM, length: int, *, trials: int, most: int) -> None:
    """Compare a prompt alone with the same prompt at a random place among up to `most` random prompts, which
    end after different numbers of tokens. From the first trial on, its prefix is cached."""
    draw = random.Random(12345)
    (needle,) = prompts_of(length, seed=99)
    expected = logits_of(llm.generate([needle], NEEDLE, use_tqdm=False)[0])
    assert expected.isfinite().all()
    for trial in range(trials):
        size = draw.randint(most // 2, most)
        prompts = prompts_of(*(draw.randint(1, 2 * length) for _ in range(size)), seed=trial)
        params = [
            SamplingParams(temperature=0.8, seed=number, max_tokens=draw.randint(1, 9), ignore_eos=True)
            for number in range(size)
        ]
        place = draw.randint(0, size)
        prompts.insert(place, needle)
        params.insert(place, NEEDLE)
        if trial % 2:
            llm.reset_prefix_cache()
        actual = logits_of(llm.generate(prompts, params, use_tqdm=False)[place])
        assert torch.equal(actual, expected), f"trial {trial}: at {place} of {size}"


def check_one_by_one(llm: LLM, num: int) -> None:
    """Compare sampled tokens, their logprobs and those of the prompts, of requests one by one and in one
    batch. Decodes must have the logprobs that the same tokens have in a prompt."""
    params = SamplingParams(**SAMPLED, logprobs=5, prompt_logprobs=3)
    prompts = prompts_of(*(5 + 13 * number % 90 for number in range(num)))
    together = llm.generate(prompts, params, use_tqdm=False)
    llm.reset_prefix_cache()
    alone = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
    for number, (one, other) in enumerate(zip(alone, together, strict=True)):
        assert facts_of(one) == facts_of(other), f"prompt {number}"
    answers = [list(output.outputs[0].token_ids) for output in together]
    whole = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    again = llm.generate(whole, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    for output, first, answer in zip(again, together, answers, strict=True):
        decoded = [logprobs_of(entry) for entry in first.outputs[0].logprobs or []]
        prefilled = [logprobs_of(entry) for entry in (output.prompt_logprobs or [])[-len(answer) :]]
        for token, one, other in zip(answer, decoded, prefilled, strict=True):
            assert one[token] == other[token]


def facts_of(output: RequestOutput) -> tuple[Any, ...]:
    """Return the tokens of an output with all logprobs."""
    (answer,) = output.outputs
    prompt = [logprobs_of(entry) for entry in output.prompt_logprobs or []]
    return list(answer.token_ids), [logprobs_of(entry) for entry in answer.logprobs or []], prompt


def logprobs_of(entry: Any) -> dict[int, tuple[float, int | None]]:
    return {token: (value.logprob, value.rank) for token, value in (entry or {}).items()}


def check_mixed(llm: LLM, length: int) -> None:
    """Compare requests alone with the same requests of which each arrives while the ones before it decode, so
    that steps have chunks of prompts and decodes."""
    engine = llm.llm_engine
    prompts = prompts_of(9, length, 1, length + 7)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=-1)
    alone = []
    for prompt in prompts:
        llm.reset_prefix_cache()
        alone.append(logits_of(llm.generate([prompt], params, use_tqdm=False)[0]))
    llm.reset_prefix_cache()
    outputs: dict[str, Tensor] = {}
    for step in itertools.count():
        if step % 3 == 0 and step // 3 < len(prompts):
            engine.add_request(str(step // 3), prompts[step // 3], params)
        elif not engine.has_unfinished_requests():
            break
        for output in engine.step():
            if output.finished:
                outputs[output.request_id] = logits_of(output)  # type: ignore[arg-type]
    for number, expected in enumerate(alone):
        assert torch.equal(outputs[str(number)], expected), f"request {number}"


def check_http(server: Any, model: str, num: int) -> None:
    """Compare /v1/completions of single prompts with one call for all of them, while a stream decodes."""
    prompts = prompts_of(*(5 + 13 * number % 90 for number in range(num)))
    body = {"model": model, **SAMPLED, "logprobs": 5}

    def choices(prompt: Any) -> list[Any]:
        reply = server.client.post("/v1/completions", json=body | {"prompt": prompt})
        assert reply.status_code == 200, reply.text
        return [(choice["text"], choice["logprobs"]) for choice in reply.json()["choices"]]

    alone = [choices(prompt)[0] for prompt in prompts]
    with server.streaming(max_tokens=2000) as stream:
        next(stream)
        assert choices(prompts) == alone

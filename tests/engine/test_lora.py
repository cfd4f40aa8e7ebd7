"""Tests of engines with LoRA adapters: mixed requests give the same outputs as each alone, in any process."""

import contextlib
import gc
import itertools
import json
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from oracle import make_tiny
from tiny import SMALL, prompts_of
from tiny_adapter import write_adapter

from quire import LLM, BeamSearchParams, LoRARequest, SamplingParams
from quire.data.outputs import RequestOutput
from quire.errors import RequestError, RequestsFailed

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = prompts_of(*[9, 14, 5, 22] * 3)
SETTINGS: dict[str, Any] = {
    **SMALL,
    "max_num_seqs": 5,
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": 8,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("lora"))[0]


@pytest.fixture(scope="module")
def adapters(tiny: Path) -> list[LoRARequest]:
    model = json.loads((tiny / "config.json").read_text())
    return [write_adapter(tiny.parent / f"adapter{seed}", model, seed) for seed in (1, 2, 3)]


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    llm = LLM(str(tiny), **SETTINGS)
    yield llm
    llm.llm_engine.close()


def lora_requests(adapters: list[LoRARequest]) -> list[LoRARequest | None]:
    return [None if number % 4 == 3 else adapters[number % 3] for number in range(len(PROMPTS))]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def outputs_alone(llm: LLM, adapters: list[LoRARequest]) -> list[list[int]]:
    """Return the output of each request run alone."""
    wanted = zip(PROMPTS, lora_requests(adapters), strict=True)
    return [tokens(llm.generate([ids], GREEDY, lora_request=lora, use_tqdm=False))[0] for ids, lora in wanted]


def test_mixed_adapters_match_each_request_alone(
    llm: LLM, adapters: list[LoRARequest], outputs_alone: list[list[int]]
) -> None:
    plain = tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    assert [alone == base for alone, base in zip(outputs_alone, plain, strict=True)] == [
        lora is None for lora in lora_requests(adapters)
    ], "an adapter changes the output"
    outputs = llm.generate(PROMPTS, GREEDY, lora_request=lora_requests(adapters), use_tqdm=False)
    assert tokens(outputs) == outputs_alone
    assert [output.lora_request for output in outputs] == lora_requests(adapters)
    assert [output.outputs[0].lora_request for output in outputs] == lora_requests(adapters)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"distributed_executor_backend": "mp"}, marks=pytest.mark.slow),
        {"pipeline_parallel_size": 2},
        {"tensor_parallel_size": 2, "fully_sharded_loras": True},
    ],
    ids=str,
)
def test_mixed_adapters_match_in_other_processes(
    tiny: Path, adapters: list[LoRARequest], outputs_alone: list[list[int]], layout: dict[str, Any]
) -> None:
    llm = LLM(str(tiny), **SETTINGS, **layout)
    try:
        assert (
            tokens(llm.generate(PROMPTS, GREEDY, lora_request=lora_requests(adapters), use_tqdm=False))
            == outputs_alone
        )
        with pytest.raises(RequestsFailed, match="No adapter found for /nowhere"):
            llm.generate(PROMPTS[0], GREEDY, lora_request=LoRARequest("none", 9, "/nowhere"))
    finally:
        llm.llm_engine.close()


def test_missing_adapter_fails_only_its_requests(
    llm: LLM, adapters: list[LoRARequest], outputs_alone: list[list[int]]
) -> None:
    """Check that it is an error instead of an empty output, and that other outputs are kept."""
    loras = lora_requests(adapters)
    loras[0] = loras[5] = LoRARequest("none", 9, "/nowhere")
    with pytest.raises(RequestsFailed, match=f"^2 of {len(PROMPTS)} requests failed") as failed:
        llm.generate(PROMPTS, GREEDY, lora_request=loras, use_tqdm=False)
    assert {index: str(error) for index, error in failed.value.errors.items()} == dict.fromkeys(
        (0, 5), "Loading lora none failed: No adapter found for /nowhere: there is no adapter_config.json"
    )
    for number, output in enumerate(failed.value.outputs):
        assert list(output.outputs[0].token_ids) == ([] if number in (0, 5) else outputs_alone[number])
    assert (
        tokens(llm.generate(PROMPTS, GREEDY, lora_request=lora_requests(adapters), use_tqdm=False))
        == outputs_alone
    )


def test_prefix_cache_keys_follow_adapter_content_and_reloads(
    llm: LLM, adapters: list[LoRARequest], tiny: Path
) -> None:
    def cached(lora: LoRARequest) -> int:
        (output,) = llm.generate([PROMPTS[3]], GREEDY, lora_request=lora, use_tqdm=False)
        return output.num_cached_tokens or 0

    llm.reset_prefix_cache()
    model = json.loads((tiny / "config.json").read_text())
    duplicate = write_adapter(tiny.parent / "own", model, 1)
    assert cached(adapters[1]) == 0 and cached(adapters[0]) == 0
    assert cached(duplicate) == 20, "another name of the first adapter"
    write_adapter(tiny.parent / "own", model, 7)
    assert cached(duplicate) == 20, "no reload was requested"
    assert cached(LoRARequest("own", 1, duplicate.lora_path, load_inplace=True)) == 0
    assert cached(duplicate) == 20 and cached(adapters[0]) == 20


def test_beams_use_the_adapter_of_their_prompt(llm: LLM, adapters: list[LoRARequest]) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True)
    prompts: Any = [{"prompt_token_ids": ids} for ids in PROMPTS[:2]]
    together = llm.beam_search(prompts, params, lora_request=[adapters[0], None])
    apart = [
        llm.beam_search([prompt], params, lora_request=lora)[0]
        for prompt, lora in zip(prompts, (adapters[0], None), strict=True)
    ]
    assert [[beam.tokens for beam in item.sequences] for item in together] == [
        [beam.tokens for beam in item.sequences] for item in apart
    ]
    assert [item.sequences[0].lora_request for item in together] == [adapters[0], None]
    with pytest.raises(RequestError, match="prompts .2. and lora_request .1. must be the same"):
        llm.beam_search(prompts, params, lora_request=[None])


@pytest.mark.parametrize("level", [1, 2])
def test_adapters_are_reloaded_after_sleep(
    tiny: Path, adapters: list[LoRARequest], outputs_alone: list[list[int]], level: int
) -> None:
    llm = LLM(str(tiny), **SETTINGS, enable_sleep_mode=True)
    for _ in range(2):
        assert (
            tokens(llm.generate(PROMPTS, GREEDY, lora_request=lora_requests(adapters), use_tqdm=False))
            == outputs_alone
        )
        llm.sleep(level=level)
        llm.wake_up()
    llm.llm_engine.close()


def test_unloaded_adapters_leave_no_memory(
    llm: LLM, adapters: list[LoRARequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check everything that is stored by adapter, load or request in the core and outside."""
    monkeypatch.setattr("quire.sched.lora.log.disabled", True)  # pytest keeps log records
    engine = llm.llm_engine
    numbers = itertools.count()

    def come_and_go(count: int) -> Counter[str]:
        for _ in range(count):
            lora = LoRARequest(f"guest-{next(numbers)}", 1, adapters[0].lora_path)
            broken = LoRARequest(f"{lora.lora_name}-broken", 2, "/nowhere")
            with contextlib.suppress(RequestsFailed):
                llm.generate(PROMPTS[:2], GREEDY, lora_request=[lora, broken], use_tqdm=False)
            inplace = LoRARequest(lora.lora_name, 1, lora.lora_path, load_inplace=True)
            llm.generate(PROMPTS[0], GREEDY, lora_request=inplace, use_tqdm=False)
            engine._wait(engine._operation.remove_adapter(lora.lora_name))
        gc.collect()
        return sizes()

    # What is kept once, such as a module that is imported late, does not grow again.
    before, between, after = come_and_go(6), come_and_go(12), come_and_go(12)
    grown, again = between - before, after - between
    assert {kind: count for kind, count in grown.items() if min(count, again[kind]) >= 12} == {}


def sizes() -> Counter[str]:
    """Return the number of objects of each type and their total length."""
    actual: Counter[str] = Counter()
    for item in gc.get_objects():
        kind = type(item)
        actual[kind.__qualname__] += 1
        if kind in (dict, list, set, deque, OrderedDict, defaultdict):
            actual[f"in {kind.__qualname__}"] += len(item)
    return actual

"""Custom logits processors in a whole engine: the batch that they see, their order, and their failures."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tiny_text import TextModel, open_text, text_model
from torch import Tensor

from quire import LLM, SamplingParams
from quire.config.extensions import load_class
from quire.data.params import StructuredOutputsParams
from quire.errors import ConfigError, EngineError, RequestError, RequestsFailed
from quire.sampling.logits_processors import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    process_dict_updates,
)

PROMPTS = [[5 + number, 6, 7 + number] for number in range(5)]


class Forced(LogitsProcessor):
    """Samples the token `extra_args["target"]` in requests that have it."""

    is_invariant = False

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        target = (sampling_params.extra_args or {}).get("target")
        if target is not None and not isinstance(target, int):
            raise ValueError(f"target must be an integer, got {target!r}")
        if target == -1:
            raise KeyError("a bug of the class")

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        assert vllm_config.model_config.get_vocab_size() == 344
        assert vllm_config.scheduler_config.max_num_seqs >= 1 and not is_pin_memory
        self.targets: dict[int, int] = {}

    def is_argmax_invariant(self) -> bool:
        return self.is_invariant

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(
            self.targets, batch_update, lambda params, _, __: (params.extra_args or {}).get("target")
        )

    def apply(self, logits: Tensor) -> Tensor:
        for index, target in self.targets.items():
            if target == 13:
                raise RuntimeError("unlucky")
            kept = logits[index, target].clone()
            logits[index] = -torch.inf
            logits[index, target] = kept
        return logits


class ForcedLate(Forced):
    is_invariant = True


class Recorder(LogitsProcessor):
    """Follows the batch by the documented rules, and records what it sees in each step."""

    seen: ClassVar[list[dict[int, tuple[int, ...]]]] = []
    updates: ClassVar[list[BatchUpdate]] = []

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.requests: dict[int, tuple[list[int], list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is not None:
            self.updates.append(batch_update)
            assert list(batch_update.removed) == sorted(batch_update.removed, reverse=True)
            for index in batch_update.removed:
                del self.requests[index]
            for index, _, prompt, output in batch_update.added:
                assert prompt is not None
                self.requests[index] = prompt, output
            for source, target, kind in batch_update.moved:
                assert kind is MoveDirectionality.UNIDIRECTIONAL
                self.requests[target] = self.requests.pop(source)
            assert sorted(self.requests) == [*range(batch_update.batch_size)]

    def apply(self, logits: Tensor) -> Tensor:
        assert len(logits) == len(self.requests) and logits.dtype == torch.float32
        best = logits.argmax(-1).tolist()
        self.seen.append(
            {best[index]: (*prompt, *output) for index, (prompt, output) in self.requests.items()}
        )
        return logits


class PerRequest(AdapterLogitsProcessor):
    """Bans the tokens of the output so far, or with `extra_args["prompt"]` those of the prompt."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        def ban_output(output: list[int], row: Tensor) -> Tensor:
            return row.index_fill(0, torch.tensor(output, dtype=torch.int64), -torch.inf)

        def ban_prompt(prompt: list[int], output: list[int], row: Tensor) -> Tensor:
            return row.index_fill(0, torch.tensor(prompt), -torch.inf)

        if params.extra_args is None:
            return None
        return ban_prompt if "prompt" in params.extra_args else ban_output


class WrongShape(Recorder):
    def apply(self, logits: Tensor) -> Tensor:
        return logits[:, :1]


class Unbuildable(Recorder):
    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        raise RuntimeError("no license")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return text_model(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def forced(model: TextModel) -> LLM:
    return open_text(model, logits_processors=[Forced])


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Yield a folder of the import path; its modules are forgotten afterwards."""
    modules, hooks = set(sys.modules), [*sys.meta_path]
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.meta_path[:] = hooks
    for name in set(sys.modules) - modules:
        if name.partition(".")[0] in ("my_processors", "vllm"):
            del sys.modules[name]


def params(target: Any = None, count: int = 4, **fields: Any) -> SamplingParams:
    extra = {} if target is None else {"extra_args": {"target": target}}
    return SamplingParams(**({"temperature": 0, "max_tokens": count, "ignore_eos": True} | extra | fields))


def tokens(llm: LLM, *wanted: SamplingParams) -> list[list[int]]:
    outputs = llm.generate(PROMPTS[: len(wanted)], list(wanted), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_only_requests_with_the_argument_change(forced: LLM, model: TextModel) -> None:
    first, second, third = tokens(forced, params(7), params(), params(9, temperature=1.0, seed=1))
    assert (first, third) == ([7] * 4, [9] * 4)
    assert second == model.greedy(PROMPTS[1], 4)


def test_processors_run_between_biases_and_penalties(forced: LLM, model: TextModel) -> None:
    """Catches a processor that runs before the biases, or a penalty that runs before the processor."""
    (output,) = forced.generate(
        PROMPTS[0], params(7, count=1, logit_bias={7: 3.0}, frequency_penalty=1.0, logprobs=0), use_tqdm=False
    )
    assert output.outputs[0].logprobs is not None
    raw = model.logprobs(PROMPTS[0])[-1]
    assert output.outputs[0].logprobs[0][7].logprob == pytest.approx(float(raw[7]), abs=1e-4)


def test_grammar_holds_against_a_processor(forced: LLM) -> None:
    """Catches a row that is left without a token by a grammar and a processor together."""
    grammar = StructuredOutputsParams(choice=["cat", "dog"])
    (output,) = forced.generate(
        PROMPTS[0], params(7, count=8, ignore_eos=False, structured_outputs=grammar), use_tqdm=False
    )
    assert output.outputs[0].text in ("cat", "dog")


def test_late_processor_runs_after_the_temperature_and_not_on_greedy_batches(model: TextModel) -> None:
    llm = open_text(model, logits_processors=[ForcedLate], logprobs_mode="processed_logprobs")
    greedy, expected = tokens(llm, params(7)), model.greedy(PROMPTS[0], 4)
    assert greedy == [expected]
    random, greedy_beside = tokens(llm, params(9, temperature=0.5, seed=3), params(count=4))
    assert random == [9] * 4 and greedy_beside == model.greedy(PROMPTS[1], 4)
    (output,) = llm.generate(PROMPTS[0], params(9, temperature=0.5, logprobs=0), use_tqdm=False)
    assert output.outputs[0].logprobs is not None
    assert output.outputs[0].logprobs[0][9].logprob == 0.0  # alone after the processor


def test_processors_see_every_request_with_its_tokens(model: TextModel) -> None:
    """Catches an index that belongs to another request, after requests end, arrive and are preempted."""
    Recorder.seen.clear()
    Recorder.updates.clear()
    llm = open_text(model, logits_processors=[Recorder], max_num_seqs=4)
    engine, scheduler = llm.llm_engine, llm.llm_engine.core.scheduler
    for number, (prompt, count) in enumerate(zip(PROMPTS * 2, (9, 2, 6, 3, 5) * 2, strict=True)):
        engine.add_request(str(number), prompt, params(count=count))
    step = 0
    while engine.has_unfinished_requests():
        if step in (3, 7):
            scheduler._preempt(int(scheduler.running.order[0]))
        engine.step()
        step += 1
    checked = 0
    for batch in Recorder.seen:
        for best, sequence in batch.items():
            logits = model.logits(list(sequence))[-1]
            assert float(logits.max() - logits[best]) < 1e-3
            checked += 1
    assert checked >= sum((9, 2, 6, 3, 5)) and any(update.moved for update in Recorder.updates)


def test_adapter_functions_take_outputs_or_prompts_too(model: TextModel) -> None:
    llm = open_text(model, logits_processors=[PerRequest])
    plain, no_repeat, no_prompt = tokens(
        llm, params(), params(count=8, extra_args={"a": 1}), params(count=8, extra_args={"prompt": 1})
    )
    assert plain == model.greedy(PROMPTS[0], 4)
    assert len(set(no_repeat)) == 8 and not set(no_prompt) & set(PROMPTS[2])


def test_request_that_breaks_a_processor_ends_alone(forced: LLM, model: TextModel) -> None:
    """Catches a processor whose error ends other requests, or that stays broken."""
    with pytest.raises(RequestsFailed) as failed:
        tokens(forced, params(), params(13), params(7))
    outputs = failed.value.outputs
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert list(outputs[0].outputs[0].token_ids) == model.greedy(PROMPTS[0], 4)
    assert list(outputs[2].outputs[0].token_ids) == [7] * 4
    assert tokens(forced, params(), params(9)) == [model.greedy(PROMPTS[0], 4), [9] * 4]


def test_wrong_shape_is_an_error_of_the_request(model: TextModel, caplog: pytest.LogCaptureFixture) -> None:
    llm = open_text(model, logits_processors=[WrongShape])
    with pytest.raises(RequestsFailed):
        tokens(llm, params())
    with pytest.raises(EngineError, match=r"WrongShape: apply returned \(1, 1\), expected .* \(1, 344\)"):
        batch = llm.llm_engine.core.executor._worker._runner.sampler.processors
        batch._order = torch.zeros(1).int().numpy()
        batch.apply(torch.zeros(1, 344), batch.others)


def test_validation_refuses_a_request_before_it_runs(forced: LLM) -> None:
    with pytest.raises(RequestError, match="target must be an integer, got 'x'") as refused:
        tokens(forced, params("x"))
    assert refused.value.param == "extra_args"
    with pytest.raises(
        EngineError, match=r"Forced failed in validate_params: KeyError: 'a bug of the class'"
    ):
        tokens(forced, params(-1))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"logits_processors": ["no_such_module:A"]},
            r"'no_such_module:A' cannot be imported: ModuleNotFound",
        ),
        ({"logits_processors": ["json:A"]}, "'json:A' cannot be imported: AttributeError"),
        ({"logits_processors": ["json:dumps"]}, "'json:dumps' is not a class"),
        ({"logits_processors": ["json:JSONDecoder"]}, "must be a subclass of LogitsProcessor"),
        ({"logits_processors": ["a b"]}, "'a b' is not a class path; expected 'module:Class'"),
        ({"logits_processors": [7]}, "must be a name or a list of names"),
        ({"logits_processors": [Unbuildable]}, "Unbuildable cannot be built: RuntimeError: no license"),
        (
            {
                "logits_processors": [Forced],
                "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
            },
            "not supported when speculative decoding is enabled",
        ),
        ({"logits_processors": [Forced], "runner": "pooling"}, "not supported for a pooling model"),
    ],
)
def test_wrong_setting_stops_the_start(model: TextModel, settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        open_text(model, **settings)


def test_class_of_the_script_is_refused_in_another_process() -> None:
    with pytest.raises(ConfigError, match="put it into a module that they can import"):
        load_class("__main__:Mine", "logits_processors")


VLLM_CLASS = """
import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates


class Only(LogitsProcessor):
    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool):
        self.limit = vllm_config.model_config.max_model_len

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        pass

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        logits[:, :7] = -torch.inf
        logits[:, 8:] = -torch.inf
        return logits
"""


def test_class_written_for_vllm_runs_by_its_path(model: TextModel, path: Path) -> None:
    (path / "my_processors.py").write_text(VLLM_CLASS)
    llm = open_text(model, logits_processors=["my_processors:Only"])
    assert tokens(llm, params(), params(temperature=1.0)) == [[7] * 4, [7] * 4]

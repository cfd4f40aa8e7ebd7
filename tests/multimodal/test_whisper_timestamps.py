"""Whisper that tells the time, against transformers: in batches, preempted, ahead of the host."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_on_cpu import pretend_device
from hearing import RATE, SECONDS, save_scribe, sound

from quire import LLM, SamplingParams
from quire.errors import RequestError
from quire.multimodal.processors import Audio

COUNT = 14
SOUNDS = (sound(SECONDS * RATE, 1), sound(5000, 2), sound(20000, 3))
TEXTS = ("", "<|startofprev|> so it was")
TIMED, FREE = (
    SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, timestamps=timed)
    for timed in (True, False)
)


class Twin:
    """The checkpoint, and transformers' model."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model, self.heard = save_scribe(path)

    def prompt(self, before: str, timed: bool) -> list[int]:
        text = before + "<|startoftranscript|><|de|><|transcribe|>" + "<|notimestamps|>" * (not timed)
        found: list[int] = self.heard.tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    @torch.inference_mode()
    def says(self, prompt_ids: list[int], given: Audio, timed: bool) -> list[int]:
        from transformers import GenerationMixin, LogitsProcessorList, WhisperTimeStampLogitsProcessor

        config = self.model.generation_config
        rules = [WhisperTimeStampLogitsProcessor(config, len(prompt_ids))] if timed else []
        ids = torch.tensor([prompt_ids])
        features = self.heard.features(given.samples, sampling_rate=RATE, return_tensors="pt")
        out = GenerationMixin.generate(
            self.model,
            input_features=features["input_features"],
            decoder_input_ids=ids,
            decoder_attention_mask=torch.ones_like(ids),
            logits_processor=LogitsProcessorList(rules),
            max_new_tokens=COUNT,
            do_sample=False,
            eos_token_id=[],
        )
        said: list[int] = out[0, ids.shape[1] :].tolist()
        return said


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    return Twin(tmp_path_factory.mktemp("scribe"))


def engine(twin: Twin, **settings: Any) -> LLM:
    own = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "num_gpu_blocks_override": 200} | settings
    return LLM(str(twin.path), dtype="float32", block_size=4, use_tqdm_on_load=False, **own)


def asked(twin: Twin) -> list[tuple[list[int], Audio, bool]]:
    return [
        (twin.prompt(text, timed), given, timed)
        for given in SOUNDS
        for text in TEXTS
        for timed in (True, False)
    ]


def request(prompt_ids: list[int], given: Audio) -> dict[str, Any]:
    return {"prompt_token_ids": prompt_ids, "multi_modal_data": {"audio": tuple(given)}}


def check(twin: Twin, outputs: list[Any]) -> None:
    zero, num_moments = twin.model.generation_config.no_timestamps_token_id + 1, 0
    for output, each in zip(outputs, asked(twin), strict=True):
        said = list(output.outputs[0].token_ids)
        assert said == twin.says(*each)
        num_moments += sum(id >= zero for id in said) if each[-1] else 0
    assert num_moments > 9  # and thus more than the first of each


def test_preempted_rows_tell_the_time_beside_others(twin: Twin) -> None:
    """In chunks, with rows that are computed again from their beginning."""
    llm = engine(twin)
    scheduler, step, outputs = llm.llm_engine.core.scheduler, 0, dict[str, Any]()
    for number, (ids, given, timed) in enumerate(asked(twin)):
        llm.llm_engine.add_request(str(number), request(ids, given), TIMED if timed else FREE)
    while llm.llm_engine.has_unfinished_requests():
        if step in (5, 9, 17, 25):
            scheduler._preempt(int(scheduler.running.order[0]))
        outputs |= {output.request_id: output for output in llm.llm_engine.step() if output.finished}
        step += 1
    assert scheduler.num_preemptions == 4
    check(twin, [outputs[str(number)] for number in range(len(outputs))])


def test_a_device_that_runs_ahead_waits_for_moments(twin: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    """What may come next depends on tokens that only the device would know."""
    pretend_device(monkeypatch)
    llm = engine(twin, max_num_seqs=3)
    llm.llm_engine.core.step_queue.depth = 2
    told = asked(twin)
    params = [TIMED if timed else FREE for *_, timed in told]
    check(twin, llm.generate([request(*each[:2]) for each in told], params, use_tqdm=False))


def test_models_that_tell_no_time_say_so() -> None:
    llm = LLM(None, max_model_len=256, num_gpu_blocks_override=64, use_tqdm_on_load=False)
    with pytest.raises(RequestError, match="has no timestamps"):
        llm.generate(["x"], SamplingParams(timestamps=True), use_tqdm=False)

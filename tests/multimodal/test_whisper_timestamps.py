"""Tests of Whisper timestamps against transformers: in batches, preempted, with asynchronous steps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_on_cpu import use_fake_device
from hearing import RATE, SECONDS, save_scribe, sound
from tiny_text import text_model

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
    """A tiny checkpoint, with transformers' model."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model, self.processor = save_scribe(path)

    def prompt(self, before: str, timed: bool) -> list[int]:
        text = before + "<|startoftranscript|><|de|><|transcribe|>" + "<|notimestamps|>" * (not timed)
        prompt_ids: list[int] = self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        return prompt_ids

    @torch.inference_mode()
    def generate_reference(self, prompt_ids: list[int], audio: Audio, timed: bool) -> list[int]:
        from transformers import GenerationMixin, LogitsProcessorList, WhisperTimeStampLogitsProcessor

        config = self.model.generation_config
        rules = [WhisperTimeStampLogitsProcessor(config, len(prompt_ids))] if timed else []
        ids = torch.tensor([prompt_ids])
        features = self.processor.features(audio.samples, sampling_rate=RATE, return_tensors="pt")
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
        token_ids: list[int] = out[0, ids.shape[1] :].tolist()
        return token_ids


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    return Twin(tmp_path_factory.mktemp("scribe"))


def engine(twin: Twin, **settings: Any) -> LLM:
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "num_gpu_blocks_override": 200} | settings
    return LLM(str(twin.path), dtype="float32", block_size=4, use_tqdm_on_load=False, **options)


def cases(twin: Twin) -> list[tuple[list[int], Audio, bool]]:
    return [
        (twin.prompt(text, timed), audio, timed)
        for audio in SOUNDS
        for text in TEXTS
        for timed in (True, False)
    ]


def request(prompt_ids: list[int], audio: Audio) -> dict[str, Any]:
    return {"prompt_token_ids": prompt_ids, "multi_modal_data": {"audio": tuple(audio)}}


def check(twin: Twin, outputs: list[Any]) -> None:
    zero, num_moments = twin.model.generation_config.no_timestamps_token_id + 1, 0
    for output, case in zip(outputs, cases(twin), strict=True):
        token_ids = list(output.outputs[0].token_ids)
        assert token_ids == twin.generate_reference(*case)
        num_moments += sum(id >= zero for id in token_ids) if case[-1] else 0
    assert num_moments > 9  # so there are more than the first of each


def test_preempted_rows_keep_their_timestamps(twin: Twin) -> None:
    """Prompts are computed in chunks, and preempted rows are recomputed from their beginning."""
    llm = engine(twin)
    scheduler, step, outputs = llm.llm_engine.core.scheduler, 0, dict[str, Any]()
    for number, (ids, audio, timed) in enumerate(cases(twin)):
        llm.llm_engine.add_request(str(number), request(ids, audio), TIMED if timed else FREE)
    while llm.llm_engine.has_unfinished_requests():
        if step in (5, 9, 17, 25):
            scheduler._preempt(int(scheduler.running.order[0]))
        outputs |= {output.request_id: output for output in llm.llm_engine.step() if output.finished}
        step += 1
    assert scheduler.num_preemptions == 4
    check(twin, [outputs[str(number)] for number in range(len(outputs))])


def test_device_that_runs_ahead_waits_for_timestamps(twin: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a row waits for its last token, which decides the allowed timestamps."""
    use_fake_device(monkeypatch)
    llm = engine(twin, max_num_seqs=3)
    llm.llm_engine.core.step_queue.depth = 2
    all_cases = cases(twin)
    params = [TIMED if timed else FREE for *_, timed in all_cases]
    check(twin, llm.generate([request(*case[:2]) for case in all_cases], params, use_tqdm=False))


def test_models_without_timestamps_refuse_them(tmp_path: Path) -> None:
    path = text_model(tmp_path).path
    llm = LLM(str(path), max_model_len=64, num_gpu_blocks_override=64, use_tqdm_on_load=False)
    with pytest.raises(RequestError, match="has no timestamps"):
        llm.generate(["x"], SamplingParams(timestamps=True), use_tqdm=False)

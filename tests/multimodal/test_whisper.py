"""Tests of Whisper against transformers: features and answers, in batches, in chunks and from the cache."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuda_on_cpu import use_fake_device
from hearing import RATE, SECONDS, STARTS, AudioProcessor, save_whisper, sound
from oracle import load_tiny, run_paged
from seeing import close
from threads import run_threads, tp_worlds

from quire import LLM, SamplingParams
from quire.checkpoint import weights
from quire.checkpoint.model import read_checkpoint
from quire.errors import ConfigError, RequestError
from quire.kernels.cpu import native
from quire.multimodal.processors import PROCESSORS, Audio
from quire.parallel.world import World
from quire.text.tokenizer import load_tokenizer

COUNT = 8
PARAMS = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=5)
SUPPRESSED = {"suppress_tokens": [14, 31], "begin_suppress_tokens": [220, 146, 68]}
TEXTS = ("", " hello there", "x")
SOUNDS = (sound(SECONDS * RATE + 777, 1), sound(5000, 2), sound(20000, 3))


class Twin:
    """A tiny checkpoint, with transformers' model and feature extractor."""

    heard: AudioProcessor

    def __init__(self, path: Path, **settings: Any) -> None:
        self.path = path
        self.model, self.processor = save_whisper(path, **settings)

    @torch.inference_mode()
    def generate_reference(self, text: str, audio: Audio, **settings: Any) -> list[int]:
        """Return greedy tokens of transformers' model after those of the prompt."""
        from transformers import GenerationMixin

        inputs = {
            "input_features": self.features(audio.samples),
            "decoder_input_ids": self.ids(text),
            "decoder_attention_mask": torch.ones_like(self.ids(text)),
        }
        wanted = {"max_new_tokens": COUNT, "min_new_tokens": COUNT, "do_sample": False} | settings
        # Whisper's own `generate` adds prefix tokens and truncates long audio.
        out = GenerationMixin.generate(self.model, **inputs, **wanted)
        generated: list[int] = out[0, self.ids(text).shape[1] :].tolist()
        return generated

    @torch.inference_mode()
    def logprobs(self, token_ids: list[int], audio: Audio) -> torch.Tensor:
        features = self.features(audio.samples)
        logits = self.model(input_features=features, decoder_input_ids=torch.tensor([token_ids])).logits
        return logits[0].log_softmax(-1)

    def features(self, samples: np.ndarray[Any, Any]) -> torch.Tensor:
        """Return transformers' features of the seconds that the model reads: it would normalize by all of the
        audio."""
        samples = samples[: SECONDS * RATE]
        input_features = self.processor.features(samples, sampling_rate=RATE, return_tensors="pt")[
            "input_features"
        ]
        assert isinstance(input_features, torch.Tensor)
        return input_features

    def ids(self, text: str) -> torch.Tensor:
        input_ids = self.processor.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        assert isinstance(input_ids, torch.Tensor)
        return input_ids


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    return Twin(tmp_path_factory.mktemp("whisper"))


def engine(twin: Twin, **settings: Any) -> LLM:
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "num_gpu_blocks_override": 200} | settings
    return LLM(str(twin.path), dtype="float32", block_size=4, use_tqdm_on_load=False, **options)


@pytest.fixture(scope="module")
def llm(twin: Twin) -> LLM:
    return engine(twin)


def request_of(text: str, audio: Audio) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"audio": tuple(audio)}}


def check(twin: Twin, output: Any, text: str, audio: Audio) -> None:
    """Check that every token is the best one of transformers' model, and its logprobs."""
    prompt_ids = twin.ids(text)[0].tolist()
    answer = output.outputs[0]
    assert output.prompt_token_ids == prompt_ids
    reference = twin.logprobs([*prompt_ids, *answer.token_ids[:-1]], audio)[len(prompt_ids) - 1 :]
    assert answer.token_ids == reference.argmax(-1).tolist()
    for logprobs, expected in zip(answer.logprobs or [], reference, strict=answer.logprobs is not None):
        for token_id, logprob in logprobs.items():
            assert abs(logprob.logprob - float(expected[token_id])) < 1e-3


def test_features_equal_transformers(twin: Twin) -> None:
    """Covers audio of one sample, a second, the maximum and more, another sample rate, and invalid audio."""
    checkpoint = read_checkpoint(twin.path)
    media = checkpoint.facts.media
    assert media is not None and media.transcribes and media.num_cross_states == SECONDS * 50
    numbers = sum(parameter.numel() for parameter in twin.model.parameters())
    assert weights.count_parameters(checkpoint.facts).total == pytest.approx(numbers, rel=0.06)
    processor = PROCESSORS["whisper"](twin.path, media, load_tokenizer(twin.path, "hf"))
    for count in (1, RATE, SECONDS * RATE, SECONDS * RATE + 777):
        made = processor.process("audio", sound(count), {})
        expected = twin.features(sound(count).samples)[0].numpy().T
        close(made.arrays["mel"].numbers(), np.pad(expected, ((0, 1), (0, 0))), 1e-4)
        assert (made.token_ids, made.runs) == ([], [(0, media.num_cross_states)])
    with pytest.raises(RequestError, match="seconds long"):
        processor.process("audio", sound(SECONDS * RATE + 777), {"truncation": False})
    with pytest.raises(RequestError, match="not its embeddings"):
        processor.process_embeds("audio", {})


def test_transcriptions_equal_transformers(twin: Twin, llm: LLM) -> None:
    """Covers different audio in one batch, in chunks, then again with prefixes cached for the same audio
    only. There are more audio items than rows; one of them has several answers."""
    cases = [(STARTS + text, result) for text, result in zip(TEXTS, SOUNDS, strict=True)]
    cases += [(STARTS + TEXTS[1], SOUNDS[0]), (STARTS + "and so on and on", sound(999, 5)), *cases[:1]]
    for again in (False, True):
        outputs = llm.generate([request_of(*case) for case in cases], PARAMS, use_tqdm=False)
        for output, case in zip(outputs, cases, strict=True):
            check(twin, output, *case)
            assert not again or output.num_cached_tokens == (len(output.prompt_token_ids) - 1) // 4 * 4
    (other,) = llm.generate([request_of(STARTS + TEXTS[1], sound(3000, 9))], PARAMS, use_tqdm=False)
    assert other.num_cached_tokens == 0
    check(twin, other, STARTS + TEXTS[1], sound(3000, 9))
    several = SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=4)
    (output,) = llm.generate([request_of(STARTS, SOUNDS[2])], several, use_tqdm=False)
    assert len(output.outputs) == 3
    two = {"audio": tuple(SOUNDS[1])}
    pair = {"encoder_prompt": {"prompt": "", "multi_modal_data": two}, "decoder_prompt": STARTS + "x"}
    (output,) = llm.generate([pair], PARAMS, use_tqdm=False)
    check(twin, output, STARTS + "x", SOUNDS[1])


@pytest.mark.parametrize("sharing", [True, False])
def test_preempted_rows_are_encoded_again(twin: Twin, sharing: bool) -> None:
    """Covers rows whose encoder slots other requests used in the meantime."""
    llm = engine(twin, enable_prefix_caching=sharing, max_num_seqs=2)
    scheduler, step = llm.llm_engine.core.scheduler, 0
    cases = [(STARTS + text, result) for text in TEXTS for result in SOUNDS[1:]]
    for number, case in enumerate(cases):
        llm.llm_engine.add_request(str(number), request_of(*case), PARAMS)
    outputs = {}
    while llm.llm_engine.has_unfinished_requests():
        if step in (2, 5, 9, 17):
            scheduler._preempt(int(scheduler.running.order[0]))
        outputs |= {output.request_id: output for output in llm.llm_engine.step() if output.finished}
        step += 1
    assert scheduler.num_preemptions == 4
    for number, case in enumerate(cases):
        check(twin, outputs[str(number)], *case)
    media = scheduler.media
    assert media.num_held == 0 and not media.rows and media.num_kept <= media.size


def test_graph_decode_and_suppressed_tokens(tmp_path: Path) -> None:
    """generation_config.json suppresses tokens everywhere or as the first one, as `generate` does. The LM
    head is the embedding."""
    twin = Twin(tmp_path, tie_word_embeddings=True, scale_embedding=True)
    cases = [(STARTS + text, result) for text, result in zip(TEXTS, SOUNDS, strict=True)]
    free = [twin.generate_reference(*case) for case in cases]
    for key, value in SUPPRESSED.items():
        setattr(twin.model.generation_config, key, value)
    twin.model.generation_config.save_pretrained(tmp_path)
    llm = engine(twin)
    outputs = llm.generate([request_of(*case) for case in cases], PARAMS, use_tqdm=False)
    generated = [output.outputs[0].token_ids for output in outputs]
    assert generated == [twin.generate_reference(*case) for case in cases] != free
    assert {14, 31} & {*sum(free, [])} and {146, 68} & {case[0] for case in free}
    worker = llm.llm_engine.core.executor._worker
    tapes = worker._runner.device._tapes._tapes
    assert native.library() is None or (tapes and all(tapes.values()))


def test_invalid_transcription_requests_are_refused(twin: Twin, llm: LLM) -> None:
    heard = request_of(STARTS, SOUNDS[1])
    both = {"prompt": STARTS, "multi_modal_data": {"audio": [tuple(SOUNDS[0]), tuple(SOUNDS[1])]}}
    for prompt, message in (
        (STARTS, "transcribes audio, and there is none"),
        ({"prompt_token_ids": [107, 108]}, "transcribes audio, and there is none"),
        ([107, 108], "transcribes audio, and there is none"),
        (both, r"At most 1 audio\(s\) may be provided in one prompt.$"),
        ({"prompt": STARTS, "multi_modal_data": {"image": np.zeros((8, 8, 3))}}, r"At most 0 image"),
        ({"encoder_prompt": "what", "decoder_prompt": STARTS}, "encoder_prompt must be a dict"),
        ({**heard, "prompt": STARTS + "x" * 80}, "maximum context length is 64"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.generate([prompt], PARAMS, use_tqdm=False)
    for settings, message in (
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is not supported for WhisperFor"),
        ({"enable_lora": True}, "enable_lora is not supported for WhisperFor"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "speculative_config is not supported",
        ),
        ({"limit_mm_per_prompt": {"audio": 0}}, "needs audio in every prompt"),
    ):
        with pytest.raises(ConfigError, match=message):
            engine(twin, **settings)
    (output,) = llm.generate([heard], PARAMS, use_tqdm=False)
    check(twin, output, STARTS, SOUNDS[1])


def test_tensor_parallel_whisper_equals_one_device(twin: Twin) -> None:
    """Catches attention heads of another rank, and a bias that is added twice."""
    worlds, ids = tp_worlds(2), twin.ids(STARTS + TEXTS[1])[0].tolist()
    models = [load_tiny(twin.path, world=world, tower_group=world.tp, max_model_len=64) for world in worlds]
    mel = torch.nn.functional.pad(twin.features(SOUNDS[1].samples)[0].T, (0, 0, 0, 1))

    @torch.inference_mode()
    def run(world: World) -> torch.Tensor:
        model: Any = models[world.tp.rank]
        model.cross_cache.write(model.tower.encode("audio", [{"mel": mel}])[0], 1)
        model.cross_cache.assign([0], [1])
        (logits,) = run_paged(model, [ids], [[len(ids) - 3], [1], [2]])
        return logits.log_softmax(-1)

    for run_thread in run_threads(2, run, worlds=lambda _: worlds):
        torch.testing.assert_close(run_thread, twin.logprobs(ids, SOUNDS[1]), atol=1e-3, rtol=0)


def test_transcriptions_are_equal_on_a_device_that_runs_ahead(
    twin: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers padded decodes in graphs, and rows that get other audio while the previous step runs."""
    use_fake_device(monkeypatch)
    llm = engine(twin, max_num_seqs=3)
    llm.llm_engine.core.step_queue.depth = 2
    plain = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
    cases = [(STARTS + text, result) for result in SOUNDS for text in TEXTS[:2]]
    outputs = llm.generate([request_of(*case) for case in cases], plain, use_tqdm=False)
    for output, case in zip(outputs, cases, strict=True):
        check(twin, output, *case)
    assert llm.llm_engine.core.executor._worker._runner.device.graphs._sizes == [1, 2, 3]

"""Tests of images in whole engines: answers equal those of the decoder with embeddings in place of the
images."""

import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuda_on_cpu import OnCPU
from fake import MOST, Fake, FakeTower, ImagePrompt, image, image_prompt, make_fake, register
from fake_inputs import END, PAD, START, inputs, media, picture
from fake_inputs import FakeProcessor as InputsProcessor
from staged import Engine
from tiny import logits_of, open_tiny, prompts_of

from quire import LLM, PoolingParams, SamplingParams
from quire.checkpoint.facts import MediaFacts
from quire.config.sections import MultimodalSection
from quire.configure import configure
from quire.core import build
from quire.data.codec import decode_plan, encode_plan
from quire.data.multimodal import Array, Media
from quire.data.outputs import RequestOutput
from quire.data.request import Request
from quire.data.step_plan import StepPlan
from quire.data.wire import Add, decode_to_core, encode
from quire.errors import ConfigError, RequestError
from quire.frontend.inputs import Prompt
from quire.memory import max_span, max_vectors
from quire.multimodal import largest_items
from quire.worker.device import Model
from quire.worker.multimodal.encoder import MediaEncoder, balance_items
from quire.worker.rows import Rows
from quire.worker.worker import Worker

COUNT = 5
TEXTS = prompts_of(5, 9, 3, 14)
CAT, DOG, BIRD = image(9, 1), image(14, 2), image(4, 3)
PROMPTS = [
    image_prompt(TEXTS[0], CAT, TEXTS[1]),
    image_prompt(DOG, TEXTS[2], CAT, BIRD, TEXTS[0]),
    image_prompt(TEXTS[3]),
    image_prompt(TEXTS[1], BIRD, TEXTS[2], DOG, TEXTS[2], split=True),
    image_prompt(CAT, TEXTS[2]),
]
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Fake:
    return make_fake(tmp_path_factory.mktemp("fake"))


@pytest.fixture(autouse=True)
def family(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    register(monkeypatch)
    yield


def open_fake(fake: Fake, **settings: Any) -> LLM:
    settings = {"num_gpu_blocks_override": 120} | settings
    return open_tiny(fake.path, max_model_len=96, max_num_seqs=6, **settings)


def add(llm: LLM, prompts: list[ImagePrompt], **sampling: Any) -> list[str]:
    engine = llm.llm_engine
    sampling = {"temperature": 0, "max_tokens": COUNT, "logprobs": -1} | sampling
    params = SamplingParams(ignore_eos=True, **sampling)
    ids = []
    for seen in prompts:
        ids.append(str(next(NUMBERS)))
        prompt = Prompt(list(seen.tokens))
        requests = engine.inputs.requests(ids[-1], prompt, params.clone())
        engine.outputs.add(ids[-1], prompt, requests)
        for request in requests:
            request.media = Media(list(seen.media.items)) if seen.media.items else None
            engine.core.add(request)
    return ids


def run(
    llm: LLM, prompts: list[ImagePrompt], *, preempt: tuple[int, ...] = (), **sampling: Any
) -> list[RequestOutput]:
    ids, outputs, step, engine = add(llm, prompts, **sampling), dict[str, Any](), 0, llm.llm_engine
    scheduler = engine.core.scheduler
    while engine.has_unfinished_requests():
        if step in preempt:
            scheduler._preempt(int(scheduler.running.order[0]))
        outputs |= {output.request_id: output for output in engine.step() if output.finished}
        step += 1
    cache = scheduler.media
    assert not cache.rows and not cache.num_held and not len(cache.arrays)
    return [outputs[id] for id in ids]


def check(fake: Fake, prompts: list[ImagePrompt], outputs: list[RequestOutput]) -> None:
    for seen, output in zip(prompts, outputs, strict=True):
        token_ids, logits = fake.greedy(seen, COUNT)
        assert output.outputs[0].token_ids == token_ids
        torch.testing.assert_close(logits_of(output), logits, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("chunk", [64, 7, 16])
def test_images_give_the_answer_of_their_embeddings(fake: Fake, chunk: int) -> None:
    """Covers one and several images between texts, together and alone, with chunks that end anywhere. Chunks
    are smaller than some images, so that one image spans several, and not all images fit into the encoder
    cache."""
    llm = open_fake(fake, max_num_batched_tokens=chunk)
    llm.llm_engine.core.scheduler.media.size = max(chunk, len(DOG))
    check(fake, PROMPTS, run(llm, PROMPTS))
    assert max(FakeTower.batches) > 1 or chunk < 16, "images of several requests are encoded together"
    for seen in PROMPTS:
        check(fake, [seen], run(llm, [seen]))


def test_repeated_image_is_a_prefix_cache_hit(fake: Fake) -> None:
    llm = open_fake(fake)
    prefix = TEXTS[0][:4]
    first, again, other = (image_prompt(prefix, pixels, TEXTS[1]) for pixels in (DOG, DOG, DOG[::-1].copy()))
    moved = image_prompt(prefix, TEXTS[2][:1], DOG, TEXTS[1])
    outputs = [run(llm, [seen])[0] for seen in (first, again, other, moved)]
    check(fake, [first, again, other, moved], outputs)
    # 4 + 14 + 9 tokens in blocks of 4, the last of which is never a hit.
    assert [output.num_cached_tokens for output in outputs] == [0, 24, 4, 4]
    assert FakeTower.batches == [1, 1], "cached prefixes and cached items are not encoded again"
    llm.llm_engine.reset_prefix_cache()
    assert llm.llm_engine.reset_encoder_cache()
    check(fake, [again], run(llm, [again]))
    assert FakeTower.batches == [1, 1, 1]


@pytest.mark.parametrize("sharing", [True, False], ids=["prefixes", "no prefixes"])
def test_preemption_in_the_middle_of_an_image(fake: Fake, sharing: bool) -> None:
    llm = open_fake(fake, max_num_batched_tokens=10, enable_prefix_caching=sharing)
    check(fake, PROMPTS, run(llm, PROMPTS, preempt=(1, 2, 3, 5, 8)))
    assert llm.llm_engine.core.scheduler.num_preemptions == 5


def test_bidirectional_image_tokens(tmp_path: Path) -> None:
    """Covers a prompt in one step and in several, next to texts and decodes, the prefix cache, and
    recomputation."""
    whole = make_fake(tmp_path, whole=True)
    llm = open_fake(whole, max_num_batched_tokens=17)
    check(whole, PROMPTS, run(llm, PROMPTS, preempt=(2, 4)))
    check(whole, PROMPTS[:2], run(llm, PROMPTS[:2]))


def test_images_that_must_not_be_split(fake: Fake) -> None:
    llm = open_fake(fake, max_num_batched_tokens=15, disable_chunked_mm_input=True)
    assert max_span(llm.llm_engine.config) == 15
    ends = set[tuple[int, int]]()
    submit = llm.llm_engine.core.executor.submit

    def watch(plan: Any) -> Any:
        rows = llm.llm_engine.core.scheduler.running
        for row in plan.rows.tolist():
            ends.add((row, int(rows.num_computed[row])))
            its = rows.request(row).media
            for item in its.items if its else ():
                assert not item.offset < rows.num_computed[row] < item.end, "a step ends inside an image"
        return submit(plan)

    llm.llm_engine.core.executor.submit = watch  # type: ignore[method-assign]
    check(fake, PROMPTS, run(llm, PROMPTS))
    assert ends


def test_item_too_large_for_a_step_is_refused() -> None:
    reader = media()
    reader._max_span = len([START, PAD, PAD, END])
    request = {"prompt": "see <i> and <i>", "multi_modal_data": {"image": [picture(20, 10), picture(20, 16)]}}
    assert inputs(reader).parse(request).media is not None
    request["multi_modal_data"] = {"image": [picture(20, 10), picture(20, 17)]}
    with pytest.raises(RequestError, match="One image has 6 tokens.* step holds 4: use a smaller"):
        inputs(reader).parse(request)


def test_sequences_of_one_prompt_share_its_image(fake: Fake) -> None:
    llm = open_fake(fake)
    (output,) = run(llm, [PROMPTS[0]], n=3, temperature=1, top_k=1)
    assert [item.token_ids for item in output.outputs] == [fake.greedy(PROMPTS[0], COUNT)[0]] * 3
    assert FakeTower.batches == [1]


def test_image_embeddings_skip_the_vision_encoder(fake: Fake) -> None:
    llm = open_fake(fake)
    prompt = image_prompt(TEXTS[0], CAT, TEXTS[1])
    prompt.media.items[0].arrays = {"embeds": Array.of(fake.vectors(CAT).numpy())}
    check(fake, [prompt], run(llm, [prompt]))
    assert not FakeTower.batches


def test_pooling_model_with_images(fake: Fake) -> None:
    llm = open_fake(fake, runner="pooling", max_num_batched_tokens=8)
    engine, seen = llm.llm_engine, PROMPTS[1]
    prompt = Prompt(list(seen.tokens), media=Media(list(seen.media.items)))
    request = engine.inputs.pooling_request("seen", prompt, PoolingParams(task="embed", use_activation=False))
    engine.outputs.add("seen", prompt, [request])
    engine.core.add(request)
    results: list[Any] = []
    while engine.has_unfinished_requests():
        results += engine.step()
    with torch.inference_mode():
        states = fake.hf.model(inputs_embeds=fake.embedded(seen)[None]).last_hidden_state[0, -1]
    torch.testing.assert_close(torch.tensor(results[0].outputs.data), states, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_speculative_decoding_after_images(fake: Fake, method: str) -> None:
    """Draft tokens may be the placeholder tokens of an image."""
    spec = {"method": method, "num_speculative_tokens": 3}
    llm = open_fake(fake, speculative_config=spec, max_num_batched_tokens=24)
    for _ in range(2):
        check(fake, PROMPTS, run(llm, PROMPTS))


def test_steps_in_flight_on_a_device(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Embeddings are evicted and computed again while the results of earlier steps are unknown."""

    def open_device(model: Model, all_rows: Rows, device: torch.device, *drafts: Any) -> OnCPU:
        return OnCPU(model, all_rows, lambda logits, *item: logits.argmax(-1), device, *drafts)

    monkeypatch.setattr("quire.worker.loaded_model.open_device", open_device)
    llm = open_fake(fake, max_num_batched_tokens=15)
    core = llm.llm_engine.core
    core.step_queue.depth, core.scheduler.media.size = 2, 15
    for _ in range(2):
        assert core.reset_prefix_cache()
        check(fake, PROMPTS, run(llm, PROMPTS))


def test_only_requests_with_invalid_media_fail(fake: Fake) -> None:
    """Several invalid requests are in one step, and each is retried alone: too large values, a wrong number
    of embeddings, missing data."""
    llm = open_fake(fake)
    bad, short = (
        image_prompt(TEXTS[1], np.full_like(CAT, 1e9), TEXTS[0]),
        image_prompt(TEXTS[1], DOG, TEXTS[0]),
    )
    short.media.items[0].length, short.media.items[0].key = len(DOG) - 1, b"another"
    absent = image_prompt(TEXTS[1], DOG[::-1].copy())
    absent.media.items[0].arrays = None
    result = run(llm, [PROMPTS[0], bad, short, PROMPTS[1], absent, PROMPTS[2]])
    check(fake, [PROMPTS[0], PROMPTS[1], PROMPTS[2]], [result[0], result[3], result[5]])
    assert [result[n].outputs[0].finish_reason for n in (1, 2, 4)] == ["error"] * 3
    check(fake, PROMPTS, run(llm, PROMPTS))


def test_encoder_cache_is_empty_after_sleep(fake: Fake) -> None:
    llm = open_fake(fake, enable_sleep_mode=True)
    run(llm, [PROMPTS[4]])
    worker: Worker = llm.llm_engine.core.executor._worker  # type: ignore[attr-defined]
    for level in (1, 2):
        assert worker.loaded.encoder is not None and worker.loaded.encoder.cache
        llm.sleep(level)
        assert worker.loaded.encoder is None or not worker.loaded.encoder.cache
        llm.wake_up()
        check(fake, [PROMPTS[4]], run(llm, [PROMPTS[4]]))


def test_memory_of_the_encoder_cache_is_counted(fake: Fake) -> None:
    needs: list[Any] = []
    for skip in (False, True):
        settings = {
            "model": str(fake.path),
            "dtype": "float32",
            "skip_mm_profiling": skip,
            "max_model_len": 96,
        }
        worker = Worker(configure(settings | {"use_tqdm_on_load": False, "max_num_batched_tokens": 48}))
        worker.load()
        worker.measure()
        needs.append(worker._needs)
    assert needs[0].vectors == 48 * 64 * 4 and needs[1].vectors == 0
    assert needs[0].total > needs[1].total


def test_largest_item_comes_from_the_processor(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "open_tokenizer", lambda config: "a tokenizer")
    settings = {"model": str(fake.path), "max_num_batched_tokens": 16, "max_num_seqs": 4}
    config = build.with_largest(configure(settings))
    assert config.largest_items == {"image": MOST} and max_vectors(config) == MOST
    for more, most in (({"max_model_len": 20}, 20), ({"limit_mm_per_prompt": {"image": 0}}, 16)):
        assert max_vectors(build.with_largest(configure(settings | more))) == most


class Sized(InputsProcessor):
    """Processor with videos and audio of fixed sizes."""

    def largest(self, modality: str) -> tuple[int, ...]:
        return {"image": (128, 128), "video": (64, 8, 8), "audio": (6300,)}[modality]


def test_limits_set_the_size_of_the_largest_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(largest_items, "PROCESSORS", {"fake": lambda *item: Sized()})
    facts = MediaFacts("fake", ("image", "video", "audio"), None)

    def found(kwargs: dict[str, Any] | None = None, **limits: Any) -> dict[str, int]:
        section = MultimodalSection(limit_mm_per_prompt=limits, mm_processor_kwargs=kwargs or {})
        tokenizer: Any = "a tokenizer"
        return largest_items.largest_items(Path(), facts, section, tokenizer, 90)

    some: dict[str, Any] = {"video": 0, "audio": {"count": 0}}
    assert found() == {"image": 64, "video": 64, "audio": 64} and found(**some) == {"image": 64}
    assert found(**some, image={"count": 2, "width": 40}) == {"image": 3 * 8}
    assert found({"side": 32}, **some) == {"image": 16}
    assert found(image=0, video={"num_frames": 7, "width": 9, "height": 9}, audio={"length": 450}) == {
        "video": 7,
        "audio": 5,
    }
    with pytest.raises(
        ConfigError, match="limit_mm_per_prompt.image does not accept depth=3; it takes count,"
    ):
        found(image={"depth": 3})


# ---- several devices

WORLDS: dict[str, dict[str, Any]] = {
    "shares of layers": {"tensor_parallel_size": 2},
    "some of the items": {"tensor_parallel_size": 2, "mm_encoder_tp_mode": "data"},
    "stages": {"pipeline_parallel_size": 2},
    "items in the first of two stages": {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "mm_encoder_tp_mode": "data",
    },
}


@pytest.mark.parametrize("world", WORLDS)
def test_tensor_parallel_answers_equal_one_device(fake: Fake, world: str) -> None:
    """A rank that cannot encode an item does not block the other ranks."""
    settings = WORLDS[world]
    engine = Engine(fake.path, max_num_batched_tokens=20, max_model_len=96, **settings)
    bad = image_prompt(TEXTS[1], np.full_like(CAT, 1e9), TEXTS[0])
    for number, seen in enumerate([*PROMPTS, bad]):
        engine.add(str(number), seen.tokens, COUNT, Media(seen.media.items))
    engine.run()
    engine.close()
    for number, seen in enumerate(PROMPTS):
        assert engine.tokens[str(number)] == fake.greedy(seen, COUNT)[0]
    ended = {id: finish.reason for step in engine.steps for id, finish in step.finished.items()}
    assert [id for id, reason in ended.items() if reason == "error"] == [str(len(PROMPTS))]
    towers = [getattr(worker.model, "tower", None) for worker in engine.executor.workers]
    is_tensor_parallel = (
        settings.get("mm_encoder_tp_mode", "weights") == "weights" and "tensor_parallel_size" in settings
    )
    assert [tower.up.sizes_out for tower in towers if tower] == [
        (4 if is_tensor_parallel else 8,)
    ] * settings.get("tensor_parallel_size", 1)


def test_items_are_balanced_by_cost() -> None:
    assert balance_items([3, 10, 4, 4, 2], 2) == [[1, 4], [2, 3, 0]]
    assert balance_items([5], 3) == [[0], [], []]


def test_encoder_that_cannot_be_sharded_is_data_parallel(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(FakeTower, "can_shard")
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    engine = Engine(fake.path, tensor_parallel_size=2)
    assert {worker.model.tower.up.sizes_out for worker in engine.executor.workers} == {(8,)}
    assert "encoder of fake cannot be divided over 2 devices" in caplog.text
    engine.close()


# ---- messages


def test_items_are_serialized_with_plans_and_requests(fake: Fake) -> None:
    """bfloat16 values are sent as their bits; nothing is copied on receipt."""
    seen = image_prompt(TEXTS[0], CAT, TEXTS[1], split=True)
    bits = torch.randn(3, 4).bfloat16()
    seen.media.items[0].arrays |= {"bits": Array.of(bits.view(torch.uint16).numpy())}
    none = np.empty(0, np.int32)
    plan = StepPlan(
        1, [], [], none, none, none, none, none > 0, evicted_media=[b"k"], encodes=seen.media.items
    )
    received = decode_plan(encode_plan(plan))
    (item,) = received.encodes
    assert received.evicted_media == [b"k"] and item.places() == seen.media.items[0].places()
    assert item.arrays is not None and (item.arrays["pixels"].numbers() == CAT).all()
    encoder = MediaEncoder(FakeTower, hidden=1, dtype=torch.float32, device=torch.device("cpu"))
    assert torch.equal(encoder._on_device(item.arrays["bits"]), bits)
    request = Request(id="a", tokens=seen.tokens, params=SamplingParams(), prompt_len=1, limit=2, seed=0)
    request.media = seen.media
    sent = decode_to_core(encode(Add([request], [("b", 1)]))).all()
    assert sent[0].media is sent[1].media and (sent[1].media.items[0].arrays["pixels"].numbers() == CAT).all()

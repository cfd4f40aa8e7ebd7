"""Images through the whole engine: what is said is what the decoder says of the vectors in their places."""

import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuda_on_cpu import OnCPU
from fake import MOST, Fake, FakeTower, Seen, image, make_fake, register, see
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
from quire.data.plan import StepPlan
from quire.data.request import Request
from quire.data.wire import Add, decode_to_core, encode
from quire.errors import ConfigError, RequestError
from quire.frontend.inputs import Prompt
from quire.memory import max_span, max_vectors
from quire.multimodal import largest_items
from quire.worker.device import Model
from quire.worker.multimodal.encoder import MediaEncoder, shares
from quire.worker.rows import Rows
from quire.worker.worker import Worker

COUNT = 5
TEXTS = prompts_of(5, 9, 3, 14)
CAT, DOG, BIRD = image(9, 1), image(14, 2), image(4, 3)
PROMPTS = [
    see(TEXTS[0], CAT, TEXTS[1]),
    see(DOG, TEXTS[2], CAT, BIRD, TEXTS[0]),
    see(TEXTS[3]),
    see(TEXTS[1], BIRD, TEXTS[2], DOG, TEXTS[2], split=True),
    see(CAT, TEXTS[2]),
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


def add(llm: LLM, prompts: list[Seen], **asked: Any) -> list[str]:
    engine = llm.llm_engine
    asked = {"temperature": 0, "max_tokens": COUNT, "logprobs": -1} | asked
    params = SamplingParams(ignore_eos=True, **asked)
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


def run(llm: LLM, prompts: list[Seen], *, preempt: tuple[int, ...] = (), **asked: Any) -> list[RequestOutput]:
    ids, found, step, engine = add(llm, prompts, **asked), dict[str, Any](), 0, llm.llm_engine
    scheduler = engine.core.scheduler
    while engine.has_unfinished_requests():
        if step in preempt:
            scheduler._preempt(int(scheduler.running.order[0]))
        found |= {output.request_id: output for output in engine.step() if output.finished}
        step += 1
    cache = scheduler.media
    assert not cache.rows and not cache.num_held and not len(cache.shelf)
    return [found[id] for id in ids]


def check(fake: Fake, prompts: list[Seen], found: list[RequestOutput]) -> None:
    for seen, output in zip(prompts, found, strict=True):
        said, logits = fake.greedy(seen, COUNT)
        assert output.outputs[0].token_ids == said
        torch.testing.assert_close(logits_of(output), logits, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("chunk", [64, 7, 16])
def test_images_say_what_their_vectors_say(fake: Fake, chunk: int) -> None:
    """One and several, mixed with text, wherever chunks end; together and alone. Chunks are smaller than some
    images, so that more than one is needed for the vectors of one, and not all fit into the cache."""
    llm = open_fake(fake, max_num_batched_tokens=chunk)
    llm.llm_engine.core.scheduler.media.size = max(chunk, len(DOG))
    check(fake, PROMPTS, run(llm, PROMPTS))
    assert max(FakeTower.batches) > 1 or chunk < 16, "images of several requests go through together"
    for seen in PROMPTS:
        check(fake, [seen], run(llm, [seen]))


def test_a_repeated_image_is_a_hit_and_another_is_not(fake: Fake) -> None:
    llm = open_fake(fake)
    prefix = TEXTS[0][:4]
    first, again, other = (see(prefix, each, TEXTS[1]) for each in (DOG, DOG, DOG[::-1].copy()))
    moved = see(prefix, TEXTS[2][:1], DOG, TEXTS[1])
    found = [run(llm, [seen])[0] for seen in (first, again, other, moved)]
    check(fake, [first, again, other, moved], found)
    # 4 + 14 + 9 tokens in blocks of 4, the last of which is never a hit.
    assert [output.num_cached_tokens for output in found] == [0, 24, 4, 4]
    assert FakeTower.batches == [1, 1], "neither what the prefix covers nor what is kept is encoded"
    llm.llm_engine.reset_prefix_cache()
    assert llm.llm_engine.reset_encoder_cache()
    check(fake, [again], run(llm, [again]))
    assert FakeTower.batches == [1, 1, 1]


@pytest.mark.parametrize("sharing", [True, False], ids=["prefixes", "no prefixes"])
def test_preempted_in_the_middle_of_an_image(fake: Fake, sharing: bool) -> None:
    llm = open_fake(fake, max_num_batched_tokens=10, enable_prefix_caching=sharing)
    check(fake, PROMPTS, run(llm, PROMPTS, preempt=(1, 2, 3, 5, 8)))
    assert llm.llm_engine.core.scheduler.num_preemptions == 5


def test_tokens_of_an_image_that_see_each_other(tmp_path: Path) -> None:
    """In one step and several, beside text and decodes, from the prefix cache, and computed again."""
    whole = make_fake(tmp_path, whole=True)
    llm = open_fake(whole, max_num_batched_tokens=17)
    check(whole, PROMPTS, run(llm, PROMPTS, preempt=(2, 4)))
    check(whole, PROMPTS[:2], run(llm, PROMPTS[:2]))


def test_images_that_must_not_be_divided(fake: Fake) -> None:
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


def test_what_no_step_can_hold_is_refused_at_the_door() -> None:
    reader = media()
    reader._max_span = len([START, PAD, PAD, END])
    given = {"prompt": "see <i> and <i>", "multi_modal_data": {"image": [picture(20, 10), picture(20, 16)]}}
    assert inputs(reader).parse(given).media is not None
    given["multi_modal_data"] = {"image": [picture(20, 10), picture(20, 17)]}
    with pytest.raises(RequestError, match="One image has 6 tokens.* step holds 4: use a smaller"):
        inputs(reader).parse(given)


def test_sequences_of_one_prompt_share_its_image(fake: Fake) -> None:
    llm = open_fake(fake)
    (output,) = run(llm, [PROMPTS[0]], n=3, temperature=1, top_k=1)
    assert [each.token_ids for each in output.outputs] == [fake.greedy(PROMPTS[0], COUNT)[0]] * 3
    assert FakeTower.batches == [1]


def test_vectors_in_place_of_an_image_go_past_the_tower(fake: Fake) -> None:
    llm = open_fake(fake)
    given = see(TEXTS[0], CAT, TEXTS[1])
    given.media.items[0].arrays = {"embeds": Array.of(fake.vectors(CAT).numpy())}
    check(fake, [given], run(llm, [given]))
    assert not FakeTower.batches


def test_a_model_that_pools_sees_too(fake: Fake) -> None:
    llm = open_fake(fake, runner="pooling", max_num_batched_tokens=8)
    engine, seen = llm.llm_engine, PROMPTS[1]
    prompt = Prompt(list(seen.tokens), media=Media(list(seen.media.items)))
    request = engine.inputs.pooling_request("seen", prompt, PoolingParams(task="embed", use_activation=False))
    engine.outputs.add("seen", prompt, [request])
    engine.core.add(request)
    found: list[Any] = []
    while engine.has_unfinished_requests():
        found += engine.step()
    with torch.inference_mode():
        states = fake.hf.model(inputs_embeds=fake.embedded(seen)[None]).last_hidden_state[0, -1]
    torch.testing.assert_close(torch.tensor(found[0].outputs.data), states, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafts_behind_images(fake: Fake, method: str) -> None:
    """Drafts may be the very tokens that stand for an image."""
    spec = {"method": method, "num_speculative_tokens": 3}
    llm = open_fake(fake, speculative_config=spec, max_num_batched_tokens=24)
    for _ in range(2):
        check(fake, PROMPTS, run(llm, PROMPTS))


def test_steps_in_flight_on_a_device(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors are forgotten, and made, behind steps whose results nobody knows."""

    def open_device(model: Model, all_rows: Rows, device: torch.device, *drafts: Any) -> OnCPU:
        return OnCPU(model, all_rows, lambda logits, *asked: logits.argmax(-1), device, *drafts)

    monkeypatch.setattr("quire.worker.loaded_model.open_device", open_device)
    llm = open_fake(fake, max_num_batched_tokens=15)
    core = llm.llm_engine.core
    core.step_queue.depth, core.scheduler.media.size = 2, 15
    for _ in range(2):
        assert core.reset_prefix_cache()
        check(fake, PROMPTS, run(llm, PROMPTS))


def test_only_who_brings_what_no_tower_can_read_fails(fake: Fake) -> None:
    """Several in one step: each is tried alone. Too bright, not as many vectors as tokens, not there."""
    llm = open_fake(fake)
    bad, short = see(TEXTS[1], np.full_like(CAT, 1e9), TEXTS[0]), see(TEXTS[1], DOG, TEXTS[0])
    short.media.items[0].length, short.media.items[0].key = len(DOG) - 1, b"another"
    absent = see(TEXTS[1], DOG[::-1].copy())
    absent.media.items[0].arrays = None
    found = run(llm, [PROMPTS[0], bad, short, PROMPTS[1], absent, PROMPTS[2]])
    check(fake, [PROMPTS[0], PROMPTS[1], PROMPTS[2]], [found[0], found[3], found[5]])
    assert [found[n].outputs[0].finish_reason for n in (1, 2, 4)] == ["error"] * 3
    check(fake, PROMPTS, run(llm, PROMPTS))


def test_vectors_are_gone_after_sleep(fake: Fake) -> None:
    llm = open_fake(fake, enable_sleep_mode=True)
    run(llm, [PROMPTS[4]])
    worker: Worker = llm.llm_engine.core.executor._worker  # type: ignore[attr-defined]
    for level in (1, 2):
        assert worker.loaded.encoder is not None and worker.loaded.encoder.kept
        llm.sleep(level)
        assert worker.loaded.encoder is None or not worker.loaded.encoder.kept
        llm.wake_up()
        check(fake, [PROMPTS[4]], run(llm, [PROMPTS[4]]))


def test_memory_of_vectors_is_counted(fake: Fake) -> None:
    needs: list[Any] = []
    for skip in (False, True):
        given = {"model": str(fake.path), "dtype": "float32", "skip_mm_profiling": skip, "max_model_len": 96}
        worker = Worker(configure(given | {"use_tqdm_on_load": False, "max_num_batched_tokens": 48}))
        worker.load()
        worker.measure()
        needs.append(worker._needs)
    assert needs[0].vectors == 48 * 64 * 4 and needs[1].vectors == 0
    assert needs[0].total > needs[1].total


def test_the_largest_item_is_what_the_processor_says(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "open_tokenizer", lambda config: "a tokenizer")
    given = {"model": str(fake.path), "max_num_batched_tokens": 16, "max_num_seqs": 4}
    config = build.with_largest(configure(given))
    assert config.largest_items == {"image": MOST} and max_vectors(config) == MOST
    for more, most in (({"max_model_len": 20}, 20), ({"limit_mm_per_prompt": {"image": 0}}, 16)):
        assert max_vectors(build.with_largest(configure(given | more))) == most


class Sized(InputsProcessor):
    """One with videos and sounds of some size."""

    def largest(self, modality: str) -> tuple[int, ...]:
        return {"image": (128, 128), "video": (64, 8, 8), "audio": (6300,)}[modality]


def test_settings_say_how_large_items_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(largest_items, "PROCESSORS", {"fake": lambda *given: Sized()})
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


# ---- over devices

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
def test_several_devices_see_what_one_sees(fake: Fake, world: str) -> None:
    """And one of them that cannot read an item: the others do not wait for its vectors."""
    given = WORLDS[world]
    engine = Engine(fake.path, max_num_batched_tokens=20, max_model_len=96, **given)
    bad = see(TEXTS[1], np.full_like(CAT, 1e9), TEXTS[0])
    for number, seen in enumerate([*PROMPTS, bad]):
        engine.add(str(number), seen.tokens, COUNT, Media(seen.media.items))
    engine.run()
    engine.close()
    for number, seen in enumerate(PROMPTS):
        assert engine.tokens[str(number)] == fake.greedy(seen, COUNT)[0]
    ended = {id: finish.reason for step in engine.steps for id, finish in step.finished.items()}
    assert [id for id, reason in ended.items() if reason == "error"] == [str(len(PROMPTS))]
    towers = [getattr(worker.model, "tower", None) for worker in engine.executor.workers]
    is_divided = given.get("mm_encoder_tp_mode", "weights") == "weights" and "tensor_parallel_size" in given
    assert [tower.up.sizes_out for tower in towers if tower] == [(4 if is_divided else 8,)] * given.get(
        "tensor_parallel_size", 1
    )


def test_items_are_spread_by_what_they_take() -> None:
    assert shares([3, 10, 4, 4, 2], 2) == [[1, 4], [2, 3, 0]]
    assert shares([5], 3) == [[0], [], []]


def test_a_tower_that_cannot_be_divided_is_spread(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(FakeTower, "divides")
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    engine = Engine(fake.path, tensor_parallel_size=2)
    assert {worker.model.tower.up.sizes_out for worker in engine.executor.workers} == {(8,)}
    assert "encoder of fake cannot be divided over 2 devices" in caplog.text
    engine.close()


# ---- on the way


def test_items_travel_with_plans_and_requests(fake: Fake) -> None:
    """Numbers of bfloat16 as their bits; nothing is copied on the way in."""
    seen = see(TEXTS[0], CAT, TEXTS[1], split=True)
    bits = torch.randn(3, 4).bfloat16()
    seen.media.items[0].arrays |= {"bits": Array.of(bits.view(torch.uint16).numpy())}
    none = np.empty(0, np.int32)
    plan = StepPlan(1, [], [], none, none, none, none, none > 0, forgotten=[b"k"], encodes=seen.media.items)
    found = decode_plan(encode_plan(plan))
    (item,) = found.encodes
    assert found.forgotten == [b"k"] and item.places() == seen.media.items[0].places()
    assert item.arrays is not None and (item.arrays["pixels"].numbers() == CAT).all()
    encoder = MediaEncoder(FakeTower, hidden=1, dtype=torch.float32, device=torch.device("cpu"))
    assert torch.equal(encoder._on_device(item.arrays["bits"]), bits)
    request = Request(id="a", tokens=seen.tokens, params=SamplingParams(), prompt_len=1, limit=2, seed=0)
    request.media = seen.media
    sent = decode_to_core(encode(Add([request], [("b", 1)]))).all()
    assert sent[0].media is sent[1].media and (sent[1].media.items[0].arrays["pixels"].numbers() == CAT).all()

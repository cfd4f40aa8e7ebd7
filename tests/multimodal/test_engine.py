"""Images through the whole engine: what is said is what the decoder says of the vectors in their places."""

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from fake import MOST, Fake, FakeTower, Seen, image, make_fake, register, see
from threads import run_threads, tp_worlds
from tiny import logits_of, open_tiny, prompts_of

from quire import LLM, SamplingParams
from quire.capacity import max_span, max_vectors
from quire.comm.world import World
from quire.core import build
from quire.data.media import Array, Media
from quire.data.outputs import RequestOutput
from quire.data.plan import Admission, StepPlan, StepResult
from quire.errors import EngineError
from quire.frontend.inputs import Prompt
from quire.prepare import configure
from quire.sched.media import stripped
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
    media = scheduler.media
    assert not media.rows and not media.num_held and not len(media.shelf)
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


def test_images_that_must_not_be_divided(fake: Fake) -> None:
    llm = open_fake(fake, max_num_batched_tokens=15, disable_chunked_mm_input=True)
    assert max_span(llm.llm_engine.config) == 15
    ends = set[tuple[int, int]]()
    submit = llm.llm_engine.core.executor.submit

    def watch(plan: Any) -> Any:
        rows = llm.llm_engine.core.scheduler.running
        for row in plan.rows.tolist():
            ends.add((row, int(rows.num_computed[row])))
            media = rows.request(row).media
            for item in media.items if media else ():
                assert not item.offset < rows.num_computed[row] < item.end, "a step ends inside an image"
        return submit(plan)

    llm.llm_engine.core.executor.submit = watch  # type: ignore[method-assign]
    check(fake, PROMPTS, run(llm, PROMPTS))
    assert ends


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


def test_only_who_brings_what_no_tower_can_read_fails(fake: Fake) -> None:
    """Several in one step: each is tried alone."""
    llm = open_fake(fake)
    bad = see(TEXTS[1], np.full_like(CAT, 1e9), TEXTS[0])
    found = run(llm, [PROMPTS[0], bad, PROMPTS[1], PROMPTS[2]])
    check(fake, [PROMPTS[0], PROMPTS[1], PROMPTS[2]], [found[0], *found[2:]])
    assert found[1].outputs[0].finish_reason == "error"
    check(fake, PROMPTS, run(llm, PROMPTS))


def test_vectors_are_gone_after_sleep(fake: Fake) -> None:
    llm = open_fake(fake, enable_sleep_mode=True)
    run(llm, [PROMPTS[4]])
    worker: Worker = llm.llm_engine.core.executor._worker  # type: ignore[attr-defined]
    for level in (1, 2):
        assert worker.encoder is not None and worker.encoder.kept
        llm.sleep(level)
        assert worker.encoder is None or not worker.encoder.kept
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


# ---- over devices


def plan_of(*prompts: Seen) -> StepPlan:
    """All of them in one step."""
    admitted, encodes, first = [], {}, 1
    for row, seen in enumerate(prompts):
        count = -(-len(seen.tokens) // 4)
        params = SamplingParams(temperature=0, logprobs=-1)
        blocks, first = [[*range(first, first + count)]], first + count
        admitted.append(Admission(row, str(row), seen.tokens, len(seen.tokens), 0, blocks, params, 0))
        admitted[-1].media = stripped(seen.media)
        encodes |= {item.key: item for item in seen.media.items}
    lens = np.array([len(seen.tokens) for seen in prompts], np.int32)
    none, rows = np.empty(0, np.int32), np.arange(len(prompts), dtype=np.int32)
    return StepPlan(1, [], admitted, none, none, rows, lens, lens > 0, encodes=[*encodes.values()])


def workers(fake: Fake, mode: str) -> list[Worker]:
    given = {"model": str(fake.path), "dtype": "float32", "block_size": 4, "max_num_seqs": 4}
    given |= {"max_model_len": 96, "num_gpu_blocks_override": 120, "use_tqdm_on_load": False}
    given |= {"tensor_parallel_size": 2, "mm_encoder_tp_mode": mode, "max_logprobs": -1}
    config = configure(given | {"logprobs_mode": "raw_logits"})
    made = [Worker(config, world) for world in tp_worlds(2)]
    for worker in made:  # one after the other, since packing shares memory
        worker.load()
    return made


def step(made: list[Worker], plan: StepPlan) -> list[StepResult]:
    def take(world: World) -> StepResult:
        worker = made[world.tp.rank]
        worker.allocate(worker.measure())
        return worker.submit(plan).wait()

    found: list[StepResult] = run_threads(2, take, worlds=lambda _: [worker.world for worker in made])
    return found


@pytest.mark.parametrize("mode", ["weights", "data"])
def test_two_devices_see_what_one_sees(fake: Fake, mode: str) -> None:
    made = workers(fake, mode)
    tower = made[0].model.tower
    assert tower.up.sizes_out == ((4,) if mode == "weights" else (8,))
    for result in step(made, plan_of(*PROMPTS[:4])):
        for row, seen in enumerate(PROMPTS[:4]):
            expected = fake.greedy(seen, 1)[1][0]
            found = dict(
                zip(result.logprobs[row][0].token_ids, result.logprobs[row][0].logprobs, strict=True)
            )
            ours = torch.tensor([found[id] for id in range(len(expected))])
            torch.testing.assert_close(ours, expected, atol=1e-3, rtol=1e-3)
    # Of three images the largest is one device's, and the others the other's.
    assert sorted(FakeTower.batches) == ([3, 3] if mode == "weights" else [1, 2])


def test_where_one_device_cannot_encode_none_goes_on(fake: Fake) -> None:
    """Catches devices that wait for the vectors of one that has failed."""
    bad = see(TEXTS[1], np.full_like(CAT, 1e9), TEXTS[0])
    made = workers(fake, "data")

    def take(world: World) -> str:
        worker = made[world.tp.rank]
        worker.allocate(worker.measure())
        with pytest.raises((EngineError, ValueError)) as failed:
            worker.submit(plan_of(bad, PROMPTS[1]))
        return str(failed.value)

    said = run_threads(2, take, worlds=lambda _: [worker.world for worker in made])
    assert sorted(said) == ["another device could not encode its items", "too bright"]


def test_a_tower_that_cannot_be_divided_is_spread(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(FakeTower, "divides")
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    made = workers(fake, "weights")
    assert made[0].model.tower.up.sizes_out == (8,)
    assert "towers of fake cannot be divided over 2 devices" in caplog.text

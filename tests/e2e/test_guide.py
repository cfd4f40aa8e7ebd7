"""What must be seen of what a reader of the optimization guide types, beside its snippets as they are written
(test_guide_snippets.py). What is not built yet is listed with its refusal, so that nothing is forgotten."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from guide_models import GREEDY, IMAGES, PROMPTS, described, texts
from tiny_qwen import made
from tiny_text import TextModel

from quire import LLM, SamplingParams
from quire.config.env import warn_unknown
from quire.errors import ConfigError, QuireError
from quire.logs import warn_once
from quire.multimodal.processors.qwen import GridProcessor


@pytest.fixture(scope="module")
def model(tiny: TextModel) -> str:
    """Stands for every model of the guide."""
    return str(tiny.path)


def opened(model: str, **given: Any) -> LLM:
    return LLM(model, **{"dtype": "float32", "num_gpu_blocks_override": 256, **given})


@pytest.fixture(scope="module")
def plain(model: str) -> list[str]:
    """What an engine without further settings says."""
    return texts(opened(model))


@contextmanager
def logged() -> Iterator[list[str]]:
    """The lines that Quire writes meanwhile, those of which it wrote once before among them."""
    warn_once.cache_clear()
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("quire")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def longest_step(llm: LLM) -> float:
    """The upper bound of the bucket that the largest step fell into."""
    (steps,) = (each for each in llm.get_metrics() if each.name == "vllm:iteration_tokens_total")
    buckets: dict[str, int] = steps.buckets  # type: ignore[attr-defined]
    return min(float(edge) for edge, count in buckets.items() if count == max(buckets.values()))


# ---- chunked prefill, budgets, preemption, statistics


@pytest.mark.parametrize("budget", [16, 2048])
def test_prompts_are_chunked_to_the_budget(model: str, plain: list[str], budget: int) -> None:
    given = {"enable_chunked_prefill": True, "max_num_batched_tokens": budget, "max_num_seqs": 8}
    llm = opened(model, disable_log_stats=False, **given)
    assert llm.llm_engine.config.scheduler.max_num_batched_tokens == budget
    assert texts(llm) == plain
    llm.generate([{"prompt_token_ids": [5] * 200}], GREEDY, use_tqdm=False)
    assert longest_step(llm) <= budget


def test_a_small_cache_preempts_with_the_guides_warning(model: str) -> None:
    """Offline statistics, too: a line with the cumulative preemptions."""
    prompts = [f"{prompt} {number}" for number in range(6) for prompt in PROMPTS]
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    expected = [each.outputs[0].text for each in opened(model).generate(prompts, params, use_tqdm=False)]
    with logged() as lines:
        small = opened(
            model, num_gpu_blocks_override=16, max_model_len=128, enable_prefix_caching=False,
            scheduler_reserve_full_isl=False, disable_log_stats=False,
        )  # fmt: skip
        found = [each.outputs[0].text for each in small.generate(prompts, params, use_tqdm=False)]
    assert found == expected
    warning = next(line for line in lines if "PreemptionMode.RECOMPUTE" in line)  # one in 10 s
    assert (
        "is preempted by PreemptionMode.RECOMPUTE mode because there is not enough KV cache space" in warning
    )
    assert "total_cumulative_preemption_cnt=1" in warning
    for remedy in (
        "gpu_memory_utilization",
        "tensor_parallel_size",
        "max_num_seqs",
        "max_num_batched_tokens",
    ):
        assert remedy in warning
    values = {each.name: getattr(each, "value", None) for each in small.get_metrics()}
    assert values["vllm:num_preemptions"] > 0
    assert any(f"Preemptions: {values['vllm:num_preemptions']}" in line for line in lines)


# ---- the choice of backend, eager mode, settings without effect


def test_backends_are_chosen_mapped_or_refused_with_the_reason(model: str, plain: list[str]) -> None:
    assert texts(opened(model, attention_backend="TORCH_SDPA")) == plain
    with logged() as lines:
        assert texts(opened(model, attention_backend="XFORMERS")) == plain
    assert any("XFORMERS" in line for line in lines)
    for name in ("FLASH_ATTN", "FLASHINFER"):
        with pytest.raises(QuireError, match=name):
            opened(model, attention_backend=name)


def test_eager_and_ignored_settings_change_no_token(model: str, plain: list[str]) -> None:
    with logged() as lines:
        assert texts(opened(model, enforce_eager=True, swap_space=4)) == plain
    assert any("swap_space" in line and "no effect" in line for line in lines)
    assert texts(opened(model, gpu_memory_utilization=0.5, max_model_len=256, max_num_seqs=4)) == plain


def test_a_variable_without_effect_is_said_to_do_nothing() -> None:
    with logged() as lines:
        warn_unknown({"VLLM_MEDIA_CACHE": "/tmp", "VLLM_MEDIA_LOADING_THREAD_COUNT": "2"})
    assert any("VLLM_MEDIA_CACHE" in line for line in lines)
    assert not any("THREAD_COUNT" in line for line in lines)


# ---- images


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Stands for every model of the guide that sees."""
    path, _ = made("Qwen2_5_VL", tmp_path_factory.getbasetemp())
    return str(path)


def seeing(model: str, **given: Any) -> LLM:
    return opened(model, **{"max_model_len": 512, "max_num_seqs": 8, **given})


@pytest.fixture(scope="module")
def seen(vlm: str) -> list[str]:
    found = described(seeing(vlm))
    assert len(set(found)) > 1
    return found


def test_images_lie_in_shared_memory(vlm: str, seen: list[str]) -> None:
    """Once when they are new, once when they are known."""
    llm = seeing(vlm, tensor_parallel_size=2, mm_encoder_tp_mode="data", mm_processor_cache_type="shm")
    assert [described(llm), described(llm)] == [seen, seen]
    arena = llm.llm_engine.inputs.media.processor_cache._arena
    assert arena is not None and arena.num_bytes > 0 and not arena.num_busy
    llm.llm_engine.close()


def test_as_many_threads_load_media_as_asked(
    vlm: str, seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits for another: fewer than two would wait in vain."""
    monkeypatch.setenv("VLLM_MEDIA_LOADING_THREAD_COUNT", "2")
    llm = seeing(vlm)
    pair, names = threading.Barrier(2, timeout=120), set()
    process = GridProcessor.process

    def watched(*args: Any) -> Any:
        names.add(threading.current_thread().name)
        pair.wait()
        return process(*args)

    monkeypatch.setattr(GridProcessor, "process", watched)
    prompt = "<begin><image><end>" * len(IMAGES)
    llm.generate([{"prompt": prompt, "multi_modal_data": {"image": IMAGES}}], GREEDY, use_tqdm=False)
    assert len(names) == 2


# ---- what is not built yet


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"enable_expert_parallel": True}, "enable_expert_parallel"),
        ({"data_parallel_size": 2, "data_parallel_backend": "ray"}, "data_parallel_backend"),
        ({"quantization": "awq"}, "awq"),
        ({"quantization": "gptq"}, "gptq"),
    ],
    ids=str,
)
def test_what_is_to_come_is_refused_in_one_line(model: str, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        opened(model, **given)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_gguf_file_is_named_beside_its_folder(tmp_path: Path) -> None:
    """The name alone: the files themselves are tested with the loader."""
    with pytest.raises(ConfigError, match="absent.gguf"):
        LLM(str(tmp_path), quantization="gguf", gguf_file="absent.gguf")

"""What a reader of the optimization guide types, and what must be seen. The models that the guide names are
stood in for by a tiny one; what is not built yet is listed with its refusal, so that nothing is forgotten."""

import logging
import threading
from base64 import b64encode
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import OpenAI
from PIL import Image
from serve_process import ServeProcess, Start, eventually
from tiny_qwen import made
from tiny_text import TextModel

from quire import LLM, SamplingParams
from quire.config.env import warn_unknown
from quire.errors import ConfigError, QuireError
from quire.multimodal.families.qwen import GridProcessor

PROMPTS = ["The quick brown fox", "One two three four", "A page is a block"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
NINE = [
    *("num_requests_running", "num_requests_waiting", "gpu_cache_usage_perc", "num_preemptions_total"),
    *("avg_prompt_throughput_toks_per_s", "avg_generation_throughput_toks_per_s"),
    *("time_to_first_token_seconds_count", "time_per_output_token_seconds_count"),
    "e2e_request_latency_seconds_count",
]


@pytest.fixture(scope="module")
def model(tiny: TextModel) -> str:
    """Stands for every model of the guide."""
    return str(tiny.path)


def opened(model: str, **given: Any) -> LLM:
    return LLM(model, **{"dtype": "float32", "num_gpu_blocks_override": 256, **given})


def texts(llm: LLM, prompts: list[str] = PROMPTS) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


@pytest.fixture(scope="module")
def plain(model: str) -> list[str]:
    """What an engine without further settings says."""
    return texts(opened(model))


@contextmanager
def logged() -> Iterator[list[str]]:
    """The lines that Quire writes meanwhile."""
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


@pytest.mark.parametrize("budget", [16, 2048, 16384])
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


# ---- the server


def test_the_server_caches_prefixes_and_shows_the_nine_metrics(start: Start) -> None:
    server = start("--enable-prefix-caching", "--enable-chunked-prefill", "--api-server-count", "2")
    server.until_healthy()
    eventually("both say so", lambda: all(server.health() == 200 for _ in range(8)))
    prompt = [7] * 200
    answers = [server.complete(prompt=prompt, max_tokens=4)["choices"][0]["text"] for _ in range(2)]
    assert answers[0] == answers[1]
    found = server.metrics()
    assert found["prefix_cache_hits_total"] >= 160
    assert [name for name in NINE if name not in found] == []


# ---- parallelism


@pytest.mark.parametrize(
    "given",
    [
        {"tensor_parallel_size": 4},
        pytest.param({"tensor_parallel_size": 4, "pipeline_parallel_size": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_devices_share_a_model(model: str, plain: list[str], given: dict[str, int]) -> None:
    llm = opened(model, **given)
    assert texts(llm) == plain
    llm.llm_engine.close()


@pytest.mark.slow
def test_a_server_shares_a_model(start: Start, plain: list[str]) -> None:
    server = start("--dtype", "float32", "--tensor-parallel-size", "4", "--pipeline-parallel-size", "2")
    server.until_healthy()
    assert [completed(server, prompt) for prompt in PROMPTS] == plain
    server.end_cleanly()


def completed(server: ServeProcess, prompt: str) -> str:
    text: str = server.complete(prompt=prompt, max_tokens=GREEDY.max_tokens)["choices"][0]["text"]
    return text


# ---- images


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Stands for every model of the guide that sees."""
    path, _ = made("Qwen2_5_VL", tmp_path_factory.getbasetemp())
    return str(path)


IMAGES = [
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (24 + seed, 32, 3), np.uint8))
    for seed in range(8)
]
SHARED = {"mm_processor_cache_type": "shm", "mm_processor_cache_gb": 8}
TEMPLATE = """{% for message in messages %}{% for part in message.content %}
{%- if part.type == "text" %}{{ part.text }}{% else %}<begin><image><end>{% endif %}
{%- endfor %}{% endfor %}"""


def seeing(model: str, **given: Any) -> LLM:
    return opened(model, **{"max_model_len": 512, "max_num_seqs": 8, **given})


def described(llm: LLM, images: Sequence[Image.Image] = IMAGES) -> list[str]:
    """What it says of each, in a chat."""
    text = {"type": "text", "text": "What is this?"}
    chats: Any = [
        [{"role": "user", "content": [{"type": "image_pil", "image_pil": image}, text]}] for image in images
    ]
    outputs = llm.chat(chats, GREEDY, use_tqdm=False, chat_template=TEMPLATE)
    return [output.outputs[0].text for output in outputs]


@pytest.fixture(scope="module")
def seen(vlm: str) -> list[str]:
    found = described(seeing(vlm))
    assert len(set(found)) > 1
    return found


@pytest.mark.parametrize(
    "given",
    [
        {"tensor_parallel_size": 2, "mm_encoder_tp_mode": "data"} | SHARED,
        {"mm_processor_cache_gb": 8},
        {"mm_processor_cache_gb": 0},
    ],
    ids=str,
)
def test_images_are_shared_and_kept_as_asked(vlm: str, seen: list[str], given: dict[str, Any]) -> None:
    """Once when they are new, once when they may be known."""
    llm = seeing(vlm, **given)
    assert [described(llm), described(llm)] == [seen, seen]
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


def test_servers_share_a_model_and_its_images(
    vlm: str, seen: list[str], start: Start, tmp_path: Path
) -> None:
    """From four API processes and two cores, whichever is asked, as openai's client asks."""
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    words = ("--api-server-count", "4", "-dp", "2", "--chat-template", str(template))
    server = start(*words, "--max-model-len", "512", "--max-num-seqs", "8", model=vlm)
    server.until_healthy(num_api=4)
    assert len(server.with_role("APIServer")) == 4 and len(server.with_role("EngineCore")) == 2

    def ask(image: Image.Image) -> str | None:
        file = BytesIO()
        image.save(file, "PNG")
        url = f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"
        parts: Any = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": "What is this?"},
        ]
        with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            reply = client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": parts}],
                temperature=0,
                max_tokens=GREEDY.max_tokens,
                extra_body={"ignore_eos": True},
            )
        return reply.choices[0].message.content

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, IMAGES * 2)) == seen * 2
    assert [completed(server, prompt) for prompt in PROMPTS] == texts(seeing(vlm))
    server.end_cleanly()


# ---- what is not built yet


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"enable_expert_parallel": True}, "enable_expert_parallel"),
        ({"data_parallel_size": 2, "data_parallel_backend": "ray"}, "data_parallel_backend"),
        ({"quantization": "awq"}, "awq"),
        ({"quantization": "gptq"}, "gptq"),
        ({"cpu_offload_gb": 10}, "cpu_offload_gb"),
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

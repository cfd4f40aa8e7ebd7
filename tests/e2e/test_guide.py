"""Tests of the effects of settings in the optimization guide, and of the table of its claims
(guide_claims.md). test_guide_snippets.py tests the guide's snippets as they are written."""

import ast
import functools
import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from guide_models import GREEDY, IMAGES, NINE, PROMPTS, described, texts
from serve_process import ServeProcess
from tiny_qwen import made
from tiny_text import TextModel

from quire import LLM, SamplingParams
from quire.checkpoint.multimodal import MEDIA_FAMILIES
from quire.cli import main
from quire.config.env import warn_unknown
from quire.errors import ConfigError, QuireError
from quire.logs import warn_once
from quire.models import MODELS
from quire.multimodal.processors.qwen import GridProcessor


@pytest.fixture(scope="module")
def model(tiny: TextModel) -> str:
    """Return the path of the tiny model, which replaces every model of the guide."""
    return str(tiny.path)


def opened(model: str, **settings: Any) -> LLM:
    return LLM(model, **{"dtype": "float32", "num_gpu_blocks_override": 256, **settings})


@pytest.fixture(scope="module")
def plain(model: str) -> list[str]:
    """Return the answers of an engine with default settings."""
    return texts(opened(model))


@contextmanager
def logged() -> Iterator[list[str]]:
    """Yield the log lines of Quire; lines that are logged only once are logged again."""
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
    """Return the upper bound of the bucket of the largest step."""
    (steps,) = (metric for metric in llm.get_metrics() if metric.name == "vllm:iteration_tokens_total")
    buckets: dict[str, int] = steps.buckets  # type: ignore[attr-defined]
    return min(float(edge) for edge, count in buckets.items() if count == max(buckets.values()))


# ---- the table of claims

HERE = Path(__file__).parent
ROW = re.compile(r"\| (\d+) \| (.+?) \| `(.+)` \|")


class Claim(NamedTuple):
    """A row of guide_claims.md."""

    number: int
    words: str
    checks: tuple[str, ...]


CLAIMS = [
    Claim(int(row[1]), row[2], tuple(row[3].replace("\\|", "|").split("`; `")))
    for line in (HERE / "guide_claims.md").read_text().splitlines()
    if (row := ROW.fullmatch(line))
]
COMMANDS = sorted({check for claim in CLAIMS for check in claim.checks if check.startswith("$ ")})


STATED = {29, 31, 32, 33, 54, 91}
"""Claims that are advice, refer to papers or are measured figures: a page has them."""
NOT_IN_MAKE_TEST = {51, 58, 124, 128}
"""Claims whose tests need Ray, the packaged model or other clients, or measure something. `make slow` and
`make clients` run these tests."""


@functools.cache
def run_by_name(file: Path) -> dict[str, bool]:
    """Return the tests in a file, and whether `make test` runs each or some of its cases."""
    nodes = ast.parse(file.read_text()).body if file.is_file() else []
    marks = [ast.unparse(node.value) for node in nodes if isinstance(node, ast.Assign)]
    slow_file = file.parent.name == "clients" or "pytest.mark.slow" in marks
    return {
        node.name: not slow_file and "pytest.mark.slow" not in map(ast.unparse, node.decorator_list)
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def is_run(check: str) -> bool:
    """Return whether `make test`, or the tests on a GPU, run this check."""
    file, _, test = check.partition("::")
    return check.startswith("$ ") or run_by_name(HERE.parent / file).get(test, False)


def is_true(check: str) -> bool:
    """Return whether a test, a sentence of a page, or an architecture exists."""
    if check.startswith("$ "):
        return " => " in check
    if name := re.fullmatch(r"model (\w+)", check):
        return name[1] in MODELS or name[1] in MEDIA_FAMILIES
    if page := re.fullmatch(r"(docs/\S+): (.+)", check):
        return page[2] in (HERE.parents[1] / page[1]).read_text()
    file, _, test = check.partition("::")
    return test.startswith("test_") and test in run_by_name(HERE.parent / file)


def test_every_claim_has_its_checks() -> None:
    """Catches a renamed test or page, and a claim that is not in the table."""
    assert sorted(claim.number for claim in CLAIMS) == list(range(1, 161))
    wrong = {claim.number: check for claim in CLAIMS for check in claim.checks if not is_true(check)}
    assert wrong == {}
    assert {claim.number for claim in CLAIMS if not any(map(is_run, claim.checks))} == (
        STATED | NOT_IN_MAKE_TEST
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_claims(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    typed, _, words = command.removeprefix("$ quire ").partition(" => ")
    try:
        main(typed.split())
    except SystemExit as end:  # of --help
        assert not end.code
    assert words in capsys.readouterr().out


def test_metrics_of_the_guide(server: ServeProcess) -> None:
    names = server.client.get("/metrics").text
    assert [name for name in NINE if f"vllm:{name}" not in names] == []


# ---- chunked prefill, budgets, preemption, statistics


@pytest.mark.parametrize("budget", [16, 2048])
def test_prompts_are_chunked_to_the_budget(model: str, plain: list[str], budget: int) -> None:
    settings = {"enable_chunked_prefill": True, "max_num_batched_tokens": budget, "max_num_seqs": 8}
    llm = opened(model, disable_log_stats=False, **settings)
    assert llm.llm_engine.config.scheduler.max_num_batched_tokens == budget
    assert texts(llm) == plain
    llm.generate([{"prompt_token_ids": [5] * 200}], GREEDY, use_tqdm=False)
    assert longest_step(llm) <= budget


def test_chunked_prefill_is_on_by_default(model: str) -> None:
    with logged() as lines:
        opened(model)
    assert any(line.startswith("Chunked prefill is enabled with max_num_batched_tokens=") for line in lines)


def test_small_cache_preempts_with_the_guides_warning(model: str) -> None:
    """Offline statistics also have a line with the cumulative preemptions."""
    prompts = [f"{prompt} {number}" for number in range(6) for prompt in PROMPTS]
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    expected = [item.outputs[0].text for item in opened(model).generate(prompts, params, use_tqdm=False)]
    with logged() as lines:
        small = opened(
            model, num_gpu_blocks_override=16, max_model_len=128, enable_prefix_caching=False,
            scheduler_reserve_full_isl=False, disable_log_stats=False,
        )  # fmt: skip
        result = [item.outputs[0].text for item in small.generate(prompts, params, use_tqdm=False)]
    assert result == expected
    warning = next(line for line in lines if "PreemptionMode.RECOMPUTE" in line)  # at most one per 10 s
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
    values = {metric.name: getattr(metric, "value", None) for metric in small.get_metrics()}
    assert values["vllm:num_preemptions"] > 0
    assert any(f"Preemptions: {values['vllm:num_preemptions']}" in line for line in lines)


# ---- attention backends, eager mode, settings without effect


def test_backends_are_selected_mapped_or_refused(model: str, plain: list[str]) -> None:
    assert texts(opened(model, attention_backend="TORCH_SDPA")) == plain
    with logged() as lines:
        assert texts(opened(model, attention_backend="XFORMERS")) == plain
    assert any("XFORMERS" in line for line in lines)
    for name in ("FLASH_ATTN", "FLASHINFER"):
        with pytest.raises(QuireError, match=name):
            opened(model, attention_backend=name)


def test_eager_mode_and_ignored_settings_change_no_token(model: str, plain: list[str]) -> None:
    with logged() as lines:
        assert texts(opened(model, enforce_eager=True, swap_space=4)) == plain
    assert any("kv_offloading_size=4.0 has no effect on a CPU" in line for line in lines)
    assert texts(opened(model, gpu_memory_utilization=0.5, max_model_len=256, max_num_seqs=4)) == plain


def test_environment_variable_without_effect_is_warned_about() -> None:
    with logged() as lines:
        warn_unknown({"VLLM_MEDIA_CACHE": "/tmp", "VLLM_MEDIA_LOADING_THREAD_COUNT": "2"})
    assert any("VLLM_MEDIA_CACHE" in line for line in lines)
    assert not any("THREAD_COUNT" in line for line in lines)


# ---- images


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the path of the tiny vision model, which replaces every vision model of the guide."""
    path, _ = made("Qwen2_5_VL", tmp_path_factory.getbasetemp())
    return str(path)


def vision_llm(model: str, **settings: Any) -> LLM:
    return opened(model, **{"max_model_len": 512, "max_num_seqs": 8, **settings})


@pytest.fixture(scope="module")
def descriptions(vlm: str) -> list[str]:
    answers = described(vision_llm(vlm))
    assert len(set(answers)) > 1
    return answers


def test_images_in_shared_memory(vlm: str, descriptions: list[str]) -> None:
    """Covers images that are new, and images that are cached."""
    llm = vision_llm(vlm, tensor_parallel_size=2, mm_encoder_tp_mode="data", mm_processor_cache_type="shm")
    assert [described(llm), described(llm)] == [descriptions, descriptions]
    arena = llm.llm_engine.inputs.media.processor_cache._arena
    assert arena is not None and arena.num_bytes > 0 and not arena.num_busy
    llm.llm_engine.close()


def test_media_loading_thread_count(
    vlm: str, descriptions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread waits for another one, so that with fewer than two threads the request would time out."""
    monkeypatch.setenv("VLLM_MEDIA_LOADING_THREAD_COUNT", "2")
    llm = vision_llm(vlm)
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


# ---- unsupported settings


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"enable_expert_parallel": True}, "enable_expert_parallel"),
        ({"data_parallel_size": 2, "data_parallel_backend": "ray"}, "data_parallel_backend"),
        ({"quantization": "awq"}, "awq"),
        ({"quantization": "gptq"}, "gptq"),
    ],
    ids=str,
)
def test_unsupported_setting_is_a_one_line_error(model: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        opened(model, **settings)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_missing_gguf_file_is_named_with_its_folder(tmp_path: Path) -> None:
    """Only the name is tested here; the tests of the loader read such files."""
    with pytest.raises(ConfigError, match="absent.gguf"):
        LLM(str(tmp_path), quantization="gguf", gguf_file="absent.gguf")

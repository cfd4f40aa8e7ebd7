"""Tests of every snippet of the optimization guide, unchanged, with tiny models in the working directory.
Scripts run through `quire python`; commands run in the shell, with a `vllm` that passes its arguments and
variables to `quire`."""

import sys
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from guide_models import (
    DENSE,
    EXPERTS,
    GGUF,
    GREEDY,
    IMAGES,
    NINE,
    PACKED,
    PROMPTS,
    SEEING,
    described,
    make_models,
    texts,
)
from openai import OpenAI
from PIL import Image
from preloaded import Preloaded
from serve_process import ServeProcess, vllm_call
from tiny_text import TextModel

from quire import LLM
from quire.entrypoints import vllm_shim
from quire.errors import ConfigError

HERE = Path(__file__).parent
SNIPPETS = HERE / "guide"

GUIDE: dict[int, dict[str, str]] = {
    1: {
        "enable_chunked_prefill=True": "01_chunked_prefill.py",
        "--enable-chunked-prefill": "01_chunked_prefill.sh",
    },
    2: {
        "max_num_batched_tokens=16384": "02_large_steps.py",
        "max_num_batched_tokens=2048": "02_small_steps.py",
    },
    3: {"a cache too small for the load": "test_guide.py::test_small_cache_preempts_with_the_guides_warning"},
    4: {"disable_log_stats=False": "04_statistics.py"},
    5: {"--enable-prefix-caching": "05_prefix_caching.sh"},
    6: {"tensor_parallel_size=4": "06_tensor_parallel.py"},
    7: {
        "pipeline_parallel_size=2": "07_pipeline.py",
        "--tensor-parallel-size 4 --pipeline-parallel-size 2": "07_pipeline.sh",
    },
    8: {
        "enable_expert_parallel=True": "08_experts.py",
        "data_parallel_size=2": "08_experts_data.py",
        "--enable-expert-parallel": "08_experts.sh",
        "--data-parallel-size 2 --enable-expert-parallel": "08_experts_data.sh",
    },
    9: {"data_parallel_size=2": "09_data_parallel.py", "-dp 2": "09_data_parallel.sh"},
    10: {'mm_encoder_tp_mode="data"': "10_encoder_data.py"},
    11: {
        "--api-server-count 4": "11_api_processes.sh",
        "--api-server-count 4 -dp 2": "11_api_processes_data.sh",
    },
    12: {
        "VLLM_MEDIA_LOADING_THREAD_COUNT=2": "12_loading_threads.sh",
        "that many": "test_guide.py::test_media_loading_thread_count",
    },
    13: {
        "mm_processor_cache_gb=8": "13_large_cache.py",
        'mm_processor_cache_type="shm"': "13_shared_cache.py",
        "mm_processor_cache_gb=0": "13_no_cache.py",
    },
    14: {
        f"{words}{backend}": f"14_{backend.lower()}{end}.sh"
        for backend in ("FLASH_ATTN", "FLASHINFER", "TORCH_SDPA", "XFORMERS")
        for words, end in (("--attention-backend ", ""), ("VLLM_ATTENTION_BACKEND=", "_variable"))
    },
    15: {"num_speculative_tokens=5": "15_draft_model.py"},
    16: {
        "--quantization fp8": "16_fp8.sh",
        "--quantization awq": "16_awq.sh",
        "--quantization gptq": "16_gptq.sh",
        "AWQ": "16_stored.sh",
    },
    17: {"--quantization gguf --gguf-file": "17_gguf.sh"},
    18: {"--kv-cache-dtype=fp8": "18_fp8_cache.sh", "VLLM_USE_DEEP_GEMM=1": "18_deep_gemm.sh"},
    19: {"--enforce-eager": "19_eager.sh"},
    20: {
        "customer-support=./a finance=./b --max-loras 4 --max-lora-rank 64": "20_adapters.sh",
        "--lora-extra-vocab-size 256": "20_extra_vocab.sh",
    },
    21: {"swap_space": "21_memory.py", "cpu_offload_gb": "21_offload.py"},
    22: {"nine metrics": "test_guide_snippets.py::test_command_runs_as_written"},
    23: {"the memory formula": "../plan/test_plan.py::test_weights_of_70b_match_the_guide"},
    24: {"HPA": "test_deploy.py::test_autoscaler_uses_the_waiting_requests"},
    25: {"alerts": "test_deploy.py::test_alerts_fire_when_they_should"},
    26: {"VLLM_ENGINE_READY_TIMEOUT_S": "../executor/test_multi_node.py::test_missing_machines_are_named"},
    27: {"threads": "../system/test_platform.py::test_two_hardware_threads_per_process_of_a_gpu_engine"},
    28: {"Ray": "../executor/test_ray.py::test_"},
    29: {"client": "test_openai_client.py::test_"},
}
"""Settings by their number in the guide, with the snippets or tests that cover them."""
REFUSED = {
    "14_flash_attn.sh": "FLASH_ATTN",
    "14_flash_attn_variable.sh": "FLASH_ATTN",
    "14_flashinfer.sh": "FLASHINFER",
    "14_flashinfer_variable.sh": "FLASHINFER",
}
"""Snippets that are refused on a CPU or by design, with a word of their error message."""
OTHER_NUMBERS = {"16_fp8.sh", "18_fp8_cache.sh", "18_deep_gemm.sh"}
"""Snippets with answers that may differ from those of the unmodified model."""
OFTEN = {
    *("14_flashinfer_variable.sh", "18_fp8_cache.sh", "20_adapters.sh"),
    *(
        file.name
        for file in SNIPPETS.glob("*.py")
        if file.name[:2] not in ("06", "07", "08", "10", "21") and "shared_cache" not in file.name
    ),
    "08_experts.py",
}
"""Fast snippets. The others start servers or many ranks; test_guide.py also covers images in shared
memory."""


def snippets(suffix: str) -> list[Any]:
    results = sorted(file.name for file in SNIPPETS.glob(f"*{suffix}"))
    return [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in results]


def test_every_line_of_the_guide_is_covered() -> None:
    """Each line of the guide's list has a snippet with its words, or a test; each snippet belongs to a
    line."""
    assert list(GUIDE) == list(range(1, 30))
    used = set()
    for typed, where in (pair for line in GUIDE.values() for pair in line.items()):
        file, _, test = where.partition("::")
        if "test_" in where:
            assert f"def {test}" in (HERE / file).read_text(), where
        else:
            used.add(where)
            assert typed in " ".join((SNIPPETS / where).read_text().split()), where
    assert used == {file.name for file in SNIPPETS.iterdir() if file.is_file()}


@pytest.fixture(scope="module")
def place(tiny: TextModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the working directory."""
    return make_models(tmp_path_factory.mktemp("guide"), tiny, tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def expected(place: Path) -> dict[str, list[str]]:
    """Return the answers of each model without the guide's settings, filled on demand."""
    return {}


def reference_answers(name: str, place: Path, expected: dict[str, list[str]]) -> list[str]:
    if name not in expected:
        llm = LLM(str(place / name))
        expected[name] = described(llm) if name in SEEING else texts(llm)
        llm.llm_engine.close()
    return expected[name]


def model_of(snippet: str) -> str:
    """Return the model name in the snippet."""
    text = (SNIPPETS / snippet).read_text()
    if "gguf-file" in text:
        return GGUF
    return next(name for name in (*DENSE, EXPERTS, *SEEING, *PACKED) if name in text)


# ---- scripts


@pytest.fixture
def restored_modules(monkeypatch: pytest.MonkeyPatch, place: Path) -> Iterator[None]:
    """Run in the working directory; remove the import hook and the modules that it loaded after the test."""
    monkeypatch.chdir(place)
    for name in ("meta_path", "argv", "path"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


@pytest.mark.usefixtures("restored_modules")
@pytest.mark.parametrize("name", snippets(".py"))
def test_script_runs_as_written(name: str, place: Path, expected: dict[str, list[str]]) -> None:
    if name in REFUSED:
        with pytest.raises(ConfigError) as caught:
            vllm_shim.run_script([str(SNIPPETS / name)])
        assert REFUSED[name] in str(caught.value) and "\n" not in str(caught.value)
        return
    llm: LLM = vllm_shim.run_script([str(SNIPPETS / name)])["llm"]
    model = model_of(name)
    try:
        for _ in range(2):  # once when images are new, once when they may be cached
            result = described(llm) if model in SEEING else texts(llm)
            assert result == reference_answers(model, place, expected)
        check_config(llm, name)
    finally:
        llm.llm_engine.close()


def check_config(llm: LLM, name: str) -> None:
    """Check the effect of each script's settings, in addition to its answers."""
    config, parallel = llm.config, llm.config.parallel
    ranks = parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.data_parallel_size
    seen: dict[str, Any] = {
        "01_chunked_prefill.py": config.scheduler.enable_chunked_prefill,
        "02_large_steps.py": config.scheduler.max_num_batched_tokens == 16384,
        "02_small_steps.py": config.scheduler.max_num_batched_tokens == 2048,
        "06_tensor_parallel.py": ranks == (4, 1, 1),
        "07_pipeline.py": ranks == (4, 2, 1),
        "08_experts.py": parallel.enable_expert_parallel and ranks == (2, 1, 1),
        "08_experts_data.py": parallel.enable_expert_parallel and ranks == (1, 1, 2),
        "09_data_parallel.py": ranks == (1, 1, 2),
        "15_draft_model.py": config.speculation is not None
        and config.speculation.num_speculative_tokens == 5,
        "21_memory.py": (config.model.max_model_len, config.scheduler.max_num_seqs) == (128, 16),
        "21_offload.py": config.load.cpu_offload_gb == 0,  # on a CPU
    }
    assert seen.get(name, True), config
    if name == "04_statistics.py":
        assert {"vllm:num_preemptions", "vllm:generation_tokens"} <= {
            metric.name for metric in llm.get_metrics()
        }


# ---- commands


@pytest.mark.parametrize("name", snippets(".sh"))
def test_command_runs_as_written(
    name: str, place: Path, expected: dict[str, list[str]], tmp_path: Path, preloaded: Preloaded
) -> None:
    (command, *words), env = vllm_call(SNIPPETS / name, tmp_path, place)
    assert command == "serve"
    with ServeProcess(None, *words, log=tmp_path / "log", cwd=place, env=env, preloaded=preloaded) as server:
        if name in REFUSED:
            assert server.exit_code() == 1
            last = server.text().strip().splitlines()[-1]
            assert REFUSED[name] in last and "error: " in last and "Traceback" not in server.text()
            return
        server.until_healthy(num_api=4 if "api_processes" in name else 1)
        model = model_of(name)
        wanted = reference_answers(model, place, expected)
        for _ in range(2):
            result = described_over_http(server) if model in SEEING else completions(server)
            assert result == wanted or name in OTHER_NUMBERS and all(result)
        check(server, name)
        server.end_cleanly()


def check(server: ServeProcess, name: str) -> None:
    """Check the effect of each command's settings, in addition to its answers."""
    metrics = server.metrics()
    assert [metric for metric in NINE if metric not in metrics] == []
    if name == "05_prefix_caching.sh":
        for _ in range(2):
            server.complete(model=DENSE[0], prompt=[7] * 100, max_tokens=1)
        assert server.metrics()["prefix_cache_hits_total"] >= 96
    if name.startswith("11_"):
        cores = 2 if "data" in name else 1
        assert len(server.with_role("APIServer")) == 4 and len(server.with_role("EngineCore")) == cores
    if name == "09_data_parallel.sh":
        assert len(server.with_role("EngineCore")) == 2
    if name.startswith("14_xformers"):
        assert "XFORMERS" in server.text()
    if name.startswith("20_"):
        names = {entry["id"] for entry in server.client.get("/v1/models").json()["data"]}
        adapters = {"customer-support", "finance"} if name == "20_adapters.sh" else {"customer-support"}
        assert names == {DENSE[0], *adapters}
        answers = {completions(server, adapter)[0] for adapter in names}
        assert len(answers) == len(names), "an adapter gives the output of the base model"


def completions(server: ServeProcess, model: str | None = None) -> list[str]:
    name = model or server.client.get("/v1/models").json()["data"][0]["id"]
    return [
        server.complete(model=name, prompt=prompt, max_tokens=GREEDY.max_tokens)["choices"][0]["text"]
        for prompt in PROMPTS
    ]


def described_over_http(server: ServeProcess) -> list[str]:
    """Send requests about images as OpenAI's client does, several at once, to any API process."""

    def ask(image: Image.Image) -> str:
        file = BytesIO()
        image.save(file, "PNG")
        url = f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"
        parts: Any = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": "What is this?"},
        ]
        with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            reply = client.chat.completions.create(
                model=next(iter(SEEING)),
                messages=[{"role": "user", "content": parts}],
                temperature=0,
                max_tokens=GREEDY.max_tokens,
                extra_body={"ignore_eos": True},
            )
        return reply.choices[0].message.content or ""

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(ask, IMAGES))

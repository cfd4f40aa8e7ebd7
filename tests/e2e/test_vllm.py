"""Tests that scripts which were written for vLLM run unchanged."""

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_text import TextModel

import quire
from quire import LLM, SamplingParams
from quire.cli import main
from quire.entrypoints import vllm_functions, vllm_shim
from quire.version import VLLM_VERSION

SCRIPT = """
import asyncio
import sys

from vllm import LLM, AsyncEngineArgs, AsyncLLMEngine, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.metrics.reader import Counter

model, out = sys.argv[1:]
given = {"dtype": "float32", "num_gpu_blocks_override": 64, "max_model_len": 128}
greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
said = LLM(model=model, **given).generate(["A page is"], greedy, use_tqdm=False)[0].outputs[0].text


async def heard() -> str:
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model=model, **given))
    text = ""
    try:
        async for output in engine.generate("A page is", greedy, "one"):
            assert output.request_id == "one"
            text = output.outputs[0].text
    finally:
        await engine.aclose()
    return text


if __name__ == "__main__":
    open(out, "w").write("\\n".join([said, asyncio.run(heard())]))
"""


@pytest.fixture(autouse=True)
def restored_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove the import hook and the modules that it loaded after the test."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def test_vllm_script_runs_unchanged(tiny: TextModel, tmp_path: Path) -> None:
    script, out = tmp_path / "script.py", tmp_path / "out"
    script.write_text(SCRIPT)
    assert main(["python", str(script), str(tiny.path), str(out)]) == 0
    llm = LLM(str(tiny.path), dtype="float32", num_gpu_blocks_override=64, max_model_len=128)
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    expected = llm.generate(["A page is"], greedy, use_tqdm=False)[0].outputs[0].text
    assert out.read_text().split("\n") == [expected, expected]


@pytest.mark.parametrize("module", vllm_shim.MODULES)
def test_every_shim_name_exists(module: str) -> None:
    vllm_shim.install()
    imported = importlib.import_module(module)
    for name in vllm_shim.MODULES[module]:
        assert getattr(imported, name) is not None


def test_missing_names_are_import_errors_with_a_hint() -> None:
    vllm_shim.install()
    with pytest.raises(ImportError, match=r"is not in Quire.*sampling_params"):
        __import__("vllm.sampling_param")
    with pytest.raises(ImportError, match=r"vllm.SamplingParam is not in Quire.*mean.*SamplingParams"):
        from vllm import SamplingParam  # type: ignore[import-not-found]  # noqa: F401


def test_submodules_are_attributes_of_their_package() -> None:
    """Catches `import vllm` after which `vllm.config` is missing, which an installed vLLM has."""
    vllm_shim.install()
    import vllm  # type: ignore[import-not-found]

    assert vllm.sampling_params.SamplingParams is SamplingParams
    assert vllm.config.weight_transfer.WeightTransferConfig(backend="nccl") == {"backend": "nccl"}
    assert not hasattr(vllm, "no_such_module")


def test_functions_that_scripts_call(tiny: TextModel, caplog: pytest.LogCaptureFixture) -> None:
    logger = vllm_functions.init_logger("mine")
    logger.logger.parent.addHandler(caplog.handler)  # type: ignore[union-attr]
    for _ in range(2):
        logger.warning_once("once %d", 1)
    logger.info("again")
    logger.logger.parent.removeHandler(caplog.handler)  # type: ignore[union-attr]
    assert [record.getMessage() for record in caplog.records] == ["once 1", "again"]
    platform = vllm_functions.current_platform
    assert platform.is_cuda() != platform.is_cpu() and platform.device_type == platform.device_name
    ids = vllm_functions.get_tokenizer(str(tiny.path), trust_remote_code=False).encode("A page")
    assert ids == LLM(str(tiny.path), max_model_len=64, num_gpu_blocks_override=8).get_tokenizer().encode(
        "A page"
    )
    vllm_functions.cleanup_dist_env_and_memory()


def test_section_is_accepted_as_an_engine_argument(tiny: TextModel) -> None:
    section = vllm_functions.Section(method="ngram", num_speculative_tokens=3)
    llm = LLM(str(tiny.path), speculative_config=section, max_model_len=64, num_gpu_blocks_override=8)
    assert llm.config.speculation is not None and section.num_speculative_tokens == 3
    with pytest.raises(AttributeError, match=r"model is not set; set are: method, num_"):
        _ = section.model


def test_model_registry_is_that_of_quire() -> None:
    vllm_shim.install()
    from vllm import ModelRegistry  # type: ignore[import-not-found]
    from vllm.model_executor.models.registry import ModelRegistry as same  # type: ignore[import-not-found]

    assert ModelRegistry is same is quire.ModelRegistry
    assert "LlamaForCausalLM" in ModelRegistry.get_supported_archs()


def test_missing_script_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["python", "nowhere.py"]) == 2
    assert "nowhere.py" in capsys.readouterr().err


def test_flags_of_a_script_become_engine_arguments(tiny: TextModel) -> None:
    vllm_shim.install()
    from vllm import EngineArgs  # type: ignore[import-not-found]
    from vllm.utils import FlexibleArgumentParser  # type: ignore[import-not-found]

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(description="An example."))
    parser.set_defaults(model="other", max_num_seqs=4)
    args = parser.parse_args(["--model", str(tiny.path), "--max_model_len", "1k"])
    engine_args = EngineArgs.from_cli_args(args)
    assert (engine_args.model, engine_args.max_model_len, engine_args.max_num_seqs) == (
        str(tiny.path),
        1000,
        4,
    )


def test_assets_are_generated() -> None:
    vllm_shim.install()
    from vllm.assets.audio import AudioAsset  # type: ignore[import-not-found]
    from vllm.assets.image import ImageAsset  # type: ignore[import-not-found]
    from vllm.assets.video import VideoAsset  # type: ignore[import-not-found]

    image = ImageAsset("stop_sign").pil_image
    assert image.mode == "RGB" and image.tobytes() != ImageAsset("cherry_blossom").pil_image.tobytes()
    video = VideoAsset("baby_reading", num_frames=4)
    assert video.np_ndarrays.shape[0] == 4 == len(video.pil_images) == video.metadata["total_num_frames"]
    assert not (video.np_ndarrays[0] == video.np_ndarrays[3]).all()
    samples, rate = AudioAsset("mary_had_lamb").audio_and_sample_rate
    assert len(samples) == 4 * rate and 0.1 < abs(samples).max() < 1


def test_the_version_is_that_of_the_interface() -> None:
    vllm_shim.install()
    import vllm

    assert vllm.__version__ == VLLM_VERSION and vllm.__version_tuple__[:2] == (0, 24)


def test_the_vllm_command_runs_quire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["install-vllm-command", "--dir", str(tmp_path)]) == 0
    assert main(["install-vllm-command", "--dir", str(tmp_path)]) == 0, "it may be written again"
    script = tmp_path / "vllm"
    shown = subprocess.run([script, "bench", "--help"], capture_output=True, text=True, env=os.environ)
    assert shown.stderr.startswith("vllm: this is Quire") and "usage: quire" in shown.stdout
    version = subprocess.run([script, "--version"], capture_output=True, text=True, env=os.environ)
    assert (version.stdout, version.stderr) == (f"{VLLM_VERSION}\n", "")


def test_another_vllm_command_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "vllm").write_text("#!/bin/sh\n")
    (tmp_path / "vllm").chmod(0o755)
    assert main(["install-vllm-command", "--dir", str(tmp_path)]) == 1
    assert "is another vllm command" in capsys.readouterr().err
    assert (tmp_path / "vllm").read_text() == "#!/bin/sh\n"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("import vllm\nprint(1\n", ['  File "SCRIPT", line 2', "SyntaxError: '(' was never closed"]),
        (
            "def call():\n    1 / 0\n\ncall()\n",
            [
                "Traceback (most recent call last):",
                '  File "SCRIPT", line 4, in <module>',
                '  File "SCRIPT", line 2, in call',
                "ZeroDivisionError: division by zero",
            ],
        ),
        (
            "from vllm import LLM\nLLM(api_server_count=4)\n",
            [
                "Traceback (most recent call last):",
                '  File "SCRIPT", line 2, in <module>',
                "quire.errors.ConfigError: 'api_server_count' is not an engine argument: it belongs to the"
                " HTTP server, as `quire serve --api-server-count`",
            ],
        ),
    ],
    ids=["syntax", "exception", "configuration"],
)
def test_error_of_a_script_shows_the_frames_of_the_script(
    text: str,
    lines: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # a process group of another test replaces it
    script = tmp_path / "script.py"
    script.write_text(text)
    assert main(["python", str(script)]) == 1
    shown = capsys.readouterr().err.replace(str(script), "SCRIPT").splitlines()
    assert [line for line in shown if not line.startswith("    ")] == lines

"""Tests of private_engine(): however its start or its use ends, no process or file is left."""

import asyncio
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from preloaded import Preloaded
from serve_process import PATIENCE_S
from tiny_text import TextModel

from quire.config.engine import EngineConfig
from quire.configure import configure
from quire.data.params import SamplingParams
from quire.entrypoints.child_cores import private_engine
from quire.errors import ConfigError


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a new folder the one for temporary files, and return it."""
    path = tmp_path_factory.mktemp("t")
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


def config_of(path: Path, **settings: Any) -> EngineConfig:
    sizes: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 64, "max_num_seqs": 4}
    return configure({"model": str(path), "use_tqdm_on_load": False} | sizes | settings)


Cores = Callable[[], list[psutil.Process]]


@pytest.fixture
def cores(preloaded: Preloaded) -> Cores:
    """Return a function that lists the engine cores that the test has started."""
    origin = psutil.Process(preloaded.pid)
    before = set(origin.children())
    return lambda: [child for child in origin.children() if child not in before]


def check_nothing_is_left(folder: Path, cores: Cores) -> None:
    assert list(folder.glob("quire-*")) == []
    assert cores() == []


@pytest.fixture
def broken_model(tiny: TextModel, tmp_path: Path) -> Path:
    """Return a model with weights that cannot be read."""
    path = tmp_path / "broken"
    shutil.copytree(tiny.path, path)
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    return path


async def start_engine(config: EngineConfig) -> None:
    async with private_engine(config):
        raise AssertionError("it started")


def test_failing_core_reports_the_reason(broken_model: Path, folder: Path, cores: Cores) -> None:
    """Catches an AttributeError in place of the reason why the core failed."""
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        asyncio.run(start_engine(config_of(broken_model)))
    check_nothing_is_left(folder, cores)


def test_unreadable_tokenizer_ends_the_core(
    tiny: TextModel, tmp_path: Path, folder: Path, cores: Cores
) -> None:
    """Catches a core that keeps loading after the start has failed."""
    copy = tmp_path / "copy"
    shutil.copytree(tiny.path, copy)
    (copy / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError):
        asyncio.run(start_engine(config_of(copy)))
    check_nothing_is_left(folder, cores)


def test_core_killed_during_startup(tiny: TextModel, folder: Path, cores: Cores) -> None:
    async def go() -> None:
        task = asyncio.create_task(start_engine(config_of(tiny.path)))
        while not cores():
            await asyncio.sleep(0.01)
        cores()[0].kill()
        await asyncio.wait_for(task, PATIENCE_S)

    with pytest.raises(ConfigError, match="the engine"):
        asyncio.run(go())
    check_nothing_is_left(folder, cores)


def test_cancelled_startup(tiny: TextModel, folder: Path, cores: Cores) -> None:
    async def go() -> None:
        task = asyncio.create_task(start_engine(config_of(tiny.path)))
        while not cores():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(go())
    check_nothing_is_left(folder, cores)


def test_engine_closes_when_its_user_fails(tiny: TextModel, folder: Path, cores: Cores) -> None:
    async def go() -> None:
        async with private_engine(config_of(tiny.path)) as engine:
            params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
            prompt = engine.inputs.parse([5, 6])
            outputs = [item async for item in engine.generate(prompt, params, "a")]
            assert outputs[-1].finished
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        asyncio.run(go())
    check_nothing_is_left(folder, cores)

"""private_engine(): however its start or its use ends, nothing of it is left."""

import asyncio
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from serve_process import PATIENCE_S
from tiny_text import TextModel

from quire.config.engine import EngineConfig
from quire.configure import configure
from quire.data.params import SamplingParams
from quire.entrypoints.child_cores import private_engine
from quire.errors import ConfigError


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made."""
    path = tmp_path_factory.mktemp("t")
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


def config_of(path: Path, **given: Any) -> EngineConfig:
    sizes: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 64, "max_num_seqs": 4}
    return configure({"model": str(path), "use_tqdm_on_load": False} | sizes | given)


Cores = Callable[[], list[psutil.Process]]


@pytest.fixture
def cores() -> Cores:
    """Finds the cores that the test has started."""
    before = {child.pid for child in psutil.Process().children()}

    def is_core(child: psutil.Process) -> bool:
        with suppress(psutil.NoSuchProcess):
            return child.pid not in before and "spawn_main" in " ".join(child.cmdline())
        return False

    return lambda: [child for child in psutil.Process().children() if is_core(child)]


def check_nothing_is_left(folder: Path, cores: Cores) -> None:
    assert list(folder.glob("quire-*")) == []
    assert cores() == []


@pytest.fixture
def broken(tiny: TextModel, tmp_path: Path) -> Path:
    """A model whose weights cannot be read."""
    path = tmp_path / "broken"
    shutil.copytree(tiny.path, path)
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    return path


async def use(config: EngineConfig) -> None:
    async with private_engine(config):
        raise AssertionError("it started")


def test_a_core_that_cannot_start_says_why(broken: Path, folder: Path, cores: Cores) -> None:
    """Catches an AttributeError in place of the reason."""
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        asyncio.run(use(config_of(broken)))
    check_nothing_is_left(folder, cores)


def test_a_tokenizer_that_cannot_be_read(tiny: TextModel, tmp_path: Path, folder: Path, cores: Cores) -> None:
    """Catches a core that goes on loading for nobody."""
    copy = tmp_path / "copy"
    shutil.copytree(tiny.path, copy)
    (copy / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError):
        asyncio.run(use(config_of(copy)))
    check_nothing_is_left(folder, cores)


def test_a_core_that_is_killed_while_it_starts(tiny: TextModel, folder: Path, cores: Cores) -> None:
    async def go() -> None:
        task = asyncio.create_task(use(config_of(tiny.path)))
        while not cores():
            await asyncio.sleep(0.01)
        cores()[0].kill()
        await asyncio.wait_for(task, PATIENCE_S)

    with pytest.raises(ConfigError, match="the engine"):
        asyncio.run(go())
    check_nothing_is_left(folder, cores)


def test_a_start_that_is_given_up(tiny: TextModel, folder: Path, cores: Cores) -> None:
    async def go() -> None:
        task = asyncio.create_task(use(config_of(tiny.path)))
        while not cores():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(go())
    check_nothing_is_left(folder, cores)


def test_an_engine_whose_user_fails(tiny: TextModel, folder: Path, cores: Cores) -> None:
    async def go() -> None:
        async with private_engine(config_of(tiny.path)) as engine:
            params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
            prompt = engine.inputs.parse([5, 6])
            outputs = [each async for each in engine.generate(prompt, params, "a")]
            assert outputs[-1].finished
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        asyncio.run(go())
    check_nothing_is_left(folder, cores)

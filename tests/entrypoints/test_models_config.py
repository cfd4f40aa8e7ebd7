"""Tests of the models of a server with several: the file, its errors, names and the memory budget."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_text import TextModel, text_model

from quire.cli import main
from quire.config.cli import FlagParser
from quire.config.env import Env
from quire.entrypoints.launch_models import launch_models, memory_budget
from quire.entrypoints.models_config import (
    ConfiguredModel,
    ModelEntry,
    configure_models,
    entries_of_names,
    read_models,
)
from quire.entrypoints.serve import add_flags
from quire.errors import ConfigError
from quire.memory import model_memory
from quire.server.settings import make_settings

SIZES: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "num_gpu_blocks_override": 64,
}


@pytest.fixture(scope="module")
def parser() -> FlagParser:
    made = FlagParser(prog="quire serve")
    add_flags(made)
    return made


@pytest.fixture
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return text_model(tmp_path_factory.getbasetemp())


def written(folder: Path, text: str) -> str:
    file = folder / "models.yaml"
    file.write_text(text)
    return str(file)


def test_entries_have_flags_of_their_own(tmp_path: Path, parser: FlagParser) -> None:
    text = """
- model: org/large
  served-model-name: [large, big]
  max_model_len: 4k
  hf-overrides: {a: 1}
  enforce-eager: true
  lora-modules: [x=/x, y=/y]
  tool-call-parser: hermes
  pin: true
- org/small
"""
    large, small = read_models(written(tmp_path, text), parser)
    assert large.engine == {
        "model": "org/large",
        "served_model_name": ["large", "big"],
        "max_model_len": 4000,
        "hf_overrides": {"a": 1},
        "enforce_eager": True,
    }
    assert large.server == {"lora_modules": ["x=/x", "y=/y"], "tool_call_parser": "hermes"} and large.pinned
    assert small.engine == {"model": "org/small"} and not small.pinned and small.server == {}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("- model: a\n  pin: 3\n", "line 2: pin must be true or false, not 3"),
        ("- model: a\n\n- dtype: half\n", "line 3: model must be the name or the path of a model"),
        ("- model: [a]\n", "line 1: model must be the name or the path of a model"),
        ("- model: a\n  model: b\n", "line 2: model is given twice, first in line 1"),
        ("- model: a\n  port: 1\n", "line 2: port is a setting of the whole server: give --port"),
        ("- model: a\n  device-ids: ['0']\n", "line 2: device_ids is a setting of the whole server"),
        ("- model: a\n  models-memory-gb: 1\n", "line 2: models_memory_gb is a setting of the whole server"),
        ("- [a, b]\n", "line 1: a model must be a name, or fields"),
        ("model: a\n", "line 1: the file must hold a list of models"),
        ("", ": the file must hold a list of models"),
        ("[]", "line 1: the file must hold a list of models"),
        ("- model: a\n  dtype: {\n", "line 3: the file is not valid YAML"),
        ("- model: a\n  seed: !!int x\n", "line 2: the file is not valid YAML"),
    ],
)
def test_errors_name_file_line_and_field(tmp_path: Path, parser: FlagParser, text: str, error: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as raised:
        read_models(path, parser)
    assert str(raised.value).startswith(f"--models-config {path}") and error in str(raised.value)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("max-modl-len: 3", "unknown flag 'max_modl_len'"),
        ("max-num-seqs: many", "max-num-seqs"),
        ("enforce-eager: 3", "enforce_eager must be true or false, not 3"),
    ],
)
def test_errors_of_flags_name_file_and_line(
    tmp_path: Path, parser: FlagParser, capsys: pytest.CaptureFixture[str], line: str, error: str
) -> None:
    path = written(tmp_path, f"- model: a\n  {line}\n")
    with pytest.raises(SystemExit):
        read_models(path, parser)
    printed = capsys.readouterr().err
    assert f"--models-config {path}, line 2: " in printed and error in printed


def test_missing_file_is_an_error(tmp_path: Path, parser: FlagParser) -> None:
    with pytest.raises(ConfigError, match="none.yaml cannot be read: .*No such file"):
        read_models(str(tmp_path / "none.yaml"), parser)


def configured(entries: list[ModelEntry], **flags: Any) -> list[ConfiguredModel]:
    server = {name: flags.pop(name) for name in ("lora_modules", "api_key") if name in flags}
    return configure_models(entries, engine=SIZES | flags, server=server, env=Env.read({}))


def test_errors_of_values_name_the_line_of_their_field(
    tmp_path: Path, parser: FlagParser, tiny: TextModel
) -> None:
    text = f"- model: {tiny.path}\n  served-model-name: a\n  max-model-len: 100000\n- model: /none/b\n"
    path = written(tmp_path, text)
    entries = read_models(path, parser)
    with pytest.raises(ConfigError, match=f"^--models-config {path}, line 3: max_model_len=100000"):
        configured(entries)
    with pytest.raises(ConfigError, match=f"^--models-config {path}, line 4: .*/none/b"):
        configured(entries[1:])


def test_flags_of_the_command_line_apply_to_all_models(tiny: TextModel) -> None:
    first = ModelEntry("here", {"model": str(tiny.path), "served_model_name": ("a",), "max_num_seqs": 2})
    second = ModelEntry("there", {"model": str(tiny.path), "served_model_name": ("b",)})
    models = configured([first, second])
    assert [model.config.scheduler.max_num_seqs for model in models] == [2, 4]
    assert all(model.config.model.enable_sleep_mode for model in models)
    assert [model.name for model in models] == ["a", "b"]


def test_name_of_two_models_is_an_error(tiny: TextModel) -> None:
    entries = entries_of_names([str(tiny.path)] * 2)
    with pytest.raises(ConfigError, match="served_model_name: .* is also a name of model"):
        configured(entries)


@pytest.mark.parametrize("flag", ["served_model_name", "tokenizer", "lora_modules", "model"])
def test_flags_of_one_model_are_refused_for_several(flag: str) -> None:
    shown = flag.replace("_", "-")
    with pytest.raises(ConfigError, match=f"--{shown} is for one model: .*--models-config"):
        configured(entries_of_names(["a", "b"]), **{flag: ("x=/x",)})


def test_budget_must_hold_each_model_beside_pinned_ones(tiny: TextModel) -> None:
    (model,) = configured([ModelEntry("here", {"model": str(tiny.path), "served_model_name": ("a",)})])
    needed = model_memory(model.config)
    assert 0 < needed.weights < needed.awake

    def budget(num_bytes: float, *models: ConfiguredModel) -> int:
        return memory_budget(models, make_settings({"models_memory_gb": num_bytes / 2**30}))

    assert budget(needed.awake, model, model) == needed.awake
    with pytest.raises(ConfigError, match="a needs .* but models_memory_gb is"):
        budget(needed.awake / 2, model)
    pinned = replace(model, pinned=True)
    assert budget(2 * needed.awake, pinned, model) == 2 * needed.awake
    with pytest.raises(ConfigError, match="a needs .* beside .* of pinned models"):
        budget(1.5 * needed.awake, pinned, model)
    machine = model.config.machine
    assert memory_budget([model], make_settings({})) == int(machine.total_bytes * 0.95)


def test_memory_of_a_model_follows_its_cache_settings(tiny: TextModel) -> None:
    def awake(**flags: Any) -> int:
        values = {name: value for name, value in SIZES.items() if name != "num_gpu_blocks_override"}
        entry = ModelEntry("here", {"model": str(tiny.path)})
        (model,) = configure_models([entry], engine=values | flags, server={}, env=Env.read({}))
        return model_memory(model.config).awake

    assert awake(kv_cache_memory_bytes=3 << 20) - awake(kv_cache_memory_bytes=2 << 20) == 1 << 20
    assert awake(num_gpu_blocks_override=128) > awake(num_gpu_blocks_override=64)
    total = configured([ModelEntry("here", {"model": str(tiny.path)})])[0].config.machine.total_bytes
    assert awake(gpu_memory_utilization=0.25) == total // 4


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"api_server_count": 2}, "one API process"),
        ({"headless": True}, "one API process"),
    ],
)
def test_one_api_process_serves_all_models(settings: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        launch_models([], make_settings(settings))


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["a", "--models-memory-gb", "3"], "models_memory_gb is for several models"),
        (["a", "b", "--served-model-name", "c"], "--served-model-name is for one model"),
    ],
)
def test_command_line_is_checked(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "0", *words]) != 0
    assert error in capsys.readouterr().err

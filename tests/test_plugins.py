"""Tests of plugins: the example of docs/plugins.md, the registrations, and plugins that fail."""

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from oracle import make_tiny
from plugin_package import install, install_example
from tiny_text import TextModel, text_model, variant

import quire
from quire import LLM, ModelRegistry, SamplingParams
from quire.attention.torch_sdpa import TorchSDPA
from quire.checkpoint.families import ALIASES, FAMILIES
from quire.checkpoint.model import read_checkpoint
from quire.checkpoint.quant import METHODS
from quire.checkpoint.quant.facts import QuantFacts
from quire.config.attention_backends import BACKENDS, check_backend
from quire.config.plugins import installed_stat_loggers, load_plugins
from quire.data.output_pieces import TextPiece, ToolArguments, ToolStart
from quire.data.stats import STAT_LOGGERS
from quire.errors import ConfigError
from quire.frontend.stat_loggers import StatLoggerBase
from quire.models import MODELS
from quire.plugins import register_attention_backend, register_quantization, register_reasoning_parser
from quire.quant import SCHEMES
from quire.text.parsers import REASONING, TOOLS, answer_parser

TABLES: list[dict[str, Any]] = [
    *(FAMILIES, ALIASES, METHODS),
    *(table.entries for table in (BACKENDS, MODELS, REASONING, SCHEMES, STAT_LOGGERS, TOOLS)),
]
REGISTERS = "calls = []\ndef register():\n    calls.append(1)\n"


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the tables, the imported modules and the import hooks, and forget the loaded plugins."""
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("acme_quire", "mine"):  # of other tests
            del sys.modules[name]
    before, modules, hooks = [dict(table) for table in TABLES], set(sys.modules), [*sys.meta_path]
    for name in ("QUIRE_PLUGINS", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    load_plugins.cache_clear()
    yield
    load_plugins.cache_clear()
    sys.meta_path[:] = hooks
    for table, entries in zip(TABLES, before, strict=True):
        table.clear()
        table.update(entries)
    for name in set(sys.modules) - modules:
        if name.partition(".")[0] in ("acme_quire", "mine", "vllm"):
            del sys.modules[name]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of the import path."""
    path = tmp_path / "packages"
    path.mkdir()
    monkeypatch.syspath_prepend(path)
    return path


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[int], list[str]]]:
    """Yield a function that returns the log lines of a level."""
    logger = logging.getLogger("quire")
    logger.addHandler(caplog.handler)
    yield lambda level: [record.message for record in caplog.records if record.levelno == level]
    logger.removeHandler(caplog.handler)


def add(folder: Path, code: str, group: str = "quire.plugins", name: str = "mine") -> None:
    install(folder, f"{name}-package", {group: {name: f"{name}:register"}}, {f"{name}.py": code})


# ---- the example of the page


def test_model_of_the_example_answers(folder: Path, tmp_path: Path) -> None:
    """Catches a model class that is not used, and a plugin that is not loaded by `LLM`."""
    install_example(folder)
    base: TextModel = text_model(tmp_path)
    config = json.loads((base.path / "config.json").read_text()) | {"architectures": ["AcmeForCausalLM"]}
    (changed := tmp_path / "acme").mkdir()
    model = variant(base, changed, config=config)
    llm = LLM(str(model.path), dtype="float32", max_model_len=64, num_gpu_blocks_override=32)
    prompt = [5, 6, 7]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    with torch.no_grad():
        for layer in base.hf.model.layers:
            layer.self_attn.o_proj.weight *= 2
        doubled = base.greedy(prompt, 8)
        for layer in base.hf.model.layers:
            layer.self_attn.o_proj.weight /= 2
    assert list(output.outputs[0].token_ids) == doubled != base.greedy(prompt, 8)


def test_parser_of_the_example_parses(folder: Path) -> None:
    install_example(folder)
    assert load_plugins() == ()
    parser = answer_parser(tools="shout", make_id=lambda index, name: "x")
    assert parser.parse('Now CALL look {"at": 1}') == [
        TextPiece("Now"),
        ToolStart(0, "x", "look"),
        ToolArguments(0, '{"at": 1}'),
    ]


def test_plugin_is_called_once(folder: Path) -> None:
    add(folder, REGISTERS)
    load_plugins()
    load_plugins()
    import mine  # type: ignore[import-not-found]

    assert mine.calls == [1]


# ---- failures and selection


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("def register():\n    raise RuntimeError('no\\nluck')", "RuntimeError: no luck"),
        ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("def register():\n    raise SystemExit(3)", "SystemExit: 3"),
        ("other = 1", "AttributeError: "),
    ],
)
def test_broken_plugin_is_named_in_one_line(
    folder: Path, lines: Callable[[int], list[str]], code: str, problem: str
) -> None:
    """Catches a plugin that ends the process, or that keeps others from being loaded."""
    add(folder, code)
    install_example(folder)
    assert load_plugins() == ("mine",)
    (line,) = lines(logging.ERROR)
    assert line.startswith("Plugin 'mine' of mine-package 1.0 (mine:register) failed and is not used: ")
    assert problem in line and "\n" not in line
    assert "shout" in TOOLS


def test_child_process_leaves_a_broken_plugin_out(folder: Path, lines: Callable[[int], list[str]]) -> None:
    """Catches an error line for every process, and a plugin that only some processes have."""
    add(folder, "def register():\n    raise RuntimeError")
    assert load_plugins(("mine",)) == ("mine",)
    assert "mine" not in sys.modules and not lines(logging.ERROR)


def test_broken_plugin_that_was_named_refuses_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    add(folder, "def register():\n    raise RuntimeError('no luck')")
    monkeypatch.setenv("VLLM_PLUGINS", "mine")
    with pytest.raises(ConfigError, match=r"plugin 'mine' of mine-package .*no luck; .*VLLM_PLUGINS"):
        LLM(str(make_tiny("llama", tmp_path)[0]))


@pytest.mark.parametrize(
    ("variable", "names", "loaded"),
    [
        ("VLLM_PLUGINS", "mine", True),
        ("VLLM_PLUGINS", "other, mine", True),
        ("VLLM_PLUGINS", "other", False),
        ("VLLM_PLUGINS", "", False),
        ("QUIRE_PLUGINS", "", False),
    ],
)
def test_variable_selects_plugins(
    folder: Path, monkeypatch: pytest.MonkeyPatch, variable: str, names: str, loaded: bool
) -> None:
    add(folder, REGISTERS)
    monkeypatch.setenv(variable, names)
    load_plugins()
    assert ("mine" in sys.modules) == loaded


def test_own_variable_comes_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an empty QUIRE_PLUGINS that is read as unset."""
    add(folder, REGISTERS)
    monkeypatch.setenv("QUIRE_PLUGINS", "")
    monkeypatch.setenv("VLLM_PLUGINS", "mine")
    load_plugins()
    assert "mine" not in sys.modules


def test_missing_plugin_is_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, lines: Callable[[int], list[str]]
) -> None:
    add(folder, REGISTERS)
    monkeypatch.setenv("VLLM_PLUGINS", "mime,lora_filesystem_resolver")
    load_plugins()
    (line,) = lines(logging.WARNING)
    assert "lists the plugin 'mime', which no" in line and "'mine'" in line


def test_no_plugins_are_found_without_importlib_metadata(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a slow start: without any plugin the entry points are not parsed."""
    install(folder, "tools", {"console_scripts": {"tool": "tool:main"}}, {})
    monkeypatch.setattr(sys, "path", [str(folder)])
    monkeypatch.setattr("quire.config.plugins._entries", lambda: pytest.fail("the entry points are parsed"))
    assert load_plugins() == ()


def test_example_does_not_import_torch_and_a_plugin_that_does_is_named(folder: Path) -> None:
    """Catches a registration that imports torch into API processes."""
    install_example(folder)
    add(folder, "import torch\ndef register():\n    pass\n")
    (folder / "torch.py").write_text("")  # takes the place of torch in the new process
    code = "from quire.config.plugins import load_plugins; print(load_plugins())"
    source = str(Path(quire.__file__).parents[1])
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), source, *inherited]))}
    ended = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert ended.stdout == "()\n", ended.stderr
    assert re.findall(r"Loaded plugin '(\w+)'", ended.stderr) == ["acme", "mine"]
    assert re.findall(r"Plugin '(\w+)' imports torch", ended.stderr) == ["mine"]


# ---- plugins for vLLM


def test_vllm_plugin_registers_through_the_shim(folder: Path) -> None:
    code = (
        "def register():\n"
        "    from vllm import ModelRegistry\n"
        "    if 'MineForCausalLM' not in ModelRegistry.get_supported_archs():\n"
        "        ModelRegistry.register_model('MineForCausalLM', 'mine.model:Mine')\n"
    )
    add(folder, code, group="vllm.general_plugins")
    assert load_plugins() == ()
    assert MODELS.entries["MineForCausalLM"] == "mine.model:Mine"


def test_plugins_of_vllm_itself_are_skipped(folder: Path, lines: Callable[[int], list[str]]) -> None:
    entries = {"lora_filesystem_resolver": "vllm.plugins.lora_resolvers.filesystem_resolver:register"}
    install(folder, "vllm", {"vllm.general_plugins": entries}, {})
    assert load_plugins() == ()
    assert not lines(logging.WARNING)


def test_plugin_for_quire_replaces_that_for_vllm(folder: Path) -> None:
    code = (
        "loaded = []\ndef register():\n    loaded.append('quire')\ndef other():\n    loaded.append('vllm')\n"
    )
    groups = {"vllm.general_plugins": {"mine": "mine:other"}, "quire.plugins": {"mine": "mine:register"}}
    install(folder, "mine-package", groups, {"mine.py": code})
    load_plugins()
    import mine

    assert mine.loaded == ["quire"]


def test_vllm_plugin_does_not_mix_with_vllm_itself(
    folder: Path, monkeypatch: pytest.MonkeyPatch, lines: Callable[[int], list[str]]
) -> None:
    """Catches a plugin that extends the installed vLLM, and modules of vLLM and of Quire side by side."""
    add(folder, REGISTERS, group="vllm.general_plugins")
    real = ModuleType("vllm")
    real.__file__ = "vllm/__init__.py"
    monkeypatch.setitem(sys.modules, "vllm", real)
    assert load_plugins() == ("mine",)
    assert "already imported vLLM itself" in lines(logging.ERROR)[0]


def test_unsupported_group_is_a_warning(folder: Path, lines: Callable[[int], list[str]]) -> None:
    """Catches an IO processor that an operator believes to be active."""
    add(folder, REGISTERS, group="vllm.io_processor_plugins")
    assert load_plugins() == ()
    (line,) = lines(logging.WARNING)
    assert "'mine' of mine-package" in line and "group vllm.io_processor_plugins: Quire has" in line
    assert "mine" not in sys.modules


STAT_LOGGER = "from vllm.v1.metrics.loggers import StatLoggerBase\nclass Mine(StatLoggerBase):\n    pass\n"


def test_stat_loggers_of_vllm_are_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch, lines: Callable[[int], list[str]]
) -> None:
    """Catches a stat logger that VLLM_PLUGINS does not select, and a broken one that ends the process."""
    groups = {"vllm.stat_logger_plugins": {"mine": "mine:Mine", "broken": "mine:Missing"}}
    install(folder, "mine-package", groups, {"mine.py": STAT_LOGGER})
    assert load_plugins() == () and "mine" not in sys.modules
    assert [*installed_stat_loggers()] == ["mine"]
    assert "'broken' of mine-package 1.0 (mine:Missing) failed and is not used" in lines(logging.ERROR)[0]
    assert issubclass(installed_stat_loggers()["mine"], StatLoggerBase)
    monkeypatch.setenv("VLLM_PLUGINS", "broken")
    with pytest.raises(ConfigError, match="plugin 'broken' of mine-package"):
        installed_stat_loggers()
    monkeypatch.setenv("VLLM_PLUGINS", "")
    assert installed_stat_loggers() == {}


PROCESSOR = """
from vllm.v1.sample.logits_processor import LogitsProcessor

class Only(LogitsProcessor):
    def __init__(self, vllm_config, device, is_pin_memory): ...
    def is_argmax_invariant(self): return False
    def update_state(self, batch_update): ...
    def apply(self, logits):
        kept = logits[:, 7].clone()
        logits[:] = -float("inf")
        logits[:, 7] = kept
        return logits
"""


def test_installed_logits_processor_is_used_whatever_the_variable(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches VLLM_PLUGINS that filters this group, which vLLM does not."""
    install(folder, "mine-package", {"vllm.logits_processors": {"only": "mine:Only"}}, {"mine.py": PROCESSOR})
    monkeypatch.setenv("VLLM_PLUGINS", "")
    path, _ = make_tiny("llama", tmp_path)
    settings: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "num_gpu_blocks_override": 64,
    }
    llm = LLM(str(path), **settings)
    assert llm.config.extensions.logits_processors == ("mine:Only",)
    (output,) = llm.generate([[5, 6]], SamplingParams(max_tokens=3, temperature=0), use_tqdm=False)
    assert list(output.outputs[0].token_ids) == [7, 7, 7]
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    assert LLM(str(path), **settings, speculative_config=drafts).config.extensions.logits_processors == ()


# ---- registrations


def test_model_is_read_by_its_model_type(tmp_path: Path) -> None:
    ModelRegistry.register_model("MineForCausalLM", "mine:Mine")
    assert "MineForCausalLM" in ModelRegistry.get_supported_archs()
    path, _ = make_tiny("qwen3", tmp_path)
    overrides = {"architectures": ["MineForCausalLM"]}
    facts = read_checkpoint(path, overrides).facts
    assert (facts.architecture, facts.qk_norm) == ("MineForCausalLM", "head")
    with pytest.raises(ConfigError, match=r"no known one has the model_type 'new'; pass config="):
        read_checkpoint(path, overrides | {"model_type": "new"})


def test_model_may_replace_an_alias(tmp_path: Path) -> None:
    """Catches a registered class that an alias hides."""
    ModelRegistry.register_model("XverseForCausalLM", "mine:Mine")
    path, _ = make_tiny("llama", tmp_path)
    facts = read_checkpoint(path, {"architectures": ["XverseForCausalLM"]}).facts
    assert facts.architecture == "XverseForCausalLM"


def test_config_reader_is_imported_on_first_use(folder: Path, tmp_path: Path) -> None:
    (folder / "mine.py").write_text("from quire.checkpoint.families.dense import llama as read\n")
    ModelRegistry.register_model("MineForCausalLM", "mine:Mine", config="mine:read")
    assert "mine" not in sys.modules
    path, _ = make_tiny("llama", tmp_path)
    assert read_checkpoint(path, {"architectures": ["MineForCausalLM"]}).facts.hidden > 0
    assert "mine" in sys.modules


@pytest.mark.parametrize(
    ("args", "error", "problem"),
    [
        (("Mine", "mine.Mine"), ConfigError, "'mine.Mine', expected 'module:Class'"),
        (("Mine", "../mine:Mine"), ConfigError, "expected 'module:Class'"),
        (("Mine", 3), TypeError, "not a value of type int"),
        (("", "mine:Mine"), TypeError, "must be a string"),
        (("Qwen2VLForConditionalGeneration", "mine:Mine"), ConfigError, "multimodal"),
    ],
)
def test_wrong_registration_is_refused(args: tuple[Any, ...], error: type[Exception], problem: str) -> None:
    families, models = dict(FAMILIES), dict(MODELS.entries)
    with pytest.raises(error, match=problem):
        ModelRegistry.register_model(*args)
    assert (families, models) == (FAMILIES, MODELS.entries)


def test_unknown_config_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"config='Lama' of 'Mine' is not a known architecture"):
        ModelRegistry.register_model("Mine", "mine:Mine", config="Lama")


def test_target_that_cannot_be_imported_is_named(folder: Path) -> None:
    """Catches a traceback without the name of the plugin, for example of a model of vLLM's layers."""
    ModelRegistry.register_model("MineForCausalLM", "mine.model:Mine")
    with pytest.raises(ConfigError, match=r"registered 'mine.model:Mine', which cannot be imported: Mod"):
        MODELS["MineForCausalLM"]


def test_class_may_be_registered_itself() -> None:
    class Mine:
        pass

    ModelRegistry.register_model("MineForCausalLM", Mine)
    register_reasoning_parser("mine", Mine)
    assert MODELS["MineForCausalLM"] is REASONING["mine"] is Mine


def test_attention_backend_is_the_last_choice() -> None:
    register_attention_backend("mine", TorchSDPA)
    assert check_backend("mine") == "MINE" and list(BACKENDS)[-1] == "MINE"


def test_quantization_is_read_by_its_function(tmp_path: Path) -> None:
    register_quantization(
        "mine", config=lambda keys: QuantFacts("mine", ()), scheme="MineScheme", format="mine:Format"
    )
    path, _ = make_tiny("llama", tmp_path)
    quant = read_checkpoint(path, {"quantization_config": {"quant_method": "mine"}}).quant
    assert quant == QuantFacts("mine", ()) and SCHEMES.entries["MineScheme"] == "mine:Format"

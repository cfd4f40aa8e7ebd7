"""Tests of plugins in the processes of a server and of an engine with ranks."""

import json
import os
from pathlib import Path

import pytest
from plugin_package import install, install_example
from serve_process import Start, eventually, greedy
from tiny_text import TextModel, variant

from quire import LLM, SamplingParams
from quire.checkpoint.families import FAMILIES
from quire.config.plugins import load_plugins
from quire.data.stats import STAT_LOGGERS
from quire.models import MODELS
from quire.text.parsers import TOOLS

LOGGER = """
from vllm.v1.metrics.loggers import StatLoggerBase

class Logger(StatLoggerBase):
    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0):
        for ended in iteration_stats.finished_requests if iteration_stats else ():
            print(f"engine {engine_idx} finished {ended.num_generation_tokens} tokens", flush=True)
"""
BROKEN = "def register():\n    raise RuntimeError('no luck')\n"


@pytest.fixture
def acme(tiny: TextModel, tmp_path: Path) -> TextModel:
    """Return the tiny model as an architecture that only the plugin has."""
    config = json.loads((tiny.path / "config.json").read_text()) | {"architectures": ["AcmeForCausalLM"]}
    (folder := tmp_path / "acme").mkdir()
    return variant(tiny, folder, config=config)


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Return a folder with the example of docs/plugins.md, a stat logger for vLLM and a broken plugin."""
    (folder := tmp_path / "packages").mkdir()
    install_example(folder)
    install(folder, "broken", {"quire.plugins": {"broken": "broken:register"}}, {"broken.py": BROKEN})
    groups = {"vllm.stat_logger_plugins": {"finished": "finished:Logger"}}
    install(folder, "finished", groups, {"finished.py": LOGGER})
    return folder


def test_server_uses_plugins_and_goes_on_without_a_broken_one(
    acme: TextModel, packages: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a process that does not load the plugins, and an error line for each process."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("QUIRE_LOG_STATS_INTERVAL", "0.1")
    server = start("--tool-call-parser", "shout", model=str(acme.path), fresh=True)
    server.until_healthy()
    reply = server.client.post("/v1/completions", json=greedy(max_tokens=4))
    assert reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] == 4
    eventually("the stat logger is called", lambda: "engine 0: " in server.text())
    eventually("vLLM's kind is called", lambda: "engine 0 finished 4 tokens" in server.text())
    server.end_cleanly()
    lines = [line for line in server.text().splitlines() if "Plugin 'broken'" in line]
    assert len(lines) == 1 and "RuntimeError: no luck" in lines[0]
    assert server.text().count("Loaded plugin 'acme'") == 1


def test_ranks_load_plugins(acme: TextModel, packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for table in (MODELS, TOOLS, STAT_LOGGERS):
        monkeypatch.setattr(table, "entries", dict(table.entries))
    monkeypatch.syspath_prepend(packages)
    load_plugins.cache_clear()
    try:
        llm = LLM(str(acme.path), dtype="float32", tensor_parallel_size=2, num_gpu_blocks_override=64)
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        (output,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 4 and llm.config.broken_plugins == ("broken",)
    finally:
        FAMILIES.pop("AcmeForCausalLM", None)
        load_plugins.cache_clear()

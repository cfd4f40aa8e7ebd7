"""The engine core of a server on a GPU is killed under streams: with batch invariance their answers stay the
same."""

import json
from pathlib import Path

import pytest
from killed_cores import CHAT, KINDS, TOOLS, answer_while_cores_die
from serve_process import SHARED_FLAGS, ServeProcess
from tiny_adapter import write_adapter
from tiny_text import text_model

pytestmark = pytest.mark.gpu


def test_answers_of_a_killed_core_stay_the_same(tmp_path: Path) -> None:
    model = text_model(tmp_path)
    write_adapter(tmp_path / "styled", json.loads((model.path / "config.json").read_text()), 1)
    lora = ("--enable-lora", "--lora-modules", f"styled={tmp_path}/styled")
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    flags = (
        *SHARED_FLAGS,
        *lora,
        *tools,
        "--batch-invariant",
        "--dtype",
        "bfloat16",
        "--generation-config",
        "vllm",
    )
    with ServeProcess(str(model.path), *flags, "--max-num-seqs", "32", log=tmp_path / "log") as server:
        server.until_healthy()
        answer_while_cores_die(server, KINDS | {"tools": (CHAT, TOOLS)}, num_deaths=5)
        server.end_cleanly()

"""Tests of the `quire` command: its output, and that every error is one line and an exit code."""

import io
import json
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from gguf_files import write_gguf
from oracle import make_tiny
from tiny_text import CHATML, TextModel, text_model

import quire
from quire.cli import COMMANDS, main

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return text_model(tmp_path_factory.getbasetemp())


def flags_for(model: TextModel | Path, *words: str) -> list[str]:
    """Return flags that name the model and keep the engine small."""
    path = model.path if isinstance(model, TextModel) else model
    return ["--model", str(path), "--dtype", "float32", "--num-gpu-blocks-override", "80", *words]


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "quire", *words], capture_output=True, text=True, timeout=240
    )


def check_one_line(code: int, errors: str, *, expected: int, says: Sequence[str]) -> None:
    """Check that the error is one line; log lines may come before it."""
    assert code == expected and "Traceback" not in errors
    last = errors.strip().splitlines()[-1]
    assert errors.count("error:") == 1 and "error:" in last
    for text in says:
        assert text in last, last


# ---- as a process


def test_version_and_help_as_a_process() -> None:
    shown = command("--version")
    assert (shown.returncode, shown.stdout.strip(), shown.stderr) == (0, quire.__version__, "")
    shown = command("--help")
    assert shown.returncode == 0 and all(name in shown.stdout for name in COMMANDS)


def test_closed_standard_streams_are_the_null_device() -> None:
    """Catches a server that fails to start, or writes log lines to a socket, when its caller has closed its
    standard streams."""
    code = (
        "import os, sys; from quire.cli import main; main(['--version']); null = os.stat(os.devnull)\n"
        "is_null = [os.path.samestat(os.fstat(fd), null) and os.get_inheritable(fd) for fd in range(3)]\n"
        "sys.exit(not (all(is_null) and sys.stdin.read() == '' and not sys.stderr.isatty()))"
    )
    command = f"exec {shlex.quote(sys.executable)} -c {shlex.quote(code)} <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], timeout=60).returncode == 0


def test_unknown_flag_as_a_process() -> None:
    shown = command("chat", "--max-modle-len", "5")
    check_one_line(shown.returncode, shown.stderr, expected=2, says=["--max-modle-len", "'--max-model-len'"])


def test_answer_as_a_process(model: TextModel) -> None:
    """Text goes to stdout and log lines do not, so that the answer can be piped."""
    shown = command(
        "chat", *flags_for(model, "-q", "One two", "--max-tokens", "6", "--temperature", "0", "--stats")
    )
    assert shown.returncode == 0, shown.stderr
    first, *_, ttft, tps = shown.stdout.splitlines()
    assert first == f"Using model: {model.path}"
    assert ttft.startswith("TTFT: ") and ttft.endswith(" ms")
    assert tps.startswith("TPS: ") and "tokens/s (" in tps


# ---- the command in this process


def test_broken_weight_file(model: TextModel, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = shutil.copytree(model.path, tmp_path / "broken")
    (weights,) = path.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:5000])
    code = main(["chat", *flags_for(path, "-q", "hi")])
    check_one_line(code, capfd.readouterr().err, expected=1, says=[weights.name])


def test_help_and_version(capsys: Capture) -> None:
    for words in ([], ["-h"], ["help"], ["bench"], ["bench", "--help"]):
        assert main(words) == 0
        shown = capsys.readouterr()
        assert shown.err == "" and all(name in shown.out for name in COMMANDS)
    for word in ("-v", "version"):
        assert main([word]) == 0 and capsys.readouterr().out.strip() == quire.__version__


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as end:
        main([*name.split(), "--help"])
    assert end.value.code == 0
    assert f"usage: quire {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [(["caht"], "did you mean 'chat'?"), (["bench", "latenci"], "mean 'bench latency'?"), (["-x"], "'-x'")],
)
def test_unknown_command_names_the_nearest(words: list[str], says: str, capsys: Capture) -> None:
    assert main(words) == 2
    first = capsys.readouterr().err.splitlines()[0]
    assert "unknown command" in first and says in first


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--gpu-memory-utilisation", "0.5"], "did you mean '--gpu-memory-utilization'?"),
        (["--max-num-seqs", "many"], "--max-num-seqs"),
        (["stray"], "unexpected argument 'stray'"),
    ],
)
def test_wrong_flag_is_exit_code_2(flags: list[str], says: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as end:
        main(["complete", *flags])
    check_one_line(int(end.value.code or 0), capsys.readouterr().err, expected=2, says=[says])


def check_refused(path: Path, says: Sequence[str], capsys: Capture, *flags: str) -> None:
    code = main(["complete", *flags_for(path, "-q", "hi", *flags)])
    check_one_line(code, capsys.readouterr().err, expected=1, says=says)


def test_missing_model(tmp_path: Path, capsys: Capture) -> None:
    check_refused(tmp_path / "nowhere", ["nowhere"], capsys)
    check_refused(tmp_path / "nowhere.gguf", ["nowhere.gguf"], capsys)
    check_refused(tmp_path, ["config.json"], capsys)


def test_truncated_gguf(tmp_path: Path, capsys: Capture) -> None:
    _, hf = make_tiny("llama", tmp_path)
    whole = write_gguf(tmp_path / "whole.gguf", hf).read_bytes()
    for length in (0, 3, 100, len(whole) // 2):
        path = tmp_path / "cut.gguf"
        path.write_bytes(whole[:length])
        check_refused(path, ["cut.gguf"], capsys, "--skip-tokenizer-init")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_attention_heads": 5, "head_dim": None}, "5"),
        ({"num_key_value_heads": 3}, "3"),
        ({"hidden_size": "many"}, "hidden_size"),
        ({"architectures": ["NoSuchForCausalLM"]}, "NoSuchForCausalLM"),
        ({"vocab_size": 999}, "999"),
    ],
)
def test_inconsistent_config(
    model: TextModel, tmp_path: Path, changes: dict[str, object], says: str, capsys: Capture
) -> None:
    path = shutil.copytree(model.path, tmp_path / "odd")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    check_refused(path, [says], capsys)


def test_invalid_json_files(model: TextModel, tmp_path: Path, capsys: Capture) -> None:
    for name in ("config.json", "tokenizer.json"):
        path = shutil.copytree(model.path, tmp_path / name)
        (path / name).write_text("{")
        check_refused(path, [name], capsys)


def test_invalid_request_is_exit_code_1(model: TextModel, capsys: Capture) -> None:
    check_refused(model.path, ["temperature"], capsys, "--temperature", "9")
    check_refused(model.path, ["max_tokens", "0"], capsys, "--max-tokens", "0")


# ---- interactive use


def answers(words: list[str], capsys: Capture) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


def test_temperature_keeps_the_other_model_defaults(model: TextModel, capsys: Capture) -> None:
    """The tiny model's own top_k of 20 still applies: with top_k 1 the answer is the greedy one."""
    flags = ["--override-generation-config", '{"top_k": 1}', "-q", "One two", "--max-tokens", "8"]
    hot = answers(["complete", *flags_for(model, *flags, "--temperature", "2")], capsys)
    assert hot == answers(["complete", *flags_for(model, *flags, "--temperature", "0")], capsys)


def test_lines_are_read_until_the_end_of_input(
    model: TextModel, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("One\n\n  \ntwo\n"))
    shown = answers(
        ["complete", *flags_for(model, "--max-tokens", "3", "--temperature", "0", "--stats")], capsys
    )
    assert shown.count("TTFT:") == shown.count("(3 tokens in") == 2
    assert "Please enter prompt to complete:" in shown


def test_conversation_keeps_its_history(
    model: TextModel, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """The template of the second turn gets the first, its answer and the system prompt."""
    roles = "{{ raise_exception(messages | map(attribute='role') | join(' ')) }}"
    template = CHATML + "{% if messages | length > 3 %}" + roles + "{% endif %}"
    monkeypatch.setattr("sys.stdin", io.StringIO("One\ntwo\n"))
    words = flags_for(model, "--chat-template", template, "--system-prompt", "Be brief.", "--max-tokens", "2")
    assert main(["chat", *words]) == 1
    assert "system user assistant user" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["quire.config.cli", "quire.entrypoints.serve"])
def test_interrupted_import_is_exit_code_130(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Catches a traceback after Ctrl-C during the start."""

    def interrupt(name: str, *_: object) -> None:
        if name == module:
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=interrupt), *sys.meta_path])
    monkeypatch.delitem(sys.modules, module, raising=False)
    assert main(["serve", "--help"]) == 130
    assert capsys.readouterr().err == "quire serve: interrupted\n"


def test_adapters_without_enable_lora_are_reported_before_the_model_is_looked_for(capsys: Capture) -> None:
    assert main(["serve", "absent", "--port", "0", "--lora-modules", "a=x"]) == 1
    assert "lora_modules needs enable_lora" in capsys.readouterr().err


@pytest.mark.parametrize("models", [["absent"], ["absent", "missing"]], ids=["one", "several"])
def test_port_in_use_is_reported_before_the_model_is_looked_for(models: list[str], capsys: Capture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", *models, "--host", "127.0.0.1", "--port", port]) == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in capsys.readouterr().err


def test_interrupted_answer_is_exit_code_130(
    model: TextModel, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("quire.core.engine_core.EngineCore.step", interrupt)
    assert main(["complete", *flags_for(model, "-q", "hi")]) == 130
    assert "Traceback" not in capsys.readouterr().err

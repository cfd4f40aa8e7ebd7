"""Tests of the flag parser: the forms in which launch scripts write flags."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.config.args import check_args
from quire.config.cli import FlagParser, add_engine_flags, engine_args_from, human_int
from quire.config.sections import options
from quire.config.unsupported import UNSUPPORTED


def parser() -> FlagParser:
    made = FlagParser(prog="quire serve")
    made.add_argument("model_tag", nargs="?")
    made.add_argument("--port", type=int, default=8000)
    add_engine_flags(made)
    return made


def parse(*args: str) -> dict[str, Any]:
    return engine_args_from(parser().parse_args(list(args)))


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as stop:
        parser().parse_args(list(args))
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1, "an error is one line"
    return message


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", {}),
        ("MODEL --port 1", {}),
        ("--max-num-seqs 4", {"max_num_seqs": 4}),
        ("--max_num_seqs=4", {"max_num_seqs": 4}),
        ("--max-num_seqs 0x4", None),
        ("--enforce-eager", {"enforce_eager": True}),
        ("--no-enforce_eager", {"enforce_eager": False}),
        ("--enforce-eager --no-enforce-eager", {"enforce_eager": False}),
        ("--kv-cache-memory=2G", {"kv_cache_memory_bytes": 2 * 2**30}),
        ("--max-model-len 4k", {"max_model_len": 4000}),
        ("--max-model-len 4K", {"max_model_len": 4096}),
        ("--max-model-len auto", {"max_model_len": "auto"}),
        ("--max-model-len -1", {"max_model_len": -1}),
        ("--max-model-len None", {"max_model_len": None}),
        ("--max-num-seqs 4k", None),
        ("--quantization None", {"quantization": None}),
        ("-q gguf", {"quantization": "gguf"}),
        ("--seed None", None),
        ("--dtype half", {"dtype": "half"}),
        ("--dtype fp7", None),
        ("-tp 2 -pp=3", {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}),
        ("--served-model-name a b", {"served_model_name": ["a", "b"]}),
        ("-O0", {"optimization_level": 0}),
        ("-O 2", {"optimization_level": 2}),
        ("--swap-space 4 MODEL", {"swap_space": 4}),
        ("--disable-log-requests MODEL", {"disable_log_requests": True}),
        ("--enable-lora", {"enable_lora": True}),
        ("--no-enable-lora", {"enable_lora": False}),
        ("--node-rank 1 -n 2", {"node_rank": 1, "nnodes": 2}),
        ("--cpu-offload-gb 10 MODEL", {"cpu_offload_gb": 10}),
        ("--kv-offloading-size 4", {"kv_offloading_size": 4}),
        ("--data-parallel-rank 1", {"data_parallel_rank": 1}),
        ("--data-parallel-start-rank 1", {"data_parallel_start_rank": 1}),
        ("--offload-group-size 2", {"offload_group_size": 2}),
        ("--gguf-file a.gguf", {"gguf_file": "a.gguf"}),
        ("--lora-extra-vocab-size 256", {"lora_extra_vocab_size": 256}),
        ("--cudagraph-capture-sizes 1 2 4", {"cudagraph_capture_sizes": [1, 2, 4]}),
        ('--hf-overrides {"a":{"b":2}}', {"hf_overrides": {"a": {"b": 2}}}),
        ('--hf-overrides {"a":10K,"b":"10K"}', {"hf_overrides": {"a": 10240, "b": "10K"}}),
        ("--hf-overrides.a.b 2 --hf_overrides.c_d=x", {"hf_overrides": {"a": {"b": 2}, "c_d": "x"}}),
        ("--hf-overrides.a+ 1 --hf-overrides.a+ two", {"hf_overrides": {"a": [1, "two"]}}),
        ('--hf-overrides {"a":1} --hf-overrides.b true', {"hf_overrides": {"a": 1, "b": True}}),
        ('--hf-overrides {"a":1} --hf-overrides {"b":2}', {"hf_overrides": {"b": 2}}),
        ("-cc.cudagraph_mode FULL", {"compilation_config": {"cudagraph_mode": "FULL"}}),
        ("--speculative-config.method ngram", {"speculative_config": {"method": "ngram"}}),
    ],
)
def test_flag_syntax(line: str, expected: dict[str, Any] | None) -> None:
    if expected is None:
        with pytest.raises(SystemExit):
            parse(*line.split())
    else:
        assert parse(*line.split()) == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1k", 1000),
        ("1K", 1024),
        ("25.6k", 25600),
        ("2m", 2 * 10**6),
        ("2M", 2 * 2**20),
        ("1G", 2**30),
        ("7", 7),
    ],
)
def test_human_ints(text: str, value: int) -> None:
    assert human_int(text) == value


@pytest.mark.parametrize("text", ["25.6K", "1.5", "k", "", "4x", "0.0001k", "nan", "inf"])
def test_invalid_counts_are_refused(text: str) -> None:
    with pytest.raises(Exception, match="is not|is a fraction"):
        human_int(text)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--max-model-lenn", "4"], "unknown flag --max-model-lenn; did you mean '--max-model-len'?"),
        (["--gpu-memory-utilisation=1"], "did you mean '--gpu-memory-utilization'?"),
        (["--dtype", "fp7"], "'fp7' is not one of auto, half"),
        (["--max-num-batched-tokens", "1.5K"], "fraction of a binary unit"),
        (["MODEL", "OTHER"], "unexpected argument 'OTHER'"),
        (["--max-num", "4"], "ambiguous option"),
        (["--hf-overrides.a"], "needs a value"),
        (["--help=nothing"], "no help on 'nothing'"),
    ],
)
def test_wrong_flag_is_one_line_and_exit_code_2(
    args: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(capsys, *args)


def test_every_flag_value_is_accepted_by_resolve() -> None:
    """A value that the parser reads must be one that resolve() accepts."""
    for option in options().values():
        flag = f"--{option.name.replace('_', '-')}"
        samples = {bool: [], int: ["4"], float: ["0.5"], str: ["x"], tuple: ["x"], dict: ['{"a": 1}']}
        values = [option.choices[0]] if option.choices else samples[option.kind]
        if option.name in UNSUPPORTED["engine argument"]:
            values = [str(UNSUPPORTED["engine argument"][option.name][0])]
        assert option.name in check_args(parse(flag, *values)), option.name


def test_command_line_overrides_the_config_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "max-num-seqs: 4\nmax_model_len: 4K\nport: 9\nenforce-eager: true\nenable-prefix-caching: false\n"
        "served_model_name: [a, b]\nhf-overrides: {x: {y: 1}}\nseed: null\ncache: {block-size: 32}\n"
    )
    result = parser().parse_args(
        ["--config", str(file), "MODEL", "--max-num-seqs", "8", "--hf-overrides.x.z", "2"]
    )
    assert (result.model_tag, result.port) == ("MODEL", 9)
    assert engine_args_from(result) == {
        "max_num_seqs": 8,
        "max_model_len": 4096,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "served_model_name": ["a", "b"],
        "hf_overrides": {"x": {"y": 1, "z": 2}},
        "block_size": 32,
    }
    assert parse(f"--config={file}", "--no-enforce-eager")["enforce_eager"] is False


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("max-num-seq: 4", "unknown flag 'max-num-seq'; did you mean '--max-num-seqs'?"),
        ("enforce-eager: 3", "enforce-eager must be true or false, not 3"),
        ("dtype: fp7", "'fp7' is not one of"),
        ("- a", "must hold `flag: value` lines"),
        ("a: [", "cannot be read"),
    ],
)
def test_wrong_config_file_is_named_with_the_key(
    content: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(content)
    message = refused(capsys, "--config", str(file))
    assert words in message and str(file) in message
    assert "cannot be read" in refused(capsys, "--config", str(tmp_path / "none.yaml"))


def help_text(capsys: pytest.CaptureFixture[str], flag: str) -> str:
    with pytest.raises(SystemExit) as stop:
        parser().parse_args([flag])
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_help_by_topic(capsys: pytest.CaptureFixture[str]) -> None:
    plain = help_text(capsys, "--help")
    assert all(f"{option.name.replace('_', '-')}" in plain for option in options().values())
    assert "swap-space" not in plain and "--help=all" in plain
    group = help_text(capsys, "--help=cache")
    assert "--block-size" in group and "Default: 16." in group and "--max-num-seqs" not in group
    assert help_text(capsys, "--help=CacheConfig") == group
    flag = help_text(capsys, "--help=max_num_seqs")
    assert "Most requests running at once" in flag and "--block-size" not in flag
    named = help_text(capsys, "--help=max_num")
    assert (
        "--max-num-seqs" in named and "--max-num-batched-tokens" in named and "--max-model-len" not in named
    )
    full = help_text(capsys, "--help=all")
    assert "{fcfs,priority}" in full and "--block-size" in full


def test_subcommand_has_its_own_help_errors_and_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A parent parser must not take `--help=all` or dotted keys away from its subparser."""
    top = FlagParser(prog="quire")
    serve = top.add_subparsers(dest="command").add_parser("serve")
    add_engine_flags(serve)
    (tmp_path / "c.yaml").write_text("max-num-seqs: 4")
    result = top.parse_args(["serve", "--config", str(tmp_path / "c.yaml"), "--hf_overrides.a_b", "1"])
    assert engine_args_from(result) == {"max_num_seqs": 4, "hf_overrides": {"a_b": 1}}
    with pytest.raises(SystemExit):
        top.parse_args(["serve", "--help=max-num-seqs"])
    assert "Most requests running" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        top.parse_args(["serve", "--max-num-seqz", "4"])
    assert "did you mean '--max-num-seqs'?" in capsys.readouterr().err


def test_building_flags_imports_no_heavy_modules() -> None:
    code = (
        "import sys, quire.config.cli as c; p = c.FlagParser(); c.add_engine_flags(p); p.parse_args([]);"
        "assert not {'torch', 'numpy', 'transformers', 'tokenizers', 'yaml'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

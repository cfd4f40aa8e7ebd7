"""Tests of `quire doctor` on machines that lack something."""

import socket
from argparse import Namespace
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
from fake_openai import FakeServer
from gguf_files import write_gguf
from oracle import make_tiny

from quire.cli import main
from quire.plan import doctor
from quire.version import __version__

ARGS = {
    **{"model": None, "port": 0, "max_model_len": None, "tensor_parallel_size": 1, "api_server_count": None},
    **{"pipeline_parallel_size": 1, "data_parallel_size": 1},
    **{"host": None, "api_key": None, "allowed_origins": None},
}
SIZES = "layers=80,hidden=65536,heads=512,kv_heads=8,intermediate=229376,vocab=128256"
"""A model of 4 trillion weights, which fits no machine."""


def found(**overrides: object) -> dict[str, doctor.Finding]:
    return {item.what: item for item in doctor.examine(Namespace(**ARGS | overrides))}


def only(findings: dict[str, doctor.Finding], text: str) -> doctor.Finding:
    (one,) = (finding for what, finding in findings.items() if text in what)
    return one


def test_machine_that_runs_these_tests_has_no_problems(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "layers=2,hidden=64,heads=4,intermediate=96,vocab=128", "--port", "0"]) == 0
    assert "fits in" in capsys.readouterr().out


def test_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        finding = only(found(port=port), f"port {port}")
    assert finding.state == "broken" and "--port" in finding.remedy


@pytest.mark.parametrize(("version", "name"), [(__version__, "a Quire server"), ("0.1\n", "a vLLM server")])
def test_running_server_is_named(version: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_VERSION_TIMEOUT_S", 60.0)
    with FakeServer() as server:
        server.version = version
        finding = only(found(port=server.port), f"port {server.port}")
    assert finding.state == "warning" and name in finding.what and finding.what.isprintable()


def test_missing_model_is_named_without_the_advice_of_plan() -> None:
    finding = only(found(model="/nosuch"), "/nosuch")
    assert finding.state == "broken" and "hub id" in finding.remedy and "--params" not in str(finding)


def test_stored_model_is_described_in_words(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", make_tiny("llama", tmp_path)[1])
    assert only(found(model=str(path)), "fits as it is stored").state == "ok"


def test_missing_parts_have_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("QUIRE_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage(1, 1, 1 << 20))
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "2.4.0")
    findings = found()
    assert only(findings, "compiler").state == "warning" and "gcc" in only(findings, "compiler").remedy
    assert "QUIRE_CACHE_ROOT" in only(findings, "cache folder").remedy
    assert "--shm-size" in only(findings, "/dev/shm").remedy
    assert only(findings, "torch 2.4.0").state == "broken"


def test_threads_are_counted_for_all_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check 2 threads for each of 2 API servers, 2 cores and 2 x 2 x 2 GPUs."""
    machine = replace(doctor.detect(), device="cuda")
    monkeypatch.setattr(doctor, "hardware_threads", lambda: 16)
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel_size": 2}
    (finding,) = doctor._threads(machine, Namespace(**ARGS | sizes))
    assert finding.state == "warning" and "need 24 (2 each)" in finding.what
    sizes["data_parallel_size"] = 1
    assert next(doctor._threads(machine, Namespace(**ARGS | sizes))).state == "ok"


def test_model_that_does_not_fit_refers_to_the_plan() -> None:
    finding = only(found(model=SIZES), "does not fit")
    assert finding.state == "broken" and "quire plan" in finding.remedy
    assert only(found(model="layers=1"), "also needs").state == "broken"


def test_server_open_to_others_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QUIRE_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    finding = only(found(), "without an API key")
    assert finding.state == "warning" and "--api-key" in finding.remedy and "--host" in finding.remedy
    pages = only(found(host="127.0.0.1", allowed_origins=["*"]), "every web page")
    assert pages.state == "warning" and "--allowed-origins" in pages.remedy
    assert only(found(host="127.0.0.1"), "only this machine").state == "ok"
    assert only(found(api_key=["secret"], allowed_origins=["*"]), "an API key is set").state == "ok"
    assert only(found(api_key=["gone.json"]), "access").state == "broken"
    monkeypatch.setenv("QUIRE_API_KEY", "secret")
    assert only(found(), "an API key is set").state == "ok"

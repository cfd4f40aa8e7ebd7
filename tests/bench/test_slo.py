"""Test of the simulation of latency targets from the command line."""

import sys

import pytest

from quire.bench import slo


def test_table_compares_targets_with_static_steps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--device", "0.6B", "--load", "0.3", "--static", "512", "--seconds", "2", "--itl-ms", "5"]
    monkeypatch.setattr(sys, "argv", ["slo", *flags])
    slo.main()
    head, _, static, targets = capsys.readouterr().out.splitlines()
    assert head.startswith("0.6B: ") and "ITL 5 ms" in head
    assert static.split()[:2] == ["0.3", "512"] and targets.split()[:2] == ["0.3", "targets"]
    assert float(targets.split()[2].rstrip("%")) > 90

"""Tests of scratch directories: those of dead processes are removed, others stay."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from quire.system.scratch import Scratch

OWNER = """
import sys, time
from pathlib import Path
from quire.system.scratch import Scratch
scratch = Scratch(Path(sys.argv[1]))
print(scratch.path, flush=True)
time.sleep(600)
"""


def owner(root: Path) -> tuple["subprocess.Popen[str]", Path]:
    """Start a process with its own scratch directory."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(root)], stdout=subprocess.PIPE, text=True, env=os.environ
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_directory_is_removed_with_its_owner(tmp_path: Path) -> None:
    with Scratch(tmp_path) as scratch:
        (scratch.path / "file").write_text("x")
        assert scratch.path.parent == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_next_process_removes_only_directories_of_killed_ones(tmp_path: Path) -> None:
    (dead, left), (alive, kept) = owner(tmp_path), owner(tmp_path)
    try:
        (left / "file").write_text("x")
        dead.send_signal(signal.SIGKILL)
        dead.wait()
        assert left.exists()
        with Scratch(tmp_path) as scratch, Scratch(tmp_path) as other:
            assert not left.exists()
            assert kept.exists() and scratch.path.exists() and other.path.exists()
    finally:
        alive.kill()
        alive.wait()


def test_directory_is_locked_against_programs_that_delete_old_files(tmp_path: Path) -> None:
    """systemd-tmpfiles skips a folder whose lock it does not get."""
    with Scratch(tmp_path) as scratch:
        folder = os.open(scratch.path, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.close(folder)


def test_similar_directories_stay(tmp_path: Path) -> None:
    """Check that the sweep does not rely on the name alone or follow links."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "lock").write_text("")
    (tmp_path / "quire-notes").mkdir()
    (tmp_path / "quire-notes" / "text").write_text("mine")
    (tmp_path / "quire-link").symlink_to(precious)
    (tmp_path / "quire-file").write_text("")
    with Scratch(tmp_path):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "precious",
        "quire-file",
        "quire-link",
        "quire-notes",
    ]
    assert (precious / "lock").exists()


def test_directories_of_other_users_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process, left = owner(tmp_path)
    process.kill()
    process.wait()
    real = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: real + 1)
    with Scratch(tmp_path):
        assert left.exists()
    monkeypatch.undo()
    with Scratch(tmp_path):
        assert not left.exists()

"""Tests of the files of KV cache blocks: damage, restarts, permissions and full disks."""

import errno
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.data.kv_tiers import LoadDone
from quire.errors import ConfigError
from quire.worker import disk_tier
from quire.worker.disk_tier import HEADER_BYTES, DiskTier
from quire.worker.kv_tiers import HostBlocks

SIZE = 1000
MODEL, OTHER = b"m" * 32, b"o" * 32
KEYS = [bytes([number]) * 32 for number in range(4)]


def contents(*numbers: int) -> Any:
    import torch

    rows = [np.random.default_rng(number).integers(0, 256, SIZE, np.uint8) for number in numbers]
    return HostBlocks(torch.from_numpy(np.stack(rows)))


def opened(folder: Path, model: bytes = MODEL, size: int = SIZE) -> DiskTier:
    return DiskTier(folder / "model", model=model, block_bytes=size)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "lock")


def test_blocks_survive_a_restart(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    tier.write([KEYS[0], KEYS[2]], contents(0, 2))
    tier.close()
    again = opened(tmp_path)
    assert sorted(again.keys()) == [KEYS[0], KEYS[2]]
    blocks = again.read([KEYS[2], KEYS[1], KEYS[0]])
    assert blocks[1] is None
    expected = contents(0, 2).wait()
    assert (blocks[2] == expected[0]).all() and (blocks[0] == expected[1]).all()  # type: ignore[index]
    again.close()


def test_only_the_user_can_read_them(tmp_path: Path) -> None:
    tier = opened(tmp_path / "new")
    tier.write(KEYS[:1], contents(0))
    tier.close()
    folders = [tmp_path / "new", *(path for path in (tmp_path / "new").rglob("*") if path.is_dir())]
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in files(tmp_path)} == {0o600}


def damage_truncate(path: Path) -> None:
    os.truncate(path, HEADER_BYTES + SIZE - 1)


def damage_flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + SIZE // 2] ^= 1
    path.write_bytes(data)


def damage_zero(path: Path) -> None:
    path.write_bytes(bytes(HEADER_BYTES + SIZE))


def damage_swap(path: Path) -> None:
    """Put the intact file of another block in its place."""
    (other,) = (file for file in files(path.parents[2]) if file != path)
    os.replace(other, path)


@pytest.mark.parametrize("damage", [damage_truncate, damage_flip, damage_zero, damage_swap])
def test_a_damaged_or_foreign_file_is_a_miss(tmp_path: Path, damage: Any) -> None:
    tier = opened(tmp_path)
    tier.write(KEYS[:2], contents(0, 1))
    tier.flush()
    path = tier._path(KEYS[0])
    damage(path)
    assert tier.read(KEYS[:1]) == [None]
    tier.write(KEYS[:1], contents(0))
    (block,) = tier.read(KEYS[:1])
    assert block is not None and (block == contents(0).wait()[0]).all(), "it is written again"
    tier.close()


def test_files_of_another_model_are_misses(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    tier.write(KEYS[:1], contents(0))
    tier.close()
    other = opened(tmp_path, model=OTHER)
    assert other.read(KEYS[:1]) == [None]
    other.close()


def test_a_start_removes_unfinished_files_and_no_others(tmp_path: Path) -> None:
    """A process that is killed leaves the file that it was writing. What users or links have put beside the
    files stays as it is."""
    tier = opened(tmp_path)
    tier.write(KEYS[:3], contents(0, 1, 2))
    tier.flush()
    paths = [tier._path(key) for key in KEYS[:3]]
    paths[0].rename(paths[0].with_suffix(".tmp"))
    os.truncate(paths[1], 10)
    others = [paths[2].parent / "notes.txt", tmp_path / "home" / "thesis.kv", tmp_path / "home" / "a.tmp"]
    others[1].parent.mkdir()
    for path in others:
        path.touch()
    (tmp_path / "model" / "ff").symlink_to(tmp_path / "home")
    link = paths[2].with_name("ab" * 32 + ".kv")
    link.symlink_to(others[1])
    tier.close()
    again = opened(tmp_path)
    assert again.keys() == [KEYS[2]] and files(tmp_path) == sorted([paths[2], *others])
    assert not link.is_symlink()
    again.close()


def test_a_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir(mode=0o755)
    (tmp_path / "model").symlink_to(tmp_path / "home")
    with pytest.raises(ConfigError, match="cannot be used: it is a symbolic link"):
        opened(tmp_path)
    assert (tmp_path / "home").stat().st_mode & 0o777 == 0o755 and not files(tmp_path)


class Slow:
    """Contents of blocks that arrive when the test sets an event."""

    def __init__(self, *numbers: int) -> None:
        self.arrived = threading.Event()
        self._contents = contents(*numbers)

    def wait(self) -> Any:
        self.arrived.wait()
        return self._contents.wait()


def test_blocks_that_wait_to_be_written_are_read_from_memory(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    slow = Slow(0)
    tier.write(KEYS[:1], slow)
    tier.write(KEYS[1:2], contents(1))
    (block,) = tier.read(KEYS[1:2])
    assert block is not None and (block == contents(1).wait()[0]).all()
    assert not files(tmp_path), "the reader has not waited for the files"
    slow.arrived.set()
    tier.flush()
    assert len(files(tmp_path)) == 2 and not tier._unwritten
    tier.close()


def test_files_of_other_models_make_way(tmp_path: Path) -> None:
    """The size of a directory is a limit of all models together; those in use by other engines stay."""

    def tier_of(digit: str, room: int) -> DiskTier:
        folder, model = tmp_path / f"model_{digit * 12}_r0", digit.encode() * 32
        most_bytes = room * (HEADER_BYTES + SIZE)
        return DiskTier(folder, model=model, block_bytes=SIZE, most_bytes=most_bytes, takes="_r0".__eq__)

    def num_files() -> list[int]:
        folders = [tmp_path / f"model_{digit * 12}_r0" for digit in "abc"]
        return [sum(file.suffix == ".kv" for file in files(folder)) for folder in folders]

    for seconds, digit in enumerate("abc", 1):
        tier = tier_of(digit, 100)
        tier.write(KEYS[:3], contents(0, 1, 2))
        tier.close()
        for path in files(tmp_path / f"model_{digit * 12}_r0"):
            os.utime(path, (seconds, seconds))
    in_use = tier_of("b", 100)
    tier = tier_of("c", 5)
    tier.keys()
    tier.flush()
    assert num_files() == [2, 3, 3], "the oldest make way at the start"
    tier.write(KEYS[3:], contents(3))
    tier.flush()
    assert num_files() == [1, 3, 4]
    tier.close()
    in_use.close()
    tier = tier_of("c", 4)
    tier.keys()
    tier.flush()
    assert num_files() == [0, 0, 4]
    tier.close()


def test_the_order_of_use_survives_a_restart(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    tier.write(KEYS[:3], contents(0, 1, 2))
    tier.flush()
    for at, key in enumerate(KEYS[:3]):
        os.utime(tier._path(key), (at + 1, at + 1))
    tier.read([KEYS[0]])
    tier.close()
    again = opened(tmp_path)
    assert again.keys() == [KEYS[1], KEYS[2], KEYS[0]]
    again.close()


def test_deleted_blocks_are_gone(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    tier.write(KEYS[:2], contents(0, 1))
    tier.delete([KEYS[0], KEYS[3]])
    tier.flush()
    assert [block is None for block in tier.read(KEYS[:2])] == [True, False]
    tier.close()


def test_a_full_disk_turns_the_tier_off_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = opened(tmp_path)
    tier.write(KEYS[:1], contents(0))
    tier.flush()
    lines: list[str] = []
    monkeypatch.setattr(disk_tier.log, "warning", lambda text, *args: lines.append(text % args))

    def full(descriptor: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk_tier.os, "write", full)
    for key in KEYS[1:]:
        tier.write([key], contents(1))
        tier.flush()
    assert tier.is_off and len(lines) == 1 and "No space left on device" in lines[0]
    assert tier.read(KEYS[:2])[0] is not None, "what is there is still read"
    assert files(tmp_path) == [tier._path(KEYS[0])], "no unfinished file is left"
    assert lost_writes(tier) == KEYS[1:]
    tier.close()


def lost_writes(tier: DiskTier) -> list[bytes]:
    done = LoadDone()
    tier.take_report(done)
    return done.lost_writes


def test_blocks_beyond_the_limit_of_waiting_writes_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier, "_MAX_WAITING_BYTES", 2 * SIZE)
    tier = opened(tmp_path)
    assert tier.admit(KEYS[:3]) == 2
    tier.write(KEYS[:2], contents(0, 1))
    assert None not in [block if block is None else 1 for block in tier.read(KEYS[:2])]
    assert lost_writes(tier) == [KEYS[2]] and lost_writes(tier) == []
    tier.close()


def test_a_folder_in_use_or_not_writable_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "_LOCK_S", 0.0)
    tier = opened(tmp_path)
    with pytest.raises(ConfigError, match="is used by another engine"):
        opened(tmp_path)
    tier.close()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be used: .*; give a directory"):
        opened(tmp_path / "file")

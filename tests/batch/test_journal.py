"""Tests of the journal: finished answers survive the end of the process."""

from pathlib import Path

import pytest

from quire.batch.journal import Journal
from quire.batch.lines import answer_line
from quire.errors import ConfigError


def entry(custom_id: str) -> bytes:
    return answer_line(custom_id, status=200, request_id="r", body={"of": custom_id})


def filled(path: Path, *ids: str) -> None:
    journal = Journal(path)
    for custom_id in ids:
        journal.add(custom_id, entry(custom_id))
    journal.close()


def test_answers_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "part"
    filled(path, "a", "b")
    journal = Journal(path)
    journal.add("c", entry("c"))
    assert list(journal.finished) == ["a", "b", "c"]
    assert [b'"of":"%s"' % name in journal.read(name.decode()) for name in (b"c", b"a", b"b")] == [True] * 3
    journal.remove()
    assert not path.exists()


def test_every_line_is_written_at_once(tmp_path: Path) -> None:
    """A killed process loses its buffers: they must be empty."""
    path = tmp_path / "part"
    journal = Journal(path)
    for custom_id in ("a", "b"):
        journal.add(custom_id, entry(custom_id))
        assert path.read_bytes().endswith(journal.read(custom_id))


@pytest.mark.parametrize("cut", [1, 2, 40])
def test_partial_last_line_is_dropped_and_rewritten(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "part"
    filled(path, "a", "b")
    path.write_bytes(path.read_bytes()[:-cut])
    journal = Journal(path)
    assert list(journal.finished) == ["a"]
    journal.add("b", entry("b"))
    journal.close()
    assert path.read_bytes().count(b"\n") == 2 and list(Journal(path).finished) == ["a", "b"]


def test_damage_ends_the_journal(tmp_path: Path) -> None:
    """Blocks of zeros after a power cut, followed by whole lines."""
    path = tmp_path / "part"
    path.write_bytes(entry("a") + b"\0" * 50 + b"\n" + entry("b"))
    assert list(Journal(path).finished) == ["a"] and path.read_bytes() == path.read_bytes().rstrip(b"\0")


def test_one_run_at_a_time(tmp_path: Path) -> None:
    first = Journal(tmp_path / "part")
    with pytest.raises(ConfigError, match="in use by another run"):
        Journal(tmp_path / "part")
    first.close()
    Journal(tmp_path / "part").close()


def test_journal_of_another_batch_is_refused(tmp_path: Path) -> None:
    filled(tmp_path / "part", "a", "strange")
    journal = Journal(tmp_path / "part")
    journal.check(["a", "strange", "more"])
    with pytest.raises(ConfigError, match="'strange'"):
        journal.check(["a"])


def test_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        Journal(tmp_path / "no" / "part")

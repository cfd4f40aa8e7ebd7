"""Tests that the mutants match the sources, that the runner picks the right test files, and that it judges
the end of a run correctly. The runs themselves take too long for the suite: they are `make mutants`."""

import ast
import importlib.util
import re
import sys
from collections import Counter
from itertools import zip_longest
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "src" / "quire"


def load_runner() -> ModuleType:
    """Import run.py, which is in no folder of the import path."""
    spec = importlib.util.spec_from_file_location("mutants_run", HERE / "run.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


runner = load_runner()
MUTANTS = runner.read_mutants()

CHECKOUT = {
    "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["tests/models"]\n',
    "src/quire/__init__.py": "",
    "src/quire/sched/__init__.py": "",
    "src/quire/sched/blocks.py": "SIZE = 16\n",
    "src/quire/sched/table.py": 'ENTRIES = {"blocks": "quire.sched.blocks:SIZE"}\n',
    "src/quire/core.py": "from quire.sched import table\n",
    "tests/conftest.py": "",
    "tests/models/oracle.py": "from quire.sched.blocks import SIZE\n",
    "tests/models/test_parity.py": "import oracle\n",
    "tests/sched/test_blocks.py": "from quire.sched import blocks, table\n",
    "tests/sched/test_other.py": "import json\n",
    "tests/sched/test_salt.py": "import json  # the salt of a request\n",
    "tests/sched/test_table.py": "import quire.sched.table\n",
    "tests/test_core.py": "from quire import core\n",
    "tests/test_unrelated.py": "import json\n",
    "tests/gpu/test_gpu.py": "from quire.sched import blocks\n",
}
"""Checkout in which a lazy table refers to a module, and a helper imports it."""
MUTANT = runner.Mutant(
    "id", "sched/blocks.py", "SIZE = 16", "SIZE = 17", "Requests with other salts share it."
)


@pytest.fixture
def tests(tmp_path: Path) -> Path:
    for name, text in CHECKOUT.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "tests"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_edit_applies(mutant: object) -> None:
    assert isinstance(mutant, runner.Mutant)
    assert mutant.new != mutant.old
    text = (SOURCES / mutant.file).read_text(encoding="utf-8")
    mutated = mutant.applied(text)  # raises unless the old text is there exactly once
    statements = zip_longest(ast.parse(text).body, ast.parse(mutated).body, fillvalue=ast.Pass())
    assert any(ast.dump(one) != ast.dump(other) for one, other in statements)


def test_ids_and_descriptions_are_well_formed() -> None:
    assert max(Counter(mutant.id for mutant in MUTANTS).values()) == 1
    for mutant in MUTANTS:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", mutant.id)
        assert re.fullmatch(r"([A-Z]|\w+_\w+ )[^\n]+\.", mutant.mistake), mutant.id


def test_edit_must_match_exactly_once() -> None:
    mutant = runner.Mutant("id", "file.py", "a", "b", "A mistake.")
    assert mutant.applied("a c") == "b c"
    for text in ("c", "a a"):
        with pytest.raises(runner.EditError, match="must occur once"):
            mutant.applied(text)


def test_closest_test_files_come_first(tests: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "MOST_RELEVANT", 1)
    stages = runner.ImportGraph(tests).stages(MUTANT)
    assert [[str(path.relative_to(tests)) for path in stage] for stage in stages] == [
        ["sched/test_blocks.py", "models/test_parity.py"],
        ["sched/test_salt.py"],
        ["sched/test_table.py", "sched/test_other.py"],
        ["test_core.py"],
    ]


def test_number_of_test_files_is_limited(tests: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "MAX_FILES", 3)
    assert [len(stage) for stage in runner.ImportGraph(tests).stages(MUTANT)] == [2, 1]


@pytest.mark.parametrize(
    ("code", "status", "detail"),
    [
        (0, "SURVIVED", ""),
        (5, "SURVIVED", ""),
        (1, "killed", "tests/sched/test_blocks.py::test_reuse[2 blocks]"),
        ("hung", "killed", "hung: no output for 120 s"),
        ("late", "SURVIVED", "no test failed in 240 s: A mistake."),
        (2, "killed", "tests/sched/test_blocks.py::test_reuse[2 blocks]"),
        (3, "broken", "pytest ended with 3"),
        (-11, "broken", "pytest ended with -11"),
    ],
)
def test_end_of_a_run_is_judged(
    tests: Path, tmp_path: Path, code: int | str, status: str, detail: str
) -> None:
    output = tmp_path / "output.txt"
    output.write_text(
        "..F\nERROR 16:56:54 [blocks.py:24] a line of the log\n"
        "FAILED tests/sched/test_blocks.py::test_reuse[2 blocks] - assert 1 == 2\n"
    )
    verdict = runner.Verdict("id", "sched/blocks.py", "A mistake.")
    is_last = runner.Runner(tests)._judge(verdict, code, output)
    assert (verdict.status, verdict.killed_by or verdict.detail, is_last) == (
        status,
        detail,
        code not in (0, 5),
    )
    assert bool(verdict.tail) == (status == "broken")


def test_mutant_is_a_copy_of_the_sources(tests: Path, tmp_path: Path) -> None:
    runner.Runner(tests)._plant(MUTANT, tmp_path / "copy")
    assert (tmp_path / "copy/src/quire/sched/blocks.py").read_text() == "SIZE = 17\n"
    assert (tmp_path / "src/quire/sched/blocks.py").read_text() == "SIZE = 16\n"


def test_edit_that_does_not_match_is_reported(tests: Path) -> None:
    mutant = runner.Mutant("id", "sched/blocks.py", "SIZE = 32", "SIZE = 17", "A mistake.")
    verdict = runner.Runner(tests).verdict(mutant)
    assert (verdict.status, verdict.num_files) == ("unfit", 0)


def test_test_that_fails_without_a_mutation_kills_nothing(
    tests: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = runner.Runner(tests)
    mutants = [
        runner.Mutant(name, "sched/blocks.py", "a", "b", "A mistake.") for name in ("one", "two", "three")
    ]
    first = [
        runner.Verdict(name, "", "", "killed", killed_by=test)
        for name, test in (("one", "t1"), ("two", "t2"))
    ]
    first.append(runner.Verdict("three", "", ""))
    later = {"t1": ("killed", "t3"), "t3": ("SURVIVED", "")}

    def verdict(mutant: object) -> object:
        assert isinstance(mutant, runner.Mutant)
        status, killed_by = later[max(made.left_out)]
        return runner.Verdict(mutant.id, "", "", status, killed_by=killed_by)

    monkeypatch.setattr(made, "failing", lambda names: {"t1", "t3"} & set(names))
    monkeypatch.setattr(made, "verdict", verdict)
    verdicts = runner.confirmed(made, first, mutants, 1)
    assert {verdict.id: verdict.status for verdict in verdicts} == {
        "one": "SURVIVED",
        "two": "killed",
        "three": "SURVIVED",
    }
    assert made.left_out == {"t1", "t3"}

"""Run the tests on sources with one mistake in them, for each mistake of mutants.toml.

A mutant is a copy of the sources with one text edit. It is killed if a test fails on it, or hangs. A mutant
that survives shows a mistake that no test notices. Only the test files that import the edited module are
run, the closest first; the imports are found in the text of the files. A test that fails without a mistake,
too, proves nothing: it is left out, and the mutants that it has killed are run again."""

import argparse
import ast
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import accumulate, groupby
from pathlib import Path

HERE = Path(__file__).resolve().parent
MAX_FILES = 48
"""Maximum number of test files for one mutant."""
LIMIT_S = 240.0
"""Seconds for all runs of one mutant. A mutant without a failed test by then survives. A run without any
output for half as long counts as hung."""
POLL_S = 0.2
MAX_ROUNDS = 4
"""Maximum number of reruns because of tests that fail without a mistake."""
TAIL_LINES = 25
FIRST_FILES = 8
"""Test files of one distance that are run first; for most mutants the others are then not collected."""
MOST_RELEVANT = 8
"""Test files at any distance that are run after those at distance 1: the ones with most words in common."""
DESELECTED = ("gpu", "clients")
"""Test folders without any test for the chosen markers."""
SLOW = ("bench", "e2e", "arch")
"""Test folders that start whole processes: they are run after the others of the same distance."""
PYTEST = (
    *("-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider"),
    *("-p", "no_shrinking", "--hypothesis-seed=0", "-m", "not slow and not gpu"),
)
_REFERENCE = re.compile(r"(quire(?:\.\w+)+)(?::\w*)?")
"""Module, or a name in it, as in the tables of lazily imported classes."""
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+\.py(?:::.+?)?)(?: - .*)?$", re.MULTILINE)
"""Line of pytest's summary, which names a test."""


class EditError(Exception):
    """The edit of a mutant does not fit the sources."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mistake, as a text edit."""

    id: str
    file: str
    """Path below src/quire."""
    old: str
    """Text that occurs once in the file."""
    new: str
    mistake: str
    """Effect on a user."""

    def applied(self, text: str) -> str:
        """Return the text of the file with the mistake in it."""
        count = text.count(self.old)
        if count != 1:
            raise EditError(f"`old` occurs {count} times in {self.file}, and must occur once")
        return text.replace(self.old, self.new)


def read_mutants(path: Path = HERE / "mutants.toml") -> list[Mutant]:
    """Return all mutants of a file, in its order."""
    return [Mutant(**entry) for entry in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]]


def words_of(text: str) -> set[str]:
    """Return the words of four letters and more in a text, without the s of a plural."""
    return {word.removesuffix("s") for word in re.findall("[a-z]{4,}", text.lower())}


# ---- choice of tests


class ImportGraph:
    """Import graph over the sources and the tests of a checkout."""

    def __init__(self, tests: Path) -> None:
        self.tests = tests
        self.root = tests.parent
        self.package = self.root / "src" / "quire"
        self.modules = {self._module_name(path): path for path in self.package.rglob("*.py")}
        settings = tomllib.loads((self.root / "pyproject.toml").read_text(encoding="utf-8"))
        folders = settings["tool"]["pytest"]["ini_options"].get("pythonpath", [])
        self.helpers = {path.stem: path for folder in folders for path in (self.root / folder).glob("*.py")}
        """Modules that tests import by their bare name."""

    def _module_name(self, path: Path) -> str:
        parts = path.relative_to(self.package.parent).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def test_files(self) -> list[Path]:
        files = sorted(self.tests.rglob("test_*.py"))
        return [path for path in files if self.folder(path) not in DESELECTED]

    def folder(self, path: Path) -> str:
        """Return the folder of tests/ that a test file is in."""
        return path.relative_to(self.tests).parts[0]

    @cached_property
    def imports(self) -> dict[Path, set[Path]]:
        """Return the files that each file imports; a test file imports the conftest.py of each folder above
        it."""
        imported = {path: self._imported(path) for path in self.modules.values()}
        for path in self.tests.rglob("*.py"):
            folders = [folder for folder in path.parents if folder.is_relative_to(self.tests)]
            conftests = {folder / "conftest.py" for folder in folders if (folder / "conftest.py").is_file()}
            imported[path] = (self._imported(path) | conftests) - {path}
        return imported

    def _imported(self, path: Path) -> set[Path]:
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.update(self._from(node.module, [alias.name for alias in node.names]))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                reference = _REFERENCE.fullmatch(node.value)
                names.update([reference[1]] if reference else [])
        known = self.modules | self.helpers
        return {known[name] for name in names if name in known}

    def _from(self, module: str, names: Sequence[str]) -> Iterator[str]:
        """Yield the modules that `from module import names` refers to."""
        for name in names:
            inner = f"{module}.{name}"
            yield inner if inner in self.modules else module

    @cached_property
    def importers(self) -> dict[Path, set[Path]]:
        """Return the files that import each file."""
        importers: dict[Path, set[Path]] = defaultdict(set)
        for importer, imported in self.imports.items():
            for path in imported:
                importers[path].add(importer)
        return importers

    def distances(self, source: Path) -> dict[Path, int]:
        """Return the number of imports of quire's modules between each test file and a source file. Imports
        of test helpers cost nothing."""
        distances, waiting = {source: 0}, deque([source])
        while waiting:
            path = waiting.popleft()
            is_source = path.is_relative_to(self.package)
            for importer in self.importers.get(path, ()):
                distance = distances[path] + is_source
                if distance < distances.get(importer, distance + 1):
                    distances[importer] = distance
                    (waiting.append if is_source else waiting.appendleft)(importer)
        return {path: distances[path] for path in self.test_files if path in distances}

    @cached_property
    def words(self) -> dict[Path, set[str]]:
        """Return the words of each test file."""
        return {path: words_of(path.read_text(encoding="utf-8")) for path in self.test_files}

    def relevance(self, words: set[str]) -> dict[Path, float]:
        """Return the relevance of each test file for these words. Rare words count more, as does a short
        file."""
        counts = Counter(word for in_file in self.words.values() for word in in_file & words)
        weights = {word: math.log(len(self.words) / count) for word, count in counts.items()}
        return {
            path: sum(weights[word] for word in in_file & words) / math.sqrt(len(in_file) + 1)
            for path, in_file in self.words.items()
        }

    # ---- order

    def mirrored_folder(self, source: Path) -> Path | None:
        """Return the test folder of a source file's folder, or of the next one above it."""
        inner = source.relative_to(self.package).parent
        for part in (inner, *inner.parents):
            if part.parts and (self.tests / part).is_dir():
                return self.tests / part
        return None

    def stages(self, mutant: Mutant) -> list[list[Path]]:
        """Return the test files for a mutant, in runs: those at distance 1 from its module, those at any
        distance that have most words in common with the edit, then the others, closest first. Files of the
        mirrored folder count as close whether they import the module or not."""
        source = self.package / mutant.file
        distances = self.distances(source)
        relevance = self.relevance(words_of(f"{mutant.old} {mutant.new} {mutant.mistake}"))
        mirrored = self.mirrored_folder(source)
        names = {f"test_{source.stem}.py", f"test_{source.parent.name}.py"}
        parent = self.tests if mirrored is None else mirrored
        twins = {path for path in self.test_files if path.name in names and path.parent == parent}
        beside = set() if mirrored is None else {path for path in self.test_files if mirrored in path.parents}
        stage_of = (
            distances | {path: min(distances.get(path, 2), 2) for path in beside} | dict.fromkeys(twins, 1)
        )

        def order(path: Path) -> tuple[object, ...]:
            is_far = path not in distances
            return stage_of[path], path not in twins, self._is_slow(path), is_far, -relevance[path]

        ranked = sorted(stage_of, key=order)
        direct = [path for path in ranked if stage_of[path] == 1]
        relevant = sorted(ranked[len(direct) :], key=lambda path: -relevance[path])[:MOST_RELEVANT]
        runs = [direct[:FIRST_FILES], direct[FIRST_FILES:], sorted(relevant, key=self._is_slow)]
        rest = (path for path in ranked[len(direct) :] if path not in relevant)
        runs += [list(files) for _, files in groupby(rest, key=stage_of.__getitem__)]
        return _first(runs, MAX_FILES)

    def _is_slow(self, path: Path) -> bool:
        return self.folder(path) in SLOW


def _first(runs: list[list[Path]], most: int) -> list[list[Path]]:
    """Limit the runs to this number of files, without empty runs."""
    left = list(accumulate((len(run) for run in runs), lambda before, size: before - size, initial=most))
    kept = [run[: max(count, 0)] for run, count in zip(runs, left, strict=False)]
    return [run for run in kept if run]


# ---- runs


@dataclass(slots=True)
class Verdict:
    """Result of a mutant."""

    id: str
    file: str
    mistake: str
    status: str = "SURVIVED"
    """killed, SURVIVED, broken (no test could run) or unfit (the edit does not apply)."""
    detail: str = ""
    """Explanation of the status."""
    killed_by: str = ""
    """Test that failed, if any."""
    seconds: float = 0.0
    num_files: int = 0
    """Number of test files that were run."""
    tail: list[str] = field(default_factory=list)
    """Last lines of the output of a broken run."""

    def line(self) -> str:
        reason = self.killed_by or self.detail or self.mistake
        return f"{self.status:8} {self.id:32} {self.seconds:6.1f} s  {reason}"


class Runner:
    """Runs the tests of a checkout on mutants of its sources."""

    def __init__(self, tests: Path, limit_s: float = LIMIT_S) -> None:
        self.graph = ImportGraph(tests)
        self.root = self.graph.root
        self.limit_s = limit_s
        self.stopped = threading.Event()
        self.left_out: set[str] = set()
        """Tests, and files that cannot be imported, that fail without a mistake."""
        assert self.graph.importers and self.graph.words  # read here, since mutants run in threads

    def verdict(self, mutant: Mutant) -> Verdict:
        """Run one mutant, stage by stage, until a test fails or its time is over."""
        verdict, started = Verdict(mutant.id, mutant.file, mutant.mistake), time.monotonic()
        with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            try:
                self._plant(mutant, folder)
            except (EditError, OSError) as error:
                verdict.status, verdict.detail = "unfit", str(error)
                return verdict
            has_run = False
            for stage in self.graph.stages(mutant):
                left_s = started + self.limit_s - time.monotonic()
                if left_s <= 0:
                    break
                names = [str(path.relative_to(self.root)) for path in stage]
                names = [name for name in names if name not in self.left_out]
                if not names:
                    continue
                code = self._pytest(["-x", *names], folder, left_s)
                verdict.num_files += len(stage)
                has_run |= code != 5
                if self._judge(verdict, code, folder / "output.txt"):
                    break
        if not has_run and verdict.status == "SURVIVED":
            verdict.status, verdict.detail = "broken", "no test was collected"
        verdict.seconds = round(time.monotonic() - started, 1)
        return verdict

    def _plant(self, mutant: Mutant, folder: Path) -> None:
        """Copy the sources and apply the mistake."""
        self._copy_sources(folder)
        path = folder / "src" / "quire" / mutant.file
        path.write_text(mutant.applied(path.read_text(encoding="utf-8")), encoding="utf-8")
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)

    def _copy_sources(self, folder: Path) -> None:
        # Python renames such files while they are copied.
        shutil.copytree(self.root / "src", folder / "src", ignore=shutil.ignore_patterns("*.pyc.*"))

    def _judge(self, verdict: Verdict, code: int | str, output: Path) -> bool:
        """Record the end of a run; return whether it is the last."""
        if code in (0, 5):
            return False
        text = output.read_text(encoding="utf-8", errors="replace")
        failed = _FAILED.search(text)
        if code == 1 or (code == 2 and failed):  # 2: a test file cannot be imported
            verdict.status, verdict.killed_by = "killed", failed[1] if failed else ""
        elif code == "hung":
            verdict.status, verdict.detail = "killed", f"hung: no output for {self.limit_s / 2:.0f} s"
        elif code == "late":
            verdict.detail = f"no test failed in {self.limit_s:.0f} s: {verdict.mistake}"
        else:
            verdict.status, verdict.detail = "broken", f"pytest ended with {code}"
            verdict.tail = text.splitlines()[-TAIL_LINES:]
        return True

    def failing(self, tests: Iterable[str]) -> set[str]:
        """Return the tests that fail on the unchanged sources."""
        if not (names := sorted(tests)):
            return set()
        with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as folder:
            self._copy_sources(Path(folder))
            self._pytest(names, Path(folder), max(self.limit_s, 60.0 * len(names)))
            output = (Path(folder) / "output.txt").read_text(encoding="utf-8", errors="replace")
        return {match[1] for match in _FAILED.finditer(output)} & set(names)

    def _pytest(self, arguments: Sequence[str], folder: Path, left_s: float) -> int | str:
        """Return the exit code of pytest, `hung` if its output stopped, or `late` if the time was over
        first."""
        paths = [str(folder / "src"), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "400",  # of the summary
            "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "hypothesis"),
        }
        left_out = [f"--deselect={name}" for name in sorted(self.left_out)]
        places = [f"--basetemp={folder / 't'}", f"--rootdir={self.root}"]
        command = [sys.executable, *PYTEST, *places, *left_out, *arguments]
        with (folder / "output.txt").open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=self.root,
                env=env,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            return self._ended(process, folder / "output.txt", left_s)
        finally:
            _end_group(process)

    def _ended(self, process: "subprocess.Popen[bytes]", output: Path, left_s: float) -> int | str:
        deadline, size, grown_at = time.monotonic() + left_s, 0, time.monotonic()
        while (code := process.poll()) is None:
            time.sleep(POLL_S)
            now = time.monotonic()
            if output.stat().st_size > size:
                size, grown_at = output.stat().st_size, now
            if now - grown_at > self.limit_s / 2:
                return "hung"
            if now > deadline or self.stopped.is_set():
                return "late"
        return code


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill pytest, if it still runs, and the processes that its tests have left behind."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    finally:
        process.wait()


# ---- the command


def run_all(runner: Runner, mutants: Sequence[Mutant], jobs: int) -> Iterator[Verdict]:
    """Yield the verdicts as they come, of `jobs` mutants at a time."""
    with ThreadPoolExecutor(jobs) as pool:
        open_runs: set[Future[Verdict]] = {pool.submit(runner.verdict, mutant) for mutant in mutants}
        try:
            while open_runs:
                done, open_runs = wait(open_runs, timeout=None, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        except BaseException:
            runner.stopped.set()
            pool.shutdown(cancel_futures=True)
            raise


def confirmed(runner: Runner, verdicts: list[Verdict], mutants: Sequence[Mutant], jobs: int) -> list[Verdict]:
    """Return the verdicts once no mutant is killed by a test that also fails without a mistake."""
    by_id = {mutant.id: mutant for mutant in mutants}
    passing: set[str] = set()
    for _ in range(MAX_ROUNDS):
        killers = {verdict.killed_by for verdict in verdicts if verdict.killed_by} - passing
        runner.left_out |= (failing := runner.failing(killers))
        passing |= killers - failing
        doubtful = [by_id[verdict.id] for verdict in verdicts if verdict.killed_by in failing]
        if not doubtful:
            return verdicts
        print(f"{len(failing)} tests fail without a mistake, too; {len(doubtful)} mutants are run again:")
        kept = [verdict for verdict in verdicts if verdict.killed_by not in failing]
        verdicts = kept + show(run_all(runner, doubtful, jobs), len(doubtful))
    for verdict in verdicts:
        if verdict.killed_by and verdict.killed_by not in passing:
            verdict.status, verdict.detail = "broken", "the tests that fail on it may fail without it, too"
    return verdicts


def show(verdicts: Iterable[Verdict], total: int) -> list[Verdict]:
    """Print a line for each verdict and, on a terminal, the progress below them."""
    shown: list[Verdict] = []
    for verdict in verdicts:
        shown.append(verdict)
        print(f"[{len(shown):{len(str(total))}}/{total}] {verdict.line()}", flush=True)
        for line in verdict.tail:
            print(f"    {line}", flush=True)
        if sys.stderr.isatty():
            progress = f"{len(shown)} of {total} run, {num_killed(shown)} killed"
            print(progress, end="\r", file=sys.stderr, flush=True)
    return shown


def num_killed(verdicts: Iterable[Verdict]) -> int:
    return sum(verdict.status == "killed" for verdict in verdicts)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tests",
        type=Path,
        default=HERE.parent,
        help="the tests folder that is run, with the sources and settings of its checkout; default: this one",
    )
    parser.add_argument("--only", nargs="+", metavar="ID", default=[], help="run these mutants alone")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time; default: 2")
    parser.add_argument(
        "--limit",
        type=float,
        default=LIMIT_S,
        metavar="S",
        help=f"seconds for a mutant; default: {LIMIT_S:g}",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a report there")
    return parser.parse_args()


def main() -> int:
    args = options()
    mutants = read_mutants()
    if unknown := set(args.only) - {mutant.id for mutant in mutants}:
        print(f"unknown mutants: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    chosen = [mutant for mutant in mutants if not args.only or mutant.id in args.only]
    started = time.monotonic()
    runner = Runner(args.tests.resolve(), args.limit)
    verdicts = show(run_all(runner, chosen, args.jobs), len(chosen))
    verdicts = confirmed(runner, verdicts, chosen, args.jobs)
    killed, seconds = num_killed(verdicts), round(time.monotonic() - started, 1)
    if args.json is not None:
        report = {
            "killed": killed,
            "total": len(chosen),
            "seconds": seconds,
            "left_out": sorted(runner.left_out),
            "mutants": [asdict(verdict) for verdict in verdicts],
        }
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"{seconds:.0f} s\n{killed} of {len(chosen)} mutants killed")
    return int(killed < len(chosen))


if __name__ == "__main__":
    sys.exit(main())

"""Tests that the commands and scripts of docs/quickstart.md and README.md run as they are written."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from serve_process import ServeProcess
from tiny_text import TextModel

ROOT = Path(__file__).parents[2]
PAGES = ("docs/quickstart.md", "README.md")
_LOGGED = re.compile(r"INFO [-\d]+ [:\d]+ \[(\w+\.py):\.\.\.\] (\w+ \w+ \w+)")
"""File and first words of a log line in a page. The pages leave out line numbers, which change often."""
END = "---- end of the script ----"
_FENCE = re.compile(r"^```(console|python)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(kind: str, words: str) -> list[tuple[str, str]]:
    """Return (page, code) of the blocks of this language that contain these words."""
    results = [
        (page, code)
        for page in PAGES
        for language, code in _FENCE.findall((ROOT / page).read_text(encoding="utf-8"))
        if language == kind and words in code
    ]
    assert results, words
    return results


@pytest.mark.parametrize("page", ["README.md", "docs/tools.md"])
def test_log_lines_in_docs_match_the_source(page: str) -> None:
    lines = _LOGGED.findall((ROOT / page).read_text(encoding="utf-8"))
    assert len(lines) >= 2
    for name, words in lines:
        sources = [path.read_text(encoding="utf-8") for path in ROOT.glob(f"src/quire/**/{name}")]
        assert any(words in source for source in sources), (name, words)


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
@pytest.mark.parametrize(("page", "code"), blocks("console", "$ curl"))
def test_curl_commands_are_answered(page: str, code: str, server: ServeProcess) -> None:
    typed = code.replace("\\\n", " ").replace("localhost:8000", server.url.removeprefix("http://"))
    for line in typed.splitlines():
        if not line.startswith("$ "):
            continue
        done = subprocess.run(["sh", "-c", line[2:]], capture_output=True, text=True, timeout=240)
        assert done.returncode == 0 and done.stdout, done.stderr
        if '"stream": true' in line:
            assert done.stdout.startswith("data: {") and done.stdout.rstrip().endswith("data: [DONE]")
        elif "/v1/" in line:
            assert json.loads(done.stdout)["choices"][0]["message"]["content"] is not None
        elif "/health" in line:
            assert done.stdout == "200\n"


def scripts() -> dict[str, list[str]]:
    """Return the scripts by the library that they import first."""
    results: dict[str, list[str]] = {}
    for _, code in blocks("python", "import"):
        results.setdefault(code.split()[1], []).append(code)
    return results


@pytest.mark.parametrize("library", scripts())
def test_scripts_run(library: str, server: ServeProcess, tiny: TextModel) -> None:
    """The tiny model replaces the models that are named. Scripts that import the same library run one after
    the other in one process."""
    program = ""
    for code in scripts()[library]:
        code = code.replace("http://localhost:8000", server.url).replace("path/to/Qwen3-0.6B", str(tiny.path))
        code = code.replace("LLM()", f"LLM({str(tiny.path)!r})")
        program += f"exec({code!r}, {{'__name__': '__main__'}})\nprint({END!r})\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    printed = done.stdout.split(END)[:-1]
    assert done.returncode == 0 and len(printed) == len(scripts()[library]), done.stderr
    assert all(text.strip() for text in printed), done.stdout

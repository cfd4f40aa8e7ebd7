"""Models in object stores: what is read, the local cache, interrupted downloads, and refusals."""

import hashlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.spec import AbstractFileSystem

from quire.checkpoint import object_store
from quire.checkpoint.hub import find_model, locate
from quire.checkpoint.object_store import StoreFolder
from quire.cli import main
from quire.config.env import Env
from quire.errors import ConfigError
from quire.plan.model_sizes import subject

CHUNK_BYTES = 10
WEIGHTS = bytes(range(95))
MODEL = {
    "config.json": b"{}",
    "tokenizer.json": b"tokens",
    "chat_template.jinja": b"{{ x }}",
    "1_Pooling/config.json": b"[]",
    "empty.json": b"",
    "model-1.safetensors": WEIGHTS,
    "model-2.safetensors": b"second",
}
UNUSED = {"README.md": b"text", "pytorch_model.bin": b"old", "original/params.json": b"{}", "code.py": b"1"}


class DictStore(AbstractFileSystem):
    """An object store in a dictionary of this process, which records each ranged read."""

    protocol = "dict"
    cachable = False
    objects: ClassVar[dict[str, bytes]] = {}
    reads: ClassVar[list[str]] = []
    on_read: ClassVar[list[Callable[[], None]]] = []
    """Functions to call at each read."""

    def find(self, path: str, detail: bool = False, **more: Any) -> Any:
        if not any(name.startswith("bucket/") for name in (path, f"{path}/")):
            raise FileNotFoundError("The specified bucket does not exist")
        names = [name for name in self.objects if name == path or name.startswith(f"{path}/")]
        return {name: self.info(name) for name in names}

    def info(self, path: str, **more: Any) -> dict[str, Any]:
        if path not in self.objects:
            raise FileNotFoundError(path)
        data = self.objects[path]
        return {"name": path, "size": len(data), "type": "file", "ETag": hashlib.md5(data).hexdigest()}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **more: Any) -> bytes:
        for function in self.on_read:
            function()
        self.reads.append(f"{path.removeprefix('bucket/m/')}:{start}")
        return self.objects[path][start:end]


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[DictStore]]:
    """Yield a store with a model at dict://bucket/m, read in small chunks by one thread."""
    fsspec.register_implementation("dict", DictStore, clobber=True)
    monkeypatch.setattr(DictStore, "objects", {f"bucket/m/{name}": MODEL[name] for name in MODEL})
    monkeypatch.setattr(DictStore, "reads", [])
    monkeypatch.setattr(DictStore, "on_read", [])
    monkeypatch.setattr(object_store, "CHUNK_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(object_store, "NUM_READERS", 1)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    yield DictStore


def fetch(tmp_path: Path, url: str = "dict://bucket/m", **more: Any) -> Path:
    return locate(url, cache_root=tmp_path, progress=False, **more)


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def cached(tmp_path: Path, pattern: str) -> list[str]:
    return sorted(path.name for path in tmp_path.glob(f"stores/*/blobs/{pattern}"))


def test_required_files_are_read_once(store: type[DictStore], tmp_path: Path) -> None:
    store.objects |= {f"bucket/m/{name}": data for name, data in UNUSED.items()}
    assert contents(fetch(tmp_path)) == MODEL
    num_chunks = sum(-(-len(data) // CHUNK_BYTES) for data in MODEL.values())
    assert len(store.reads) == len(set(store.reads)) == num_chunks
    store.reads.clear()
    assert contents(fetch(tmp_path, "dict://bucket/m/")) == MODEL and store.reads == []
    assert not cached(tmp_path, "*.*"), "nothing unfinished is left"


def test_download_command_prints_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_CACHE_ROOT", str(tmp_path))
    assert main(["download", "dict://bucket/m"]) == 0
    assert contents(Path(capsys.readouterr().out.strip())) == MODEL
    assert main(["download", "dict://bucket/none"]) == 1
    assert "quire download: error: 'dict://bucket/none' holds no files" in capsys.readouterr().err


def test_python_files_are_read_only_with_code(store: type[DictStore], tmp_path: Path) -> None:
    store.objects["bucket/m/code.py"] = b"1"
    assert "code.py" not in contents(fetch(tmp_path))
    assert "code.py" in contents(fetch(tmp_path, with_code=True))


def test_parallel_reads_give_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "NUM_READERS", 8)
    assert contents(fetch(tmp_path)) == MODEL


def test_changed_object_is_read_again(store: type[DictStore], tmp_path: Path) -> None:
    """A server that has started with the old files keeps them."""
    before = fetch(tmp_path)
    store.reads.clear()
    store.objects["bucket/m/model-2.safetensors"] = b"SECOND"  # the same size
    after = fetch(tmp_path)
    assert store.reads == ["model-2.safetensors:0"]
    assert contents(after) == MODEL | {"model-2.safetensors": b"SECOND"} and contents(before) == MODEL


def test_config_is_checked_before_weights_are_read(store: type[DictStore], tmp_path: Path) -> None:
    files = find_model("dict://bucket/m", cache_root=tmp_path, progress=False)
    assert (files.path / "config.json").read_bytes() == b"{}"
    assert store.reads and not any("safetensors" in read for read in store.reads)
    assert files.fetch_weights() and contents(files.path) == MODEL


def test_plan_reads_no_weights(store: type[DictStore], tmp_path: Path) -> None:
    store.objects["bucket/m/config.json"] = (
        b'{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "vocab_size": 99,'
        b' "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "rms_norm_eps": 1e-5}'
    )
    checkpoint, note = subject("dict://bucket/m", Env.read({"QUIRE_CACHE_ROOT": str(tmp_path)}))
    assert checkpoint.facts.vocab == 99 and note == ""
    assert not any("safetensors" in read for read in store.reads)
    with pytest.raises(ConfigError, match="holds no files"):  # no guess by the size in the name
        subject("dict://bucket/llama-8b", Env.read({"QUIRE_CACHE_ROOT": str(tmp_path)}))


def _in_process(function: Callable[[], Any]) -> multiprocessing.Process:
    process = multiprocessing.get_context("fork").Process(target=function)  # type: ignore[attr-defined]
    process.start()
    return process  # type: ignore[no-any-return]


def test_killed_download_resumes(store: type[DictStore], tmp_path: Path) -> None:
    """The files of a killed download are not taken for whole ones; its finished chunks are not read again."""
    store.objects = {name: data for name, data in store.objects.items() if "model-1" in name}

    def kill_at_fourth_chunk() -> None:
        if len(store.reads) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    store.on_read.append(kill_at_fourth_chunk)
    child = _in_process(lambda: StoreFolder("dict://bucket/m", tmp_path).download(["model-1.safetensors"]))
    child.join(120)
    assert child.exitcode == -signal.SIGKILL
    store.on_read.clear()
    (chunks,) = tmp_path.glob("*/blobs/*.chunks")
    assert chunks.read_text() == "0 10\n10 20\n20 30\n"
    assert not list(tmp_path.glob("*/snapshots/*/*"))
    with chunks.open("a") as file:
        file.write("30 4")  # a line without its end
    folder = StoreFolder("dict://bucket/m", tmp_path).download(["model-1.safetensors"])
    assert contents(folder) == {"model-1.safetensors": WEIGHTS}
    assert store.reads == [f"model-1.safetensors:{start}" for start in range(30, 95, CHUNK_BYTES)]


def test_unfinished_download_of_a_changed_object_starts_anew(store: type[DictStore], tmp_path: Path) -> None:
    def fail() -> None:
        if len(store.reads) == 3:
            raise TimeoutError("too slow")

    store.on_read.append(fail)
    folder = StoreFolder("dict://bucket/m", tmp_path)
    with pytest.raises(ConfigError, match=r"TimeoutError: too slow.*HF_HUB_OFFLINE=1"):
        folder.download(["model-1.safetensors"])
    store.on_read.clear()
    store.reads.clear()
    store.objects["bucket/m/model-1.safetensors"] = new = bytes(reversed(WEIGHTS))
    again = StoreFolder("dict://bucket/m", tmp_path).download(["model-1.safetensors"])
    assert contents(again) == {"model-1.safetensors": new} and len(store.reads) == 10
    assert not list(tmp_path.glob("*/blobs/*.*")), "the unfinished download of the old object is removed"


def test_change_during_a_download_is_refused(store: type[DictStore], tmp_path: Path) -> None:
    def change() -> None:
        store.objects["bucket/m/model-1.safetensors"] = bytes(reversed(WEIGHTS))

    store.on_read.append(change)
    with pytest.raises(ConfigError, match=r"changed while it was downloaded \(model-1"):
        fetch(tmp_path)
    assert contents(fetch(tmp_path))["model-1.safetensors"] == bytes(reversed(WEIGHTS))


def test_processes_share_one_download(store: type[DictStore], tmp_path: Path) -> None:
    log = tmp_path / "reads"

    def record() -> None:
        with log.open("ab", buffering=0) as file:
            file.write(b"x")

    store.on_read.append(record)
    children = [_in_process(lambda: fetch(tmp_path)) for _ in range(3)]
    for child in children:
        child.join(120)
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert log.stat().st_size == sum(-(-len(data) // CHUNK_BYTES) for data in MODEL.values())


def test_offline_mode_uses_the_cache(
    store: type[DictStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fetch(tmp_path)
    store.objects["bucket/m/config.json"] = b"[]"
    fetch(tmp_path, load_format="dummy")  # the newer weights are not in the cache
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(object_store, "_open_url", lambda url: pytest.fail("the store is read"))
    assert fetch(tmp_path) == whole and contents(whole) == MODEL
    with pytest.raises(ConfigError, match=r"not in the local cache, and HF_HUB_OFFLINE is set"):
        fetch(tmp_path, "dict://bucket/other")


def test_offline_mode_refuses_a_model_without_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fetch(tmp_path, load_format="dummy")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert fetch(tmp_path, load_format="dummy") == folder
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        fetch(tmp_path)


PARTS = [f"big-0000{part}-of-00002.gguf" for part in (1, 2)]


@pytest.mark.parametrize(
    ("url", "more", "expected"),
    [
        ("dict://bucket/g/a.gguf", {}, ["a.gguf"]),
        ("dict://bucket/g", {"gguf_file": "a.gguf"}, ["a.gguf"]),
        ("dict://bucket/one", {}, ["a.gguf"]),
        (f"dict://bucket/g/{PARTS[1]}", {}, PARTS),
    ],
)
def test_gguf_files_are_read_with_all_parts(
    url: str,
    more: dict[str, str],
    expected: list[str],
    store: type[DictStore],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("g/a.gguf", "g/b.gguf", *(f"g/{part}" for part in PARTS), "one/a.gguf", "one/mmproj-a.gguf"):
        store.objects[f"bucket/{name}"] = name.encode()
    path = fetch(tmp_path, url, **more)
    assert path.name == expected[0]
    assert sorted(contents(path.parent)) == expected
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert fetch(tmp_path, url, **more) == path


@pytest.mark.parametrize(
    ("url", "more", "words"),
    [
        ("dict://nobucket/m", {}, "does not exist.*check the bucket and the path"),
        ("dict://bucket/none", {}, "holds no files: check the bucket and the path"),
        ("dict://bucket", {}, "neither a config.json nor a .gguf file; there are models in m"),
        ("dict://bucket/m/config.json", {}, "is one file: give the folder"),
        ("dict://bucket/m/no.gguf", {}, "no.gguf does not exist there"),
        ("dict://bucket/broken", {}, "x-00002-of-00002.gguf does not exist there"),
        ("dict://bucket/two", {}, "several .gguf files; name one of them: a.gguf, b.gguf"),
        ("dict://bucket/m", {"revision": "main"}, "revision='main' is for models of the hub"),
        ("nope://bucket/m", {}, "Protocol not known: nope; known: s3://, gs://"),
        ("https://example.com/m", {}, "not in an object store"),
    ],
)
def test_wrong_locations_are_refused(
    url: str, more: dict[str, str], words: str, store: type[DictStore], tmp_path: Path
) -> None:
    names = ("two/a.gguf", "two/b.gguf", "broken/x-00001-of-00002.gguf")
    store.objects |= {f"bucket/{name}": b"" for name in names}
    with pytest.raises(ConfigError, match=words):
        fetch(tmp_path, url, **more)
    assert not (tmp_path / "stores").exists()


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("s3://bucket/m", r"pip install 'quire\[s3\]'"),
        ("gs://bucket/m", r"pip install 'quire\[gs\]'"),
        ("az://bucket/m", "install the fsspec driver of its scheme"),
    ],
)
def test_missing_driver_names_the_package(
    url: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_driver(url: str, **more: Any) -> None:
        raise ImportError("Install the driver")

    monkeypatch.setattr("fsspec.core.url_to_fs", no_driver)
    with pytest.raises(ConfigError, match=f"Install the driver: {remedy}"):
        fetch(tmp_path, url)


def test_denied_access_names_the_rights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: DictStore, path: str, **more: Any) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(DictStore, "find", denied)
    with pytest.raises(ConfigError, match="Access Denied.*rights to list and to read"):
        fetch(tmp_path)


def test_keys_that_are_no_paths_are_left_out(store: type[DictStore], tmp_path: Path) -> None:
    """A key with `..` would be written outside of the cache; keys that end in a slash stand for folders."""
    odd = ("../../../config.json", "a//b.json", "sub/", "", "./x.json", "a\\b.json")
    store.objects |= {f"bucket/m/{name}": b"" for name in odd}
    assert contents(fetch(tmp_path / "cache")) == MODEL
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_full_disk_is_refused_before_the_download(
    store: type[DictStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(ConfigError, match="cannot store .*GB of the disk are free.*--download-dir"):
        fetch(tmp_path)
    assert store.reads == []


def test_download_dir_is_used(tmp_path: Path) -> None:
    folder = fetch(tmp_path / "cache", download_dir=str(tmp_path / "models"))
    assert folder.is_relative_to(tmp_path / "models") and not (tmp_path / "cache").exists()


def test_progress_in_a_log_is_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with object_store.download_bar(total=1000, desc="model") as bar:
        for _ in range(1000):
            bar.update(1)
    assert capsys.readouterr().err.count("model") == 2, "the first and the last"

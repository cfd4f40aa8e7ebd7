"""The settings and files that the contents of KV cache entries depend on, apart from the prompt."""

import hashlib
from pathlib import Path
from typing import Any

from quire.config.engine import EngineConfig
from quire.version import __version__ as VERSION

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
_WHOLE_BYTES = 16 << 20
"""Files of up to this many bytes are compared in full; of larger files, a sample of each MiB is compared."""
_STRIDE, _SAMPLE_BYTES = 1 << 20, 4 << 10


def cache_identity(config: EngineConfig) -> dict[str, Any]:
    """Return the settings that the contents and the layout of cache entries depend on. The contents of weight
    files are not included."""
    parallel = config.parallel
    return {
        "version": VERSION,
        "model": config.model.model,
        "dtype": config.model.dtype,
        "quantization": config.model.quantization,
        "max_model_len": config.model.max_model_len,
        "kv_cache_dtype": config.cache.kv_cache_dtype,
        "block_size": config.cache.block_size,
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "pp_layer_partition": parallel.pp_layer_partition,
        "load_format": config.load.load_format,
        "seed of random weights": config.model.seed if config.load.load_format == "dummy" else None,
        "architecture": config.checkpoint.facts,
        "quantized layers": config.quant,
        "device": config.machine.device,
        "draft model": None if config.draft is None else config.draft.facts,
    }


def transfer_layout(config: EngineConfig) -> dict[str, str]:
    """Return the settings that must be equal in two engines that exchange KV cache entries, as short texts by
    name.

    Paths of the model may differ. Weights are compared by the sizes of their files and samples of their
    contents."""
    draft = config.draft
    parts = cache_identity(config)
    parts.pop("model")
    parts["attention_backend"] = config.attention.attention_backend
    parts["mamba_block_size"] = config.cache.mamba_block_size
    parts["weights"] = _contents(config.checkpoint.path)
    parts["weights of the draft model"] = None if draft is None else _contents(draft.checkpoint.path)
    facts = config.checkpoint.facts
    texts = {name: _short(value) for name, value in parts.items()}
    texts["architecture"] = f"{facts.architecture} of {len(facts.layers)} layers, {texts['architecture']}"
    return texts


def layout_digest(layout: dict[str, str]) -> str:
    return hashlib.sha256(repr(sorted(layout.items())).encode()).hexdigest()


def _short(value: Any) -> str:
    """Return a value as a text for a message; a digest of the text if it has more than 40 characters."""
    text = str(value)
    return text if len(text) <= 40 else hashlib.sha256(text.encode()).hexdigest()[:16]


def weight_files(path: Path) -> list[Path]:
    """Return the weight files and the JSON files of a model, sorted; `path` is its directory or .gguf
    file."""
    if path.is_file():
        first = path.name.partition("-00001-of-")[0]
        files = [file for file in path.parent.glob("*.gguf") if file.name.startswith(first)]
        files = files if "-of-" in path.name else [path]
    else:
        files = [file for file in path.rglob("*") if file.suffix in (*_WEIGHTS, ".json")]
    return [file for file in sorted(files) if file.is_file()]


def _contents(path: Path) -> str:
    """Return a digest of the names, sizes and contents of the weight files at a path."""
    files = [file for file in weight_files(path) if file.suffix != ".json"]
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name if len(files) > 1 else ''}:{size};".encode())
        count = _SAMPLE_BYTES if size > _WHOLE_BYTES else _STRIDE
        with file.open("rb") as data:
            for start in range(0, size, _STRIDE):
                data.seek(start)
                digest.update(data.read(count))
    return digest.hexdigest()[:16]

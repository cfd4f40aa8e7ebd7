"""Tiny models with their transformers models, and a driver that runs ours over a paged cache."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packaging.version import Version
from paged_batch import BLOCK_SIZE, MAX_ROWS, on_rows
from paged_batch import make_batch as make_batch
from tiny_cache import built_once
from torch import Tensor
from zoo import SHARED, ZOO, Settings, architecture_of

from quire.attention.backend import AttentionBackend
from quire.attention.torch_sdpa import TorchSDPA
from quire.checkpoint.model import read_checkpoint
from quire.layers.attention import caching_layers
from quire.loader import load_model

DIFFERENT_BEFORE_5_23 = {
    "BambaForCausalLM",  # the gated norm of Mamba2 has no groups
    "GraniteMoeHybridForCausalLM",
    "Mamba2ForCausalLM",
    "Gemma3nForCausalLM",  # fails on token ids beyond the vocabulary of the embeddings per layer
}
"""Architectures with other results, or errors, in transformers before 5.23, where newer ones are missing."""


def check_transformers(architecture: str) -> Any:
    """Return transformers' class of an architecture. Skip the test if transformers is too old for it."""
    import transformers

    is_old = Version(transformers.__version__) < Version("5.23")
    if is_old and (architecture in DIFFERENT_BEFORE_5_23 or not hasattr(transformers, architecture)):
        pytest.skip(f"{architecture} needs transformers 5.23, not {transformers.__version__}")
    return getattr(transformers, architecture)


def make_tiny(family: str, tmp_path: Path, **overrides: Any) -> tuple[Path, Any]:
    """Return a folder with a seeded random float32 checkpoint of the zoo, and the transformers model of it.

    `family` is an architecture or its model_type. The folder and the model belong to the caller.
    """
    architecture = architecture_of(family)
    settings = SHARED | ZOO[architecture].settings | overrides
    path = tmp_path / family
    return path, built_once(
        (architecture, settings), path, lambda folder: _build(architecture, settings, folder)
    )


def _build(architecture: str, settings: Settings, path: Path) -> Any:
    """Write a checkpoint with these settings to `path` and return the transformers model."""
    model = _twin(architecture, settings)
    # Random values, since norms of ones and biases of zeros would hide a layer that ignores them.
    for tensor in model.state_dict().values():
        if tensor.is_floating_point() and (tensor.ndim == 1 or not tensor.any()):
            tensor.add_(torch.randn_like(tensor) * 0.2)
    model.save_pretrained(path)
    if ZOO[architecture].twin is not None:
        config = json.loads((path / "config.json").read_text()) | {"architectures": [architecture]}
        (path / "config.json").write_text(json.dumps(config))
    return model


def _twin(architecture: str, settings: Settings) -> Any:
    """Return the transformers model with these settings and seeded random weights."""
    torch.manual_seed(0)
    twin = ZOO[architecture].twin
    if twin is not None:
        return twin(settings).float().eval()
    model_class = check_transformers(architecture)
    return model_class(model_class.config_class(**settings)).float().eval()


def load_tiny(
    path: Path, *, max_model_len: int = 256, backend: AttentionBackend | None = None, **options: Any
) -> Any:
    """Load the checkpoint at `path` in float32 with a cache of 64 blocks full of NaN."""
    model = load_model(
        read_checkpoint(path),
        dtype=torch.float32,
        device=torch.device("cpu"),
        backend=backend or TorchSDPA(),
        max_model_len=max_model_len,
        show_progress=False,
        **options,
    )
    fill_with_nan(model)
    return model


def fill_with_nan(model: Any) -> None:
    """Give the model a new cache of 64 blocks full of NaN."""
    for layer in caching_layers(model.modules()):
        keeps = layer.cache_spec
        shape = (64 * BLOCK_SIZE * keeps.planes * keeps.elements,)
        if not keeps.is_paged:
            shape = (MAX_ROWS + 1, keeps.row_bytes(4) // 4)
        memory = torch.full(shape, torch.nan).view(torch.uint8)
        layer.bind_memory(memory, block_size=BLOCK_SIZE, cache_dtype=torch.float32, group=0)


@torch.inference_mode()
def run_paged(model: Any, prompts: list[list[int]], steps: list[list[int]]) -> list[Tensor]:
    """Return logits of every position of each prompt; `steps` gives the tokens per prompt and step."""
    order = np.random.default_rng(7).permutation(np.arange(1, 64)).tolist()
    tables = [[order.pop() for _ in range(-(-len(ids) // BLOCK_SIZE))] for ids in prompts]
    done = [0] * len(prompts)
    out: list[list[Tensor]] = [[] for _ in prompts]
    for step in steps:
        rows = [row for row, count in enumerate(step) if count]
        chunks = [(prompts[row][done[row] : done[row] + step[row]], done[row]) for row in rows]
        batch = on_rows(make_batch(chunks, [tables[row] for row in rows], BLOCK_SIZE), rows)
        for backend in {module.backend for module in model.modules() if hasattr(module, "backend")}:
            backend.plan(batch)
        logits = model.logits(model(batch))
        for row, piece in zip(rows, logits.split([step[row] for row in rows]), strict=True):
            out[row].append(piece)
            done[row] += step[row]
    assert done == [len(ids) for ids in prompts]
    return [torch.cat(pieces) for pieces in out]


def run_hf(hf_model: Any, ids: Sequence[int]) -> Tensor:
    """Return transformers' logits of every position."""
    return run_hf_batch(hf_model, [ids])[0]


@torch.inference_mode()
def run_hf_batch(hf_model: Any, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return transformers' logits of every position of each prompt. Padding on the right, in one pass for
    all prompts, does not change the logits before it."""
    padded = [torch.tensor(ids) for ids in prompts]
    logits = hf_model(torch.nn.utils.rnn.pad_sequence(padded, batch_first=True)).logits
    return [row[: len(ids)] for row, ids in zip(logits, prompts, strict=True)]


def random_prompts(*lengths: int, vocab: int = 128) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(3, vocab, length).tolist() for length in lengths]

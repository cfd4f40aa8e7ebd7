"""Code and malformed tensors in checkpoints (CVE-2025-24357, CVE-2025-62164, CVE-2026-22807): no code of a
checkpoint runs without --trust-remote-code, and its tensors are those that were checked."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire.errors import ConfigError
from quire.loader.lora_files import LoRAFiles
from quire.loader.pt import load_pickle, load_pickle_bytes
from quire.text.tokenizer import load_tokenizer


def sparse() -> torch.Tensor:
    """Return a tensor with an index far out of range, which torch.load accepts."""
    indices, values = torch.tensor([[1 << 40]]), torch.ones(1)
    with torch.sparse.check_sparse_tensor_invariants(False):
        return torch.sparse_coo_tensor(indices, values, (4,), check_invariants=False)


@pytest.mark.parametrize("tensor", [sparse(), torch.eye(3).to_sparse_csr(), torch.empty(3, device="meta")])
def test_tensors_that_are_not_strided_are_refused(tmp_path: Path, tensor: torch.Tensor) -> None:
    file = tmp_path / "pytorch_model.bin"
    torch.save({"good": torch.ones(2), "bad": tensor}, file)
    for load in (
        lambda: load_pickle(file),
        lambda: load_pickle_bytes(file.name, memoryview(file.read_bytes())),
    ):
        with pytest.raises(ConfigError, match=r"pytorch_model\.bin"):
            load()


def test_replaced_pickle_keeps_the_hashed_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter's hash is part of the prefix cache's keys: hash and tensors must come from the same read of
    the file."""
    file = tmp_path / "adapter_model.bin"
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 1}))
    torch.save({"weight": torch.zeros(4)}, file)
    other = io.BytesIO()
    torch.save({"weight": torch.ones(4)}, other)
    load = torch.load

    def replace_and_load(*args: Any, **options: Any) -> Any:
        file.write_bytes(other.getvalue())
        return load(*args, **options)

    monkeypatch.setattr(torch, "load", replace_and_load)
    with LoRAFiles(tmp_path) as files:
        contents = files.contents()
    assert contents.tensors["weight"].tolist() == [0.0] * 4


def test_truncated_pickle_is_refused() -> None:
    whole = io.BytesIO()
    torch.save({"weight": torch.zeros(4)}, whole)
    for size in (0, 1, 100, len(whole.getvalue()) // 2, len(whole.getvalue()) - 1):
        with pytest.raises(ConfigError, match=r"a\.bin cannot be read as plain weights"):
            load_pickle_bytes("a.bin", memoryview(whole.getvalue()[:size]))


@pytest.mark.parametrize("trusted", [False, True])
def test_tokenizer_code_runs_only_if_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trusted: bool
) -> None:
    """Unless trust_remote_code is explicitly False, transformers asks on the terminal whether to run the
    code."""
    ran = tmp_path / "ran"
    (tmp_path / "vocab.txt").write_text("[UNK]\n[CLS]\n[SEP]\n[PAD]\n[MASK]\na\n")
    (tmp_path / "own.py").write_text(
        "import pathlib\nfrom transformers import BertTokenizerFast\n\n"
        f"pathlib.Path({str(ran)!r}).touch()\n\n\nclass Own(BertTokenizerFast):\n    pass\n"
    )
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("the terminal was asked"))
    if trusted:
        load_tokenizer(tmp_path, "hf", trust_remote_code=True)
    else:
        with pytest.raises(ConfigError, match="cannot convert"):
            load_tokenizer(tmp_path, "hf")
    assert ran.exists() == trusted

"""Prompt embeddings in requests (CVE-2025-62164): torch.load of client data accepted sparse tensors with
indices out of range, which wrote out of bounds. Quire parses the file without torch, accepts only dense
tensors, checks their bounds, and accepts none without --enable-prompt-embeds."""

import base64
import io
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from ask import chat, complete, refused
from fake_engine import FakeEngine
from fake_inputs import engine_with_media, media
from saved import saved, sent

from quire.frontend.prompt_embeds import PromptEmbedsReader

HIDDEN = 4


class Trap:
    """Object with a pickle that makes a directory when it is loaded."""

    def __init__(self, directory: Path) -> None:
        self.directory = str(directory)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.directory,)


def engine_with_embeds() -> FakeEngine:
    engine = FakeEngine()
    engine.inputs.embeds = PromptEmbedsReader(HIDDEN, "float32")
    return engine


def sparse() -> torch.Tensor:
    """Return a tensor with an index far beyond its end."""
    return torch.sparse_coo_tensor(
        torch.tensor([[1 << 40], [0]]), torch.ones(1), (3, HIDDEN), check_invariants=False
    )


def beyond_its_storage() -> str:
    """Return a tensor of 300 numbers whose storage has only one."""
    source = io.BytesIO(saved(torch.zeros(1).expand(75, HIDDEN)))
    file = io.BytesIO()
    with zipfile.ZipFile(source) as read, zipfile.ZipFile(file, "w") as written:
        for name in read.namelist():
            data = read.read(name)
            if name.endswith("data.pkl"):
                assert data.count(b"K\x00K\x00\x86") == 1, "the strides of the tensor"
                data = data.replace(b"K\x00K\x00\x86", b"K\x04K\x01\x86")
            written.writestr(name, data)
    return base64.b64encode(file.getvalue()).decode()


def test_pickle_in_prompt_embeds_runs_no_code(tmp_path: Path) -> None:
    engine = engine_with_embeds()
    for value in (Trap(tmp_path / "ran"), [torch.ones(3, HIDDEN), Trap(tmp_path / "ran")]):
        error = refused(complete(engine, prompt=None, prompt_embeds=sent(value)))
        assert error["param"] == "prompt_embeds"
    assert not (tmp_path / "ran").exists() and not engine.seen


@pytest.mark.parametrize(
    ("embeds", "words"),
    [
        (sent(sparse()), "its pickle would call torch."),
        (beyond_its_storage(), "its storage has 1 elements"),
        (sent(torch.zeros(1).expand(1 << 38, HIDDEN)), "maximum context length"),
        (sent(torch.full((3, HIDDEN), float("nan"))), "not finite"),
    ],
    ids=["sparse", "beyond its storage", "endless", "not a number"],
)
def test_out_of_bounds_tensors_are_refused(embeds: str, words: str) -> None:
    engine = engine_with_embeds()
    assert words in refused(complete(engine, prompt=None, prompt_embeds=embeds))["message"]
    assert not engine.seen
    assert complete(engine, prompt=None, prompt_embeds=sent(torch.ones(3, HIDDEN))).status_code == 200


def test_prompt_embeds_are_off_by_default() -> None:
    error = refused(complete(prompt=None, prompt_embeds=sent(torch.ones(3, HIDDEN))))
    assert "--enable-prompt-embeds" in error["message"]


def test_image_embeds_are_parsed_in_the_same_way(tmp_path: Path) -> None:
    engine = engine_with_media(media(enable_mm_embeds=True))
    for value in (Trap(tmp_path / "ran"), sparse()):
        part = {"type": "image_embeds", "image_embeds": sent(value)}
        refused(chat(engine, messages=[{"role": "user", "content": [part]}]))
    assert not (tmp_path / "ran").exists() and not engine.seen

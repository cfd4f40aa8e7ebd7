"""False headers of GGUF and safetensors files: sizes, offsets and counts of a downloaded file that exceed it
and so address foreign memory. No advisory of vLLM has this class. Quire checks each number against the end
of the file before it uses it."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from oracle import make_tiny
from tiny import open_tiny
from tiny_adapter import write_adapter

from quire import LLM, SamplingParams
from quire.errors import ConfigError, RequestsFailed

HUGE = 1 << 60
Change = Callable[[dict[str, Any]], object]


def gguf(num_tensors: int, num_keys: int, rest: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + rest


def string(text: str, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text.encode()


def tensor(*dims: int, offset: int = 0) -> bytes:
    return string("w") + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, 0, offset) + bytes(64)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (gguf(HUGE, 0, b""), "claims 1152921504606846976 tensors"),
        (gguf(0, HUGE, b""), "claims 1152921504606846976 metadata keys"),
        (gguf(0, 1, string("a", HUGE) + bytes(64)), "the header ends early"),
        (gguf(0, 1, string("a") + struct.pack("<IIQ", 9, 8, HUGE)), "strings in a"),
        (
            gguf(0, 1, string("a") + struct.pack("<IQ", 9, 9) * 99),
            "the header ends early|nests arrays|claims",
        ),
        (gguf(1, 0, tensor(1 << 32, 1 << 32)), "runs past the end of the file"),
        (gguf(1, 0, tensor(4, offset=1 << 62)), "runs past the end of the file"),
        (gguf(1, 0, tensor(HUGE)), "runs past the end of the file"),
    ],
    ids=["tensors", "keys", "string", "strings", "depth", "dimensions", "offset", "size"],
)
def test_false_gguf_header_is_refused(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        open_tiny(path)


CHANGES: dict[str, Change] = {
    "end": lambda entry: entry.update(data_offsets=[entry["data_offsets"][0], HUGE]),
    "start": lambda entry: entry.update(data_offsets=[8, entry["data_offsets"][1]]),
    "shape": lambda entry: entry.update(shape=[2, HUGE]),
    "negative": lambda entry: entry.update(shape=[-side for side in entry["shape"]]),
}


def rewrite(file: Path, change: Change) -> None:
    """Change the entry of the last tensor in a safetensors file."""
    written = file.read_bytes()
    start = 8 + int.from_bytes(written[:8], "little")
    header = json.loads(written[8:start])
    change(max((entry for name, entry in header.items() if name != "__metadata__"), key=_end))
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + written[start:])


def _end(entry: dict[str, Any]) -> int:
    end: int = entry["data_offsets"][1]
    return end


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("headers"))[0]


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    return open_tiny(tiny, enable_lora=True, max_lora_rank=8, max_model_len=64)


@pytest.mark.parametrize("kind", CHANGES)
def test_false_safetensors_header_is_refused(kind: str, tmp_path: Path) -> None:
    path, _ = make_tiny("llama", tmp_path)
    rewrite(path / "model.safetensors", CHANGES[kind])
    with pytest.raises(ConfigError, match=r"model\.safetensors is not a whole safetensors file"):
        open_tiny(path)


@pytest.mark.parametrize("kind", CHANGES)
def test_false_adapter_header_is_refused(kind: str, tiny: Path, llm: LLM, tmp_path: Path) -> None:
    lora = write_adapter(tmp_path / kind, json.loads((tiny / "config.json").read_text()), 1)
    rewrite(tmp_path / kind / "adapter_model.safetensors", CHANGES[kind])
    params = SamplingParams(temperature=0, max_tokens=1)
    with pytest.raises(RequestsFailed, match="not a whole safetensors file"):
        llm.generate([[5, 6]], params, lora_request=lora, use_tqdm=False)
    (answer,) = llm.generate([[5, 6]], params, use_tqdm=False)
    assert len(answer.outputs[0].token_ids) == 1, "the engine answers the next request"

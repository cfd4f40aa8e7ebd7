"""Tests of the GGUF header reader: correct on valid files, and a clear error, quickly, on invalid ones."""

import random
import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import quantize

from quire.checkpoint.gguf import GGML_TYPES, GGUFFile, GGUFStrings
from quire.errors import ConfigError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_bool("some.flag", True)
    writer.add_int64("some.negative", -7)
    writer.add_token_list(["<s>", "Ġhé", "", "日本"])
    writer.add_token_types([3, 1, 1, 1])
    writer.add_token_scores([0.0, -1.5, -2.5, 1.0])
    rng = np.random.default_rng(0)
    writer.add_tensor("token_embd.weight", rng.standard_normal((4, 64)).astype(np.float32))
    packed = quantize(rng.standard_normal((3, 64)).astype(np.float32), GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.0.ffn_up.weight", packed, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def header(num_tensors: int = 0, num_keys: int = 0, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, num_tensors, num_keys)


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def test_metadata_values_keep_their_types(path: Path) -> None:
    metadata = GGUFFile(path).metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["llama.block_count"] == 2
    assert metadata["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    assert metadata["some.flag"] is True
    assert metadata["some.negative"] == -7
    assert metadata["tokenizer.ggml.tokens"] == ["<s>", "Ġhé", "", "日本"]
    assert metadata["tokenizer.ggml.token_type"].tolist() == [3, 1, 1, 1]
    assert metadata["tokenizer.ggml.scores"].tolist() == [0.0, -1.5, -2.5, 1.0]


def test_vocabulary_is_decoded_where_it_is_used(tmp_path: Path) -> None:
    """Catches a wrong place of a string in a long array, and a long array that is decoded at once."""
    path = tmp_path / "vocabulary.gguf"
    words = [f"{'é' * (number % 5)}{number}" for number in range(3000)]
    writer = GGUFWriter(path, "llama")
    writer.add_token_list(words)
    writer.add_bool("some.flag", True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = GGUFFile(path).metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, GGUFStrings) and metadata["some.flag"] is True
    assert len(tokens) == 3000 and list(tokens) == words and tokens[-1] == words[-1]


def test_tensor_offsets_equal_the_reference_reader(path: Path) -> None:
    """Catches a wrong alignment or dimension order."""
    file = GGUFFile(path)
    reference = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    assert file.tensors.keys() == reference.keys()
    for name, tensor in file.tensors.items():
        assert tensor.type == reference[name].tensor_type.name
        assert tensor.shape == tuple(int(n) for n in reversed(reference[name].shape))
        assert tensor.nbytes == reference[name].n_bytes
        assert bytes(file.raw(name)) == reference[name].data.tobytes()


def test_type_table_equals_the_gguf_package() -> None:
    known = {int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
    assert {number: GGML_TYPES[number] for number in known.keys() & GGML_TYPES.keys()} == {
        number: known[number] for number in known.keys() & GGML_TYPES.keys()
    }
    assert len(GGML_TYPES) > 25


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.gguf"):
        GGUFFile(tmp_path / "nowhere.gguf")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "bad magic"),
        (b"PK\x03\x04 a zip file", "bad magic"),
        (b"GGUF\x03\x00", "header ends early"),
        (header(version=1), "version is 1"),
        (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "big-endian"),
        (header(num_keys=2**62), "claims 4611686018427387904 metadata keys"),
        (header(num_tensors=2**62), "claims 4611686018427387904 tensors"),
        (header(num_keys=1) + struct.pack("<Q", 2**63) + b"x" * 20, "header ends early"),
        (header(num_keys=1) + string("k") + struct.pack("<I", 99) + b"x" * 20, "unknown value type 99"),
        (header(num_keys=1) + string("k") + struct.pack("<IIQ", 9, 8, 2**40), "strings in k"),
        (header(num_keys=1) + string("k") + struct.pack("<IIQ", 9, 4, 2**40), "header ends early"),
        (header(num_keys=1) + string("k") + struct.pack("<IIQQ", 9, 8, 1, 9) + b"x" * 8, "header ends early"),
        (header(num_keys=1) + string("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 40, "deep"),
    ],
)
def test_invalid_header_is_a_config_error(tmp_path: Path, content: bytes, message: str) -> None:
    """Catches a trusted length: a huge allocation, a struct.error, a MemoryError."""
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        GGUFFile(path)
    assert "bad.gguf" in str(caught.value)


def test_truncated_tensor_is_named_with_both_sizes(path: Path) -> None:
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: size - 40])
    with pytest.raises(ConfigError, match=rf"blk\.0\.ffn_up\.weight .*expected \d+ bytes, .*has {size - 40}"):
        GGUFFile(path)


def tensor_entry(*dims: int, kind: int = 0, offset: int = 0) -> bytes:
    return string("w") + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (tensor_entry(2**60, 2**60), "tensor w runs past the end"),
        (tensor_entry(4, offset=2**63), "tensor w runs past the end"),
        (tensor_entry(4, kind=77), "ggml type 77"),
        (tensor_entry(33, kind=2), "not a multiple of 32"),
        (string("w") + struct.pack("<I", 10**9), "1000000000 dimensions"),
    ],
)
def test_invalid_tensor_entry_is_a_config_error(tmp_path: Path, entry: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(header(num_tensors=1) + entry + b"\0" * 128)
    with pytest.raises(ConfigError, match=message):
        GGUFFile(path)


@pytest.mark.parametrize("alignment", [struct.pack("<II", 4, 0), struct.pack("<I", 8) + string("no")])
def test_invalid_alignment_is_a_config_error(tmp_path: Path, alignment: bytes) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(header(num_keys=1) + string("general.alignment") + alignment)
    with pytest.raises(ConfigError, match=r"general\.alignment"):
        GGUFFile(path)


def test_damaged_files_are_read_or_raise_config_error(path: Path) -> None:
    """Catches an exception of another kind (IndexError, UnicodeDecodeError), which would show a
    traceback."""
    whole = path.read_bytes()
    rng = random.Random(0)
    damaged = [whole[:end] for end in range(0, len(whole), 7)]
    for _ in range(300):
        copy = bytearray(whole)
        copy[rng.randrange(len(copy))] = rng.randrange(256)
        damaged.append(bytes(copy))
    for content in damaged:
        path.write_bytes(content)
        try:
            file = GGUFFile(path)
        except ConfigError:
            continue
        assert all(len(file.raw(name)) == tensor.nbytes for name, tensor in file.tensors.items())

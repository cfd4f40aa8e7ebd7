"""Tests of adapters on disk: matching ones are read, and others are rejected with the reason."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.attention.torch_sdpa import TorchSDPA
from quire.errors import RequestError
from quire.layers.embedding import Head, TokenEmbedding
from quire.layers.linear import QKVLinear
from quire.layers.lora import AdapterSlots
from quire.layers.scope import Scope
from quire.loader.lora import LoRAReader, single_threads

HIDDEN, VOCAB = 12, 40
LAYER = "base_model.model.model.layers.0.self_attn"
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 4,
    "target_modules": ["q_proj"],
    "bias": "none",
}


def reader(*, layers: range | None = None, **options: Any) -> LoRAReader:
    """Return a reader for a model of an embedding, a head and an attention layer without output
    projection.
    """
    device = torch.device("cpu")
    slots = AdapterSlots(max_slots=1, max_rank=8, dtype=torch.float32, device=device, **options)
    scope = Scope(torch.float32, device, TorchSDPA(), 8, adapters=slots)
    TokenEmbedding(VOCAB, HIDDEN, scope / "model" / "embed_tokens")
    QKVLinear(HIDDEN, 4, 2, 8, scope / "model" / "layers" / 0 / "self_attn" / "qkv_proj")
    Head(VOCAB, HIDDEN, scope / "lm_head")
    slots.refused["model.layers.0.self_attn.kv_b_proj"] = "takes none"
    return LoRAReader(slots, layers)


def tensors(**changes: Tensor | None) -> dict[str, Tensor]:
    """Return an adapter of the queries, with changes by tensor name suffix."""
    weights = {
        f"{LAYER}.q_proj.lora_A.weight": torch.ones(2, HIDDEN),
        f"{LAYER}.q_proj.lora_B.weight": torch.ones(32, 2),
    }
    for name, tensor in changes.items():
        full = f"{LAYER}.q_proj.lora_{name}.weight"
        weights = {key: value for key, value in weights.items() if key != full}
        if tensor is not None:
            weights[full] = tensor
    return weights


def save(path: Path, weights: dict[str, Tensor], **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    save_file(weights, path / "adapter_model.safetensors")
    return path


def test_parts_are_padded_and_scaled(tmp_path: Path) -> None:
    """Check the places of ranks, parts and scales, and the scale of each layer's rank."""
    weights = tensors() | {
        f"{LAYER}.v_proj.lora_A.default.weight": torch.full((3, HIDDEN), 2.0),
        f"{LAYER}.v_proj.lora_B.default.weight": torch.full((16, 3), 3.0),
    }
    path = save(tmp_path, weights, rank_pattern={"v_proj": 3}, alpha_pattern={".*q_proj": 6})
    adapter = reader().read("one", path)
    assert (adapter.facts.rank, len(adapter.facts.digest)) == (3, 32)
    ((name, (a, b)),) = adapter.factors.items()
    assert name == "model.layers.0.self_attn.q_proj" and adapter.facts.num_bytes == a.nbytes + b.nbytes
    expected = torch.zeros(3, 3, HIDDEN)
    expected[0, :2], expected[2] = 1, 2
    assert torch.equal(a, expected)
    outputs = torch.zeros(64, 3)
    outputs[:32, :2], outputs[48:] = 3, 3 * 4 / 3
    assert torch.equal(b, outputs)


def test_rslora_divides_by_the_root(tmp_path: Path) -> None:
    adapter = reader().read("one", save(tmp_path, tensors(), use_rslora=True))
    (factors,) = adapter.factors.values()
    torch.testing.assert_close(factors.b[:32], torch.full((32, 2), 4 / 2**0.5))


def test_other_names_of_the_same_layer(tmp_path: Path) -> None:
    """Check a multimodal model, a base model, and a torch file."""
    for prefix in ("base_model.model.language_model.model.", "base_model.model.model.language_model.", ""):
        names = {
            f"{prefix}layers.0.self_attn.q_proj.lora_{key[-8]}.weight": value
            for key, value in tensors().items()
        }
        assert len(reader().read("one", save(tmp_path, names)).factors) == 1
    torch.save(tensors(), tmp_path / "adapter_model.bin")
    (tmp_path / "adapter_model.safetensors").unlink()
    assert len(reader().read("one", tmp_path).factors) == 1


def test_digest_follows_the_contents(tmp_path: Path) -> None:
    """Check that another adapter at the same path does not hit the prefix cache of the first."""
    digests = [
        reader().read("one", save(tmp_path, weights, **config)).facts.digest
        for weights, config in (
            (tensors(), {}),
            (tensors(A=torch.zeros(2, HIDDEN)), {}),
            (tensors(), {"lora_alpha": 8}),
        )
    ]
    assert len(set(digests)) == 3
    assert reader().read("two", save(tmp_path / "elsewhere", tensors())).facts.digest == digests[0]


def test_fully_trained_modules(tmp_path: Path) -> None:
    """Check that norms and scores are not silently ignored, and that grown or oversized embeddings are
    handled.
    """
    head, norm = "base_model.model.lm_head.weight", "base_model.model.model.norm.weight"
    config = {"modules_to_save": ["lm_head"]}
    path = save(tmp_path, tensors() | {head: torch.full((VOCAB, HIDDEN), 3.0)}, **config)
    adapter = reader(whole_modules=["lm_head"]).read("one", path)
    assert torch.equal(adapter.tables["lm_head"], torch.full((VOCAB, HIDDEN), 3.0))
    assert adapter.facts.num_bytes > 4 * VOCAB * HIDDEN
    for full in ([], ["embed_tokens"]):
        with pytest.raises(RequestError, match="modules_to_save 'lm_head' is not supported"):
            reader(whole_modules=full).read("one", path)
    path = save(tmp_path, tensors() | {norm: torch.ones(HIDDEN)}, modules_to_save=["norm"])
    with pytest.raises(RequestError, match="'norm' is not supported: adapters may bring lm_head whole"):
        reader(whole_modules=["lm_head"]).read("one", path)
    path = save(tmp_path, tensors() | {head: torch.ones(VOCAB + 1, HIDDEN)}, **config)
    with pytest.raises(
        RequestError, match=r"lm_head\.weight has the shape \(41, 12\), .* cannot bring tokens"
    ):
        reader(whole_modules=["lm_head"]).read("one", path)
    device, full = torch.device("cpu"), ["lm_head"]
    slots = AdapterSlots(max_slots=1, max_rank=8, dtype=torch.float32, device=device, whole_modules=full)
    stage = LoRAReader(slots, range(2, 4))
    assert not stage.read("one", path).tables, "another stage has the head"
    path = save(tmp_path, tensors() | {norm: torch.ones(HIDDEN)}, modules_to_save=["norm"])
    with pytest.raises(RequestError, match="'norm' is not supported"):
        stage.read("one", path)


def test_unchanged_copies_of_embeddings_are_ignored(tmp_path: Path) -> None:
    """Check the embedding that PEFT saves with an adapter; one that has grown is rejected."""
    ends = {
        "base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(2, VOCAB),
        "base_model.model.model.embed_tokens.lora_embedding_B": torch.ones(HIDDEN, 2),
        "base_model.model.model.embed_tokens.base_layer.weight": torch.ones(VOCAB, HIDDEN),
        "base_model.model.lm_head.weight": torch.ones(VOCAB, HIDDEN),
    }
    (factors,) = reader().read("one", save(tmp_path, ends)).factors.values()
    assert factors.a.shape == (VOCAB, 2) and factors.b.shape == (HIDDEN, 2)
    ends["base_model.model.lm_head.weight"] = torch.ones(VOCAB + 3, HIDDEN)
    with pytest.raises(RequestError, match=r"lm_head\.weight .*cannot bring tokens here, --lora-extra-vo"):
        reader().read("one", save(tmp_path, ends))


def test_rank_above_max_lora_rank_is_rejected(tmp_path: Path) -> None:
    path = save(tmp_path, tensors(A=torch.ones(16, HIDDEN), B=torch.ones(32, 16)), r=16)
    with pytest.raises(RequestError) as refused:
        reader().read("one", path)
    assert str(refused.value) == "LoRA rank 16 is greater than max_lora_rank 8."


WRONG: dict[str, tuple[dict[str, Tensor], str]] = {
    "shape of A": (
        tensors(A=torch.ones(2, 13)),
        r"q_proj\.lora_A\.weight has the shape \(2, 13\), expected \(2, 12\)",
    ),
    "shape of B": (
        tensors(B=torch.ones(31, 2)),
        r"q_proj\.lora_B\.weight has the shape \(31, 2\), expected \(32, 2\)",
    ),
    "other rank": (tensors(A=torch.ones(3, HIDDEN)), r"q_proj\.lora_A\.weight has the shape \(3, 12\)"),
    "not a matrix": (
        tensors(B=torch.ones(32)),
        r"q_proj\.lora_B\.weight is torch\.float32 of the shape \(32,\)",
    ),
    "whole numbers": (tensors(A=torch.ones(2, HIDDEN, dtype=torch.int8)), r"lora_A\.weight is torch\.int8"),
    "one half": (tensors(B=None), r"q_proj\.lora_A\.weight has no counterpart"),
    "no such layer": (
        {name.replace("q_proj", "z_proj"): item for name, item in tensors().items()},
        r"z_proj\.lora_A",
    ),
    "one that takes none": (
        {name.replace("q_proj", "kv_b_proj"): item for name, item in tensors().items()},
        r"kv_b_proj\.lora_A\.weight: takes none",
    ),
    "no tensor of LoRA": (
        tensors() | {f"{LAYER}.q_norm.weight": torch.ones(8)},
        r"q_norm\.weight is not a LoRA tensor",
    ),
    "nothing": ({}, "has no LoRA tensors"),
}


@pytest.mark.parametrize("what", WRONG)
def test_faulty_tensor_is_named(what: str, tmp_path: Path) -> None:
    weights, message = WRONG[what]
    with pytest.raises(RequestError, match=f"adapter 'one': .*{message}"):
        reader().read("one", save(tmp_path, weights))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, r"use_dora \(DoRA\) is not supported"),
        (
            {"modules_to_save": ["lm_head"]},
            "modules_to_save 'lm_head' is not supported: --lora-whole-modules",
        ),
        ({"modules_to_save": ["score"]}, "modules_to_save 'score' is not supported"),
        ({"modules_to_save": "lm_head"}, "modules_to_save is 'lm_head', expected a list of names"),
        ({"bias": "all"}, "bias 'all' is not supported"),
        ({"lora_bias": True}, "lora_bias .* is not supported"),
        ({"peft_type": "ADALORA"}, "peft_type ADALORA is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4' is not supported"),
        ({"r": 0}, "r is 0, expected a positive integer"),
        ({"lora_alpha": "x"}, "lora_alpha is 'x'"),
        ({"rank_pattern": {"q": "x"}}, "rank_pattern is"),
        ({"alpha_pattern": {"(": 2}}, "alpha_pattern has an invalid pattern"),
        ({"rank_pattern": {r"((\w+\.?)+)+!": 2}}, "rank_pattern has a pattern that is too complex"),
        ({"rank_pattern": {r".*.*.*.*!": 2}}, "rank_pattern has a pattern that is too complex"),
    ],
)
def test_unsupported_features_are_named(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=message):
        reader().read("one", save(tmp_path, tensors(), **config))


def test_missing_and_truncated_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="No adapter found for"):
        reader().read("one", tmp_path / "nowhere")
    path = save(tmp_path, tensors())
    full = (path / "adapter_model.safetensors").read_bytes()
    (path / "adapter_model.safetensors").write_bytes(full[:-9])
    with pytest.raises(RequestError, match="not a whole safetensors file"):
        reader().read("one", path)
    (path / "adapter_model.safetensors").unlink()
    with pytest.raises(RequestError, match="has neither"):
        reader().read("one", path)
    (path / "adapter_config.json").write_text("[")
    with pytest.raises(RequestError, match="is not valid JSON"):
        reader().read("one", path)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda entry: entry.update(data_offsets=[8, entry["data_offsets"][1]]), "bytes of .*lora_A"),
        (lambda entry: entry.update(shape=[-2, -HIDDEN]), "bytes of .*lora_A"),
        (lambda entry: entry.update(shape=[2, 1 << 62]), "bytes of .*lora_A"),
        (lambda entry: entry.update(dtype="F7"), "is 'F7'; known: F64"),
        (lambda entry: entry.update(dtype=7), "Expected `str`, got `int`"),
    ],
)
def test_inconsistent_headers_are_rejected(change: Any, why: str, tmp_path: Path) -> None:
    """Check that no data of another tensor or other memory is read."""
    file = save(tmp_path, tensors()) / "adapter_model.safetensors"
    header, data = _parts(file)
    change(header[f"{LAYER}.q_proj.lora_A.weight"])
    _write(file, json.dumps(header).encode(), data)
    with pytest.raises(RequestError, match=why):
        reader().read("one", tmp_path)


def test_unused_bytes_and_headers_of_any_length(tmp_path: Path) -> None:
    path = save(tmp_path, tensors())
    file = path / "adapter_model.safetensors"
    expected, (header, data) = reader().read("one", path), _parts(file)
    for size in range(8):
        _write(file, json.dumps(header).encode() + b" " * size, data)
        adapter = reader().read("one", path)
        assert all(map(torch.equal, *(next(iter(item.factors.values())) for item in (adapter, expected))))
    _write(file, json.dumps(header).encode(), data + b"!")
    with pytest.raises(RequestError, match="its header lists"):
        reader().read("one", path)
    for written in (b"", b"{}", (1 << 63).to_bytes(8, "little") + b"{}"):
        file.write_bytes(written)
        with pytest.raises(RequestError, match="not a whole safetensors file|has no LoRA tensors"):
            reader().read("one", path)


def _parts(file: Path) -> tuple[dict[str, Any], bytes]:
    written = file.read_bytes()
    start = 8 + int.from_bytes(written[:8], "little")
    return json.loads(written[8:start]), written[start:]


def _write(file: Path, header: bytes, data: bytes) -> None:
    file.write_bytes(len(header).to_bytes(8, "little") + header + data)


def test_digest_depends_on_each_byte_and_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that parts are neither ignored, counted twice nor interchangeable."""
    monkeypatch.setattr("quire.loader.lora_files._PART_BYTES", 32)
    path = save(tmp_path, tensors(A=torch.arange(2.0 * HIDDEN).view(2, HIDDEN)))
    file = path / "adapter_model.safetensors"
    full, digests = file.read_bytes(), {reader().read("one", path).facts.digest}
    data = len(full) - 4 * (2 * HIDDEN + 64)
    changed = [full[:at] + bytes([full[at] ^ 1]) + full[at + 1 :] for at in range(data, len(full), 13)]
    first = -(-data // 32) * 32
    changed += [full[:first] + full[first + 32 : first + 64] + full[first : first + 32] + full[first + 64 :]]
    for written in changed:
        file.write_bytes(written)
        digests.add(reader().read("one", path).facts.digest)
    assert len(digests) == 1 + len(changed)
    file.write_bytes(full)
    assert reader().read("one", path).facts.digest in digests
    assert reader().read("one", save(path, _read(file), lora_alpha=5)).facts.digest not in digests


def _read(file: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(file)


def test_copy_threads_do_not_limit_torch_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        pool = single_threads(4, "few")
        assert {*pool.map(lambda _: torch.get_num_threads(), range(32))} == {1}
        with ThreadPoolExecutor(1) as other:
            assert (torch.get_num_threads(), other.submit(torch.get_num_threads).result()) == (3, 3)
    finally:
        torch.set_num_threads(before)


def test_error_messages_are_serializable_and_short(tmp_path: Path) -> None:
    """Check lone surrogates, which cannot be encoded, and very long names."""
    weights = tensors() | {"x" * 100_000: torch.ones(1)}
    with pytest.raises(RequestError, match="xxx") as refused:
        reader().read("one", save(tmp_path / "long", weights))
    assert len(str(refused.value)) < 2000
    with pytest.raises(RequestError, match=r"peft_type \\ud800 is not supported") as refused:
        reader().read("one", save(tmp_path / "half", tensors(), peft_type="\ud800"))
    assert str(refused.value).encode()


def test_only_some_layers_take_adapters(tmp_path: Path) -> None:
    weights = tensors() | {name.replace("q_proj", "k_proj"): item[:16] for name, item in tensors().items()}
    path = save(tmp_path, weights)
    assert (reader().read("one", path).factors["model.layers.0.self_attn.q_proj"].b[32:48]).any()
    for only in (["q_proj"], ["qkv_proj"]):
        b = reader(only=only).read("one", path).factors["model.layers.0.self_attn.q_proj"].b
        assert b[:32].all() and bool(b[32:48].any()) == (only == ["qkv_proj"])
    assert not reader(only=["o_proj"]).read("one", path).factors


def test_warning_counts_layers_outside_of_the_target_modules_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Check that the warning does not count layers of another pipeline stage."""
    weights = tensors()
    for name in ("layers.0.self_attn.k_proj", "layers.7.self_attn.q_proj"):
        weights |= {key.replace("layers.0.self_attn.q_proj", name): item for key, item in tensors().items()}
    reader(only=["q_proj"], layers=range(2)).read("one", save(tmp_path, weights))
    assert "Ignored 1 layers" in caplog.text


def test_layers_of_other_ranks_are_skipped(tmp_path: Path) -> None:
    weights = tensors() | {name.replace("layers.0", "layers.7"): item for name, item in tensors().items()}
    path = save(tmp_path, weights)
    assert len(reader(layers=range(1)).read("one", path).factors) == 1
    with pytest.raises(RequestError, match=r"layers\.7"):
        reader().read("one", path)


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_oversized_files_are_not_read(file: str, tmp_path: Path) -> None:
    save(tmp_path, tensors())
    with (tmp_path / file).open("r+b") as opened:
        opened.truncate(1 << 42)
    with pytest.raises(RequestError, match=f"{file} has {1 << 42} bytes"):
        reader().read("one", tmp_path)


def test_symlink_created_after_the_check_is_not_followed(tmp_path: Path) -> None:
    """Check a file and a directory that lead outside when they are opened."""
    root = tmp_path / "root"
    root.mkdir()
    within = (str(root),)
    save(tmp_path / "outside", tensors())
    path = save(root / "one", tensors())
    assert reader().read("one", path, within).factors
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        file = path / name
        file.rename(path / "own")
        file.symlink_to(tmp_path / "outside" / name)
        with pytest.raises(RequestError, match=rf"adapter 'one': {name} is a link to a file outside"):
            reader().read("one", path, within)
        file.unlink()
        file.symlink_to(path / "own")
        assert reader().read("one", path, within).factors, "a link to a file inside"
        file.unlink()
        (path / "own").rename(file)
    path.rename(root / "two")
    path.symlink_to(tmp_path / "outside")
    with pytest.raises(RequestError, match="is a link to a file outside"):
        reader().read("one", path, within)
    assert reader().read("one", path).factors, "an operator's adapter"


def test_special_files_are_not_waited_for(tmp_path: Path) -> None:
    """Check a pipe without a writer."""
    os.mkfifo(tmp_path / "adapter_config.json")
    with pytest.raises(FileNotFoundError):
        reader().read("one", tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    (tmp_path / "adapter_config.json").unlink()
    save(tmp_path, tensors())
    (tmp_path / "adapter_model.safetensors").unlink()
    os.mkfifo(tmp_path / "adapter_model.safetensors")
    with pytest.raises(RequestError, match="has neither"):
        reader().read("one", tmp_path)
    assert len(os.listdir("/proc/self/fd")) <= before, "files that stay open"

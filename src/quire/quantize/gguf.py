"""Writes a GGUF file: from another GGUF file with its metadata, or from a directory of some architectures."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, LlamaFileType
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.gguf import SAMPLING_KEYS, GGUFFile
from quire.errors import ConfigError
from quire.layers.rope import KINDS
from quire.loader.gguf_names import gguf_name, row_order
from quire.quantize.stored import SourceModel
from quire.quantize.vocab import gguf_vocab
from quire.text.tokenizer import load_tokenizer

_TYPE = re.compile(r"[.-](I?Q\d\w*|B?F16|F32)$", re.I)
"""Pattern of the quantization type at the end of the name of a GGUF file, such as -Q4_0."""
GGUF_KINDS = {
    "gguf-q4_0": (GGMLQuantizationType.Q4_0, LlamaFileType.MOSTLY_Q4_0),
    "gguf-q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}
_ENDS = ("token_embd.weight", "output.weight")
"""Names of the embedding and the output head, which are stored in at least 8 bits, since every token uses
them."""
_EXACT = ("_norm.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", ".bias", "attn_sinks.weight")
_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Maps architectures in config.json to those of GGUF files, for models whose GGUF header can be written."""

Values = NDArray[Any]


class _Writer:
    """Writer of one GGUF file. `plan` declares each tensor, `begin` writes the header, and `add` writes the
    tensors in the same order."""

    def __init__(self, path: Path, architecture: str, kind: GGMLQuantizationType) -> None:
        self.writer = GGUFWriter(path, architecture)
        self.kind = kind
        self.types: dict[str, GGMLQuantizationType] = {}
        self.num_bytes = 0

    def plan(self, name: str, shape: tuple[int, ...]) -> None:
        kind = self._type(name, shape)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        num_bytes = int(np.prod(shape)) // block * block_bytes
        self.writer.add_tensor_info(name, shape, np.dtype(np.float32), num_bytes, raw_dtype=kind)
        self.types[name] = kind
        self.num_bytes += num_bytes

    def _type(self, name: str, shape: tuple[int, ...]) -> GGMLQuantizationType:
        kind = GGMLQuantizationType.Q8_0 if name in _ENDS else self.kind
        if len(shape) == 1 or name.endswith(_EXACT):
            return GGMLQuantizationType.F32
        return kind if shape[-1] % GGML_QUANT_SIZES[kind][0] == 0 else GGMLQuantizationType.F16

    def begin(self) -> None:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_ti_data_to_file()

    def add(self, name: str, values: Values) -> None:
        self.writer.write_tensor_data(quantize(np.ascontiguousarray(values, np.float32), self.types[name]))


def write_gguf(stored: SourceModel, to: str, folder: Path, progress: Callable[[], object]) -> int:
    """Write one GGUF file of the quantization type `to` into `folder`, calling `progress` after each tensor;
    return the number of bytes of its tensors."""
    kind, file_type = GGUF_KINDS[to]
    source = stored.checkpoint.path
    name = _TYPE.sub("", source.stem) if stored.is_gguf else source.name
    path = folder / f"{name}-{kind.name}.gguf"
    if stored.is_gguf:
        metadata = GGUFFile(source).metadata
        out = _Writer(path, metadata["general.architecture"], kind)
        _copy_header(source, out.writer)
        tensors = _plan_file(GGUFFile(source), out)
    else:
        facts = _header_facts(stored)
        out = _Writer(path, _ARCHITECTURES[facts.architecture], kind)
        _write_header(stored, facts, out.writer)
        tensors = _plan_directory(stored, facts, out)
    for name, value in stored.checkpoint.generation.items():
        if name == "top_k":
            out.writer.add_int32(SAMPLING_KEYS[name], int(value))
        elif name in SAMPLING_KEYS:
            out.writer.add_float32(SAMPLING_KEYS[name], value)
    out.writer.add_file_type(file_type)
    out.writer.add_quantization_version(2)
    for name, values in tensors:
        out.add(name, values)
        progress()
    out.writer.close()
    return out.num_bytes


def _copy_header(source: Path, writer: GGUFWriter) -> None:
    replaced = (
        "general.architecture",
        "general.file_type",
        "general.quantization_version",
        "general.alignment",
        *SAMPLING_KEYS.values(),
    )
    for field in GGUFReader(source).fields.values():
        if field.name in replaced or field.name.startswith(("GGUF.", "split.")):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, inner)


def _plan_file(file: GGUFFile, out: _Writer) -> Iterator[tuple[str, Values]]:
    for name, tensor in file.tensors.items():
        out.plan(name, tensor.shape)
    out.begin()
    for name, tensor in file.tensors.items():
        rows = file.raw(name).reshape(*(tensor.shape[:-1] or tensor.shape), -1)
        yield name, dequantize(rows, GGMLQuantizationType[tensor.type]).reshape(tensor.shape)
        file.forget()


def _header_facts(stored: SourceModel) -> ArchFacts:
    """Return the facts that a GGUF header describes; raise if a header cannot describe the model."""
    facts, path = stored.checkpoint.facts, stored.checkpoint.path
    if facts.architecture not in _ARCHITECTURES:
        raise ConfigError(
            f"{path}: a GGUF header cannot be written for a {facts.architecture}; known: "
            f"{', '.join(_ARCHITECTURES)}; use --to fp8, int8 or int4"
        )
    rope_kinds = [kind for layer in facts.layers for kind in [layer.rope and layer.rope.kind]]
    if {*rope_kinds} - {"default", "linear", "llama3"} or any(layer.window for layer in facts.layers):
        feature = f"RoPE of the kind {rope_kinds[0]}" if rope_kinds[0] != "default" else "a sliding window"
        raise ConfigError(f"{path}: {feature} is not written to GGUF headers; use --to fp8, int8 or int4")
    is_llama = _ARCHITECTURES[facts.architecture] == "llama"
    return replace(facts, architecture="LlamaForCausalLM") if is_llama else facts


def _write_header(stored: SourceModel, facts: ArchFacts, writer: GGUFWriter) -> None:
    rope = facts.layers[0].rope
    assert rope is not None
    writer.add_name(stored.checkpoint.path.name)
    writer.add_vocab_size(facts.vocab)
    writer.add_context_length(rope.max_len)
    writer.add_embedding_length(facts.hidden)
    writer.add_block_count(len(facts.layers))
    writer.add_feed_forward_length(facts.intermediate)
    writer.add_head_count(facts.heads)
    writer.add_head_count_kv(facts.kv_heads)
    writer.add_key_length(facts.head_dim)
    writer.add_value_length(facts.head_dim)
    writer.add_layer_norm_rms_eps(facts.norm_eps)
    writer.add_rope_freq_base(rope.theta)
    writer.add_rope_dimension_count(rope.dim)
    if rope.kind == "linear":
        writer.add_string(f"{writer.arch}.rope.scaling.type", "linear")
        writer.add_rope_scaling_factor(rope.factor)
    tokenizer = load_tokenizer(stored.checkpoint.path, "hf")
    for key, value in gguf_vocab(tokenizer, facts.vocab, stored.checkpoint.eos_ids).items():
        kind = GGUFValueType.get_type(value)
        inner = GGUFValueType.get_type(value[0]) if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(key, value, GGUFValueType.UINT32 if kind == GGUFValueType.INT32 else kind, inner)


def _plan_directory(stored: SourceModel, facts: ArchFacts, out: _Writer) -> Iterator[tuple[str, Values]]:
    names = {name: gguf_name(name, facts.architecture) for name in stored.shapes}
    if facts.tied:
        names.pop("lm_head.weight", None)
    unknown = [name for name, new_name in names.items() if new_name is None and "inv_freq" not in name]
    if unknown:
        raise ConfigError(f"{stored.checkpoint.path}: GGUF files have no name for {unknown[0]}")
    factors = _rope_factors(facts)
    if factors is not None:
        out.plan("rope_freqs.weight", factors.shape)
    for name, new_name in names.items():
        if new_name is not None:
            out.plan(new_name, stored.shapes[name])
    out.begin()
    if factors is not None:
        yield "rope_freqs.weight", factors
    for name, tensor in stored.tensors():
        new_name = names.get(name)
        if new_name is not None:
            rows = row_order(name, len(tensor), facts)
            values = tensor.float().numpy()
            yield new_name, values if rows is None else values[np.argsort(rows)]


def _rope_factors(facts: ArchFacts) -> Values | None:
    """Return the factors by which llama3 scaling divides each frequency; None for other rope kinds."""
    rope = facts.layers[0].rope
    if rope is None or rope.kind != "llama3":
        return None
    plain = KINDS["default"](rope, rope.max_len)
    return (plain / KINDS["llama3"](rope, rope.max_len)).to(torch.float32).numpy()

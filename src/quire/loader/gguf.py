"""Weights from a GGUF file: Hugging Face names, values dequantized or kept in blocks."""

import re
import warnings
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.gguf import GGUFFile, GGUFTensor
from quire.checkpoint.model import Checkpoint
from quire.errors import ConfigError
from quire.layers.scope import Target
from quire.loader.source import Source
from quire.quant.format import Format
from quire.quant.gguf import BLOCKS, GGUFFormat, Stored

_NAMES = {
    "blk": "model.layers",
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_GEMMA = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GPT2 = {
    "blk": "transformer.h",
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_BLOOM = {
    "blk": "transformer.h",
    "token_embd": "transformer.word_embeddings",
    "token_embd_norm": "transformer.word_embeddings_layernorm",
    "output_norm": "transformer.ln_f",
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_SHARED_EXPERTS = {
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_LARGE_FALCON = "FalconForCausalLM, large"
"""Falcon models with a norm for each half of a layer; the first norm by name belongs to the second half."""
_OTHER_NAMES: dict[str, dict[str, str]] = {
    "GPT2LMHeadModel": _GPT2,
    "GPTBigCodeForCausalLM": _GPT2,
    "BloomForCausalLM": _BLOOM,
    "FalconForCausalLM": _BLOOM,
    _LARGE_FALCON: _BLOOM | {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"},
    "GPTNeoXForCausalLM": {
        "blk": "gpt_neox.layers",
        "token_embd": "gpt_neox.embed_in",
        "output_norm": "gpt_neox.final_layer_norm",
        "output": "embed_out",
        "attn_qkv": "attention.query_key_value",
        "attn_output": "attention.dense",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
    "PhiForCausalLM": {
        "output_norm": "model.final_layernorm",
        "attn_qkv": "self_attn.qkv_proj",
        "attn_output": "self_attn.dense",
        "ffn_up": "mlp.fc1",
        "ffn_down": "mlp.fc2",
    },
    "DbrxForCausalLM": {
        "blk": "transformer.blocks",
        "token_embd": "transformer.wte",
        "output_norm": "transformer.norm_f",
        "attn_norm": "norm_attn_norm.norm_1",
        "attn_output_norm": "norm_attn_norm.norm_2",
        "attn_qkv": "norm_attn_norm.attn.Wqkv",
        "attn_output": "norm_attn_norm.attn.out_proj",
    },
    "Dots1ForCausalLM": _SHARED_EXPERTS,
    "Glm4MoeForCausalLM": _SHARED_EXPERTS | {"post_attention_norm": "post_attention_layernorm"},
    "GlmForCausalLM": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "ExaoneForCausalLM": {
        "blk": "transformer.h",
        "token_embd": "transformer.wte",
        "output_norm": "transformer.ln_f",
        "attn_norm": "ln_1",
        "attn_q": "attn.attention.q_proj",
        "attn_k": "attn.attention.k_proj",
        "attn_v": "attn.attention.v_proj",
        "attn_output": "attn.attention.out_proj",
        "ffn_norm": "ln_2",
        "ffn_gate": "mlp.c_fc_0",
        "ffn_up": "mlp.c_fc_1",
        "ffn_down": "mlp.c_proj",
    },
    "MptForCausalLM": {
        "blk": "transformer.blocks",
        "token_embd": "transformer.wte",
        "output_norm": "transformer.norm_f",
        "attn_norm": "norm_1",
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.out_proj",
        "ffn_norm": "norm_2",
        "ffn_up": "ffn.up_proj",
        "ffn_down": "ffn.down_proj",
    },
    "Gemma2ForCausalLM": _GEMMA,
    "Gemma3ForCausalLM": _GEMMA,
    "Glm4ForCausalLM": {
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_up": "mlp.gate_up_proj",
    },
    "GptOssForCausalLM": {
        "post_attention_norm": "post_attention_layernorm",
        "attn_sinks.weight": "self_attn.sinks",
    },
    "Olmo2ForCausalLM": {
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "Phi3ForCausalLM": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "SeedOssForCausalLM": {"post_attention_norm": "post_attention_layernorm"},
    "Starcoder2ForCausalLM": {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
}
"""Names that differ from `_NAMES`, by architecture."""
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
_EXPERT = re.compile(r"(blk\.\d+\.ffn_\w+)\.(\d+)\.weight")
"""One expert as a tensor of its own, as in early files."""
_INTERLEAVED = (
    "ArceeForCausalLM",
    "GraniteForCausalLM",
    "GraniteMoeForCausalLM",
    "LlamaForCausalLM",
    "MiniCPMForCausalLM",
    "OlmoForCausalLM",
    "SmolLM3ForCausalLM",
)
"""Architectures with files that interleave the two halves of each query and key head, for RoPE on adjacent
pairs."""

_BY_HEAD = ("BloomForCausalLM", "FalconForCausalLM", "GPTNeoXForCausalLM")
"""Architectures with files that hold the queries of all heads, then all keys, then all values."""
# Weights dequantized at a time, so that a large embedding never exists in float32 as a whole.
_CHUNK_WEIGHTS = 1 << 24
_KEPT_BYTES = 32 << 20
"""Bytes of the file that may stay in memory while it is read."""


class GGUFSource(Source):
    """The tensors of a GGUF file under their Hugging Face names."""

    def __init__(self, checkpoint: Checkpoint, seed: int) -> None:
        self._file = GGUFFile(checkpoint.path)
        self._facts = facts = checkpoint.facts
        is_large = facts.architecture == "FalconForCausalLM" and facts.parallel_norms == 2
        names = _LARGE_FALCON if is_large else facts.architecture
        self._tensors = {
            hf_name(name, names): _as_matrix(tensor) for name, tensor in self._file.tensors.items()
        }
        self._num_read = 0

    def shapes(self, targets: Mapping[str, Target]) -> Mapping[str, tuple[int, ...]]:
        return {
            name: self._packed(name).shape if _takes_bytes(targets.get(name)) else tensor.shape
            for name, tensor in self._tensors.items()
        }

    def format(self, plain: Format) -> Format:
        stored: dict[str, Stored] = {
            name: (tensor.type, *tensor.shape) for name, tensor in self._tensors.items()
        }
        return GGUFFormat(stored, plain)

    def _packed(self, name: str) -> NDArray[np.uint8]:
        """Return the bytes of a tensor by row; for a vector by element."""
        tensor = self._tensors[name]
        return self._file.raw(tensor.name).reshape(*(tensor.shape[:-1] or tensor.shape), -1)

    def fill(self, target: Target) -> None:
        """Fill a target with dequantized values, or with the bytes of the file if it takes bytes."""
        name, into = target.name, target.tensor
        self._num_read += self._tensors[name].nbytes
        if self._num_read > _KEPT_BYTES:
            self._num_read = 0
            self._file.forget()
        if not _takes_bytes(target):
            return self._unpack(target)
        with warnings.catch_warnings(action="ignore"):  # the array is read-only, and never written to
            into.data = torch.from_numpy(self._shard_bytes(target))

    def _shard_bytes(self, target: Target) -> NDArray[np.uint8]:
        """Return the bytes of the target's shard: rows as stored in the file, columns concatenated."""
        packed, axis = self._packed(target.name), target.axis
        order = row_order(target.name, len(packed), self._facts)
        if axis is None or target.is_whole:
            return packed if order is None else packed[order]
        parts = []
        for span, num_zeros in target.spans():
            parts.append(_select(packed, span, axis, order))
            if num_zeros:
                shape = (*packed.shape[:axis], num_zeros, *packed.shape[axis + 1 :])
                parts.append(np.zeros(shape, np.uint8))
        return np.ascontiguousarray(parts[0]) if len(parts) == 1 else np.concatenate(parts, axis)

    def _unpack(self, target: Target) -> None:
        """Dequantize the target's shard, some rows at a time; for columns the blocks that contain them."""
        tensor, into, axis = self._tensors[target.name], target.tensor, target.axis
        packed = self._packed(target.name)
        order = row_order(target.name, len(packed), self._facts)
        if axis is None or target.is_whole:
            self._unpack_rows(tensor, packed if order is None else packed[order], slice(None), into)
        elif axis < len(tensor.shape) - 1 or axis == 0:
            for span, part in target.slices():
                self._unpack_rows(tensor, _select(packed, span, axis, order), slice(None), part)
        else:
            columns, num_bytes = BLOCKS[tensor.type]
            for span, part in target.slices():
                first, last = span.start // columns, -(-span.stop // columns)
                blocks = packed[..., first * num_bytes : last * num_bytes]
                inside = slice(span.start - first * columns, span.stop - first * columns)
                self._unpack_rows(tensor, blocks if order is None else blocks[order], inside, part)

    def _unpack_rows(
        self, tensor: GGUFTensor, packed: NDArray[np.uint8], columns: slice, into: Tensor
    ) -> None:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        step = max(1, _CHUNK_WEIGHTS // max(1, into[0].numel()))
        for start in range(0, len(into), step):
            try:
                values = dequantize(packed[start : start + step], GGMLQuantizationType[tensor.type])
            except NotImplementedError as error:
                raise ConfigError(
                    f"{self._file.path}: {tensor.name} is {tensor.type}, which cannot be dequantized yet; "
                    "use a file in another quantization, such as Q8_0 or Q4_K_M"
                ) from error
            piece, values = into[start : start + step], values[..., columns]
            piece.copy_(torch.from_numpy(np.require(values, requirements=["C", "W"])).view(piece.shape))


def _select(
    packed: NDArray[np.uint8], span: slice, axis: int, order: NDArray[np.intp] | None
) -> NDArray[np.uint8]:
    """Return the span of a tensor along an axis, with its rows in `order`."""
    if order is not None and axis == 0:
        return packed[order[span]]
    return (packed if order is None else packed[order])[(slice(None),) * axis + (span,)]


def _takes_bytes(target: Target | None) -> bool:
    return target is not None and target.tensor.dtype == torch.uint8


def _as_matrix(tensor: GGUFTensor) -> GGUFTensor:
    """Return the tensor with two axes if it is the single row of a matrix, which may be stored as a
    vector."""
    is_row = tensor.name.endswith("ffn_gate_inp_shexp.weight") and len(tensor.shape) == 1
    return replace(tensor, shape=(1, *tensor.shape)) if is_row else tensor


def hf_name(name: str, architecture: str) -> str:
    """Map blk.3.attn_q.weight to model.layers.3.self_attn.q_proj.weight; unknown names are returned
    unchanged."""
    if expert := _EXPERT.fullmatch(name):
        merged = hf_name(f"{expert[1]}_exps.weight", architecture)
        return merged.replace(".experts.", f".experts.{expert[2]}.")
    names = _NAMES | _OTHER_NAMES.get(architecture, {})
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    _, part, kind = match.groups()
    layer = "" if match[1] is None else f"{names['blk']}.{match[1]}."
    if f"{part}.{kind}" in names:
        return f"{layer}{names[f'{part}.{kind}']}"
    return f"{layer}{names[part]}.{kind}" if part in names else name


def gguf_name(name: str, architecture: str) -> str | None:
    """Invert `hf_name`; return None if files have no such tensor."""
    names = _NAMES | _OTHER_NAMES.get(architecture, {})
    where, _, kind = name.rpartition(".")
    layer, _, part = where.removeprefix(f"{names['blk']}.").partition(".")
    is_in_layer = where.startswith(f"{names['blk']}.")
    stored = next((key for key, known in names.items() if known == (part if is_in_layer else where)), None)
    if stored is None or kind not in ("weight", "bias"):
        return None
    return f"blk.{layer}.{stored}.{kind}" if is_in_layer else f"{stored}.{kind}"


def row_order(name: str, num_rows: int, facts: ArchFacts) -> NDArray[np.intp] | None:
    """Return the order of the stored rows that the model needs; None if it is the stored order."""
    if facts.architecture in _BY_HEAD and ".query_key_value." in name:
        rows, dim = np.arange(num_rows), facts.head_dim
        parts = np.split(rows, (facts.heads * dim, (facts.heads + facts.kv_heads) * dim))
        return np.concatenate([part.reshape(facts.kv_heads, -1) for part in parts], 1).reshape(-1)
    if facts.architecture not in _INTERLEAVED or not re.search(r"self_attn\.[qk]_proj\.", name):
        return None
    heads = facts.heads if ".q_proj." in name else facts.kv_heads
    return np.arange(num_rows).reshape(heads, num_rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)

"""The model to quantize: its tensors one at a time, and its other files."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.checkpoint.facts import MoeFacts, RopeFacts
from quire.checkpoint.gguf import GGUFFile
from quire.checkpoint.model import Checkpoint, read_checkpoint
from quire.checkpoint.reader import read_json
from quire.errors import ConfigError
from quire.layers.scope import Target
from quire.loader.shards import copy_around, write_json
from quire.loader.source import FORMATS, detect
from quire.text.tokenizer import Tokenizer, load_tokenizer

_EXPERTS = re.compile(r"(.*\.experts)\.(\w+\.weight)")
_QUANTIZED = ("quantization_config", "compression_config")
_MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
"""Maps architectures to model_type, for GGUF files whose config.json can be written."""


class SourceModel:
    """A model directory or a GGUF file. Tensors of a GGUF file have the names that they would have in a model
    directory."""

    def __init__(self, path: Path) -> None:
        if path.is_dir() and any(read_json(path / "config.json").get(key) for key in _QUANTIZED):
            raise ConfigError(f"{path} is quantized already; use the original checkpoint")
        self.checkpoint: Checkpoint = read_checkpoint(path)
        self._source = FORMATS[detect(self.checkpoint, "auto")](self.checkpoint, 0)
        self.is_gguf = self.checkpoint.format == "gguf"
        self.dtype: torch.dtype = torch.bfloat16 if self.is_gguf else _dtype(self.checkpoint)
        """dtype of unquantized tensors and of scales."""
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._whole: dict[str, str] = {}
        for name, shape in self._source.shapes({}).items():
            experts = _EXPERTS.fullmatch(name) if self.is_gguf and len(shape) == 3 else None
            if experts is None:
                self.shapes[name] = tuple(shape)
            else:
                names = [f"{experts[1]}.{i}.{experts[2]}" for i in range(shape[0])]
                self.shapes |= dict.fromkeys(names, tuple(shape[1:]))
                self._whole |= dict.fromkeys(names, name)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors one by one: tensors of a GGUF file in float32, other tensors as stored."""
        loaded: tuple[str, Tensor] | None = None
        for name in self.shapes:
            whole = self._whole.get(name)
            if whole is None:
                yield name, self._read(name)
                continue
            if loaded is None or loaded[0] != whole:
                loaded = whole, self._read(whole)
            yield name, loaded[1][int(name.split(".experts.")[1].split(".")[0])].clone()

    def _read(self, name: str) -> Tensor:
        shape = self._source.shapes({})[name]
        into = torch.empty(shape, dtype=torch.float32 if self.is_gguf else self._source.dtype(name))
        self._source.fill(Target(name, into))
        return into

    def config(self) -> dict[str, Any]:
        """Return the contents of config.json; for a GGUF file they are built from its header."""
        if not self.is_gguf:
            return read_json(self.checkpoint.path / "config.json")
        return gguf_config(self.checkpoint)

    def copy_rest(self, to: Path) -> None:
        """Copy everything but weights: tokenizer, chat template, sampling defaults."""
        if self.is_gguf:
            return _write_tokenizer(self.checkpoint, to)
        copy_around(self.checkpoint.path, to)


def _dtype(checkpoint: Checkpoint) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, checkpoint.dtype)
    return dtype


def gguf_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the contents of a config.json for the model of a GGUF file."""
    facts, path = checkpoint.facts, checkpoint.path
    moe = facts.moe
    if facts.architecture not in _MODEL_TYPES or (moe and "Moe" not in facts.architecture):
        kind = GGUFFile(path).metadata.get("general.architecture")
        raise ConfigError(
            f"{path}: a config.json cannot be written for the GGUF architecture {kind!r}"
            f"{' with experts' if moe else ''}; known: {', '.join(_MODEL_TYPES.values())}; "
            "start from the model's directory with config.json"
        )
    config: dict[str, Any] = {
        "architectures": [facts.architecture],
        "model_type": _MODEL_TYPES[facts.architecture],
        "vocab_size": facts.vocab,
        "hidden_size": facts.hidden,
        "intermediate_size": facts.intermediate,
        "num_hidden_layers": len(facts.layers),
        "num_attention_heads": facts.heads,
        "num_key_value_heads": facts.kv_heads,
        "head_dim": facts.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": facts.norm_eps,
        "max_position_embeddings": facts.max_len,
        "tie_word_embeddings": facts.tied,
        "torch_dtype": "bfloat16",
        "bos_token_id": checkpoint.bos_id,
        "eos_token_id": list(checkpoint.eos_ids),
    }
    if facts.architecture == "LlamaForCausalLM":
        config |= {"attention_bias": facts.qkv_bias, "mlp_bias": facts.mlp_bias}
    return config | ({} if moe is None else _moe(moe)) | _rope(path, facts.layers[0].rope)


def _moe(moe: MoeFacts) -> dict[str, Any]:
    return {
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.routing.per_token,
        "moe_intermediate_size": moe.intermediate,
        "norm_topk_prob": moe.routing.renormalized,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _rope(path: Path, rope: RopeFacts | None) -> dict[str, Any]:
    assert rope is not None
    if rope.kind not in ("default", "linear", "yarn"):
        raise ConfigError(
            f"{path}: its RoPE is scaled by a tensor (rope_freqs), which config.json cannot "
            "describe; start from the model's directory with config.json"
        )
    config: dict[str, Any] = {"rope_theta": rope.theta}
    if rope.kind != "default":
        config["rope_scaling"] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "yarn":
        config["rope_scaling"] |= {
            "original_max_position_embeddings": rope.original_max_len,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
        }
        config["max_position_embeddings"] = rope.max_len
    return config


def _write_tokenizer(checkpoint: Checkpoint, to: Path) -> None:
    try:
        tokenizer = load_tokenizer(checkpoint.path, "gguf")
    except ConfigError as error:
        raise ConfigError(
            f"the tokenizer of {checkpoint.path} cannot be converted: {error}; put a tokenizer.json into {to}"
        ) from error
    tokenizer.backend.save(str(to / "tokenizer.json"))
    write_json(to / "tokenizer_config.json", _tokenizer_config(tokenizer))
    generation = {"bos_token_id": checkpoint.bos_id, "eos_token_id": list(checkpoint.eos_ids)}
    write_json(to / "generation_config.json", generation | checkpoint.generation)


def _tokenizer_config(tokenizer: Tokenizer) -> dict[str, Any]:
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens_map}
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = [{"name": name, "template": text} for name, text in template.items()]  # type: ignore[assignment]
    return config | ({} if template is None else {"chat_template": template})

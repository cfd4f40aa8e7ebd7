"""Tiny encoders with their transformers models."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tiny_cache import built_once

ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "BertModel": ("Bert", {}),
    "RobertaModel": ("Roberta", {"pad_token_id": 1, "type_vocab_size": 1}),
    "XLMRobertaModel": ("XLMRoberta", {"pad_token_id": 1, "type_vocab_size": 1, "hidden_act": "relu"}),
    "ModernBertModel": ("ModernBert", {"local_attention": 8, "num_hidden_layers": 4, "norm_bias": True}),
    "DistilBertModel": (
        "DistilBert",
        {"dim": 32, "hidden_dim": 48, "n_heads": 4, "n_layers": 2, "activation": "relu"},
    ),
    "ErnieModel": ("Ernie", {"use_task_id": True, "task_type_vocab_size": 3}),
    "RobertaModel, Camembert": ("Camembert", {"pad_token_id": 1, "type_vocab_size": 1}),
    "MPNetModel": ("MPNet", {"pad_token_id": 1}),
    "NomicBertModel": ("NomicBert", {"hidden_act": "silu"}),
    "GteModel": ("Gte", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "GteModel, no types": ("Gte", {"type_vocab_size": 0}),
    "JinaEmbeddingsV3Model": ("JinaEmbeddingsV3", {"type_vocab_size": 1}),
    "ModernBertModel, mean": ("ModernBert", {"classifier_pooling": "mean", "attention_bias": True}),
}
"""Family in transformers and its settings, by architecture and tested variant."""
SETTINGS = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
    "attn_implementation": "eager",
    "num_labels": 3,
}


class Tiny(NamedTuple):
    path: Path
    hf: Any
    """The transformers ForSequenceClassification model."""

    @property
    def body(self) -> Any:
        return self.hf.base_model


def make(path: Path, family: str, **overrides: Any) -> Tiny:
    """Return a tiny encoder of a transformers family with a classification head, saved to `path`."""
    return Tiny(
        path, built_once(("encoder", family, overrides), path, lambda to: _build(to, family, overrides))
    )


def _build(path: Path, family: str, overrides: dict[str, Any]) -> Any:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(SETTINGS | overrides))
    model = getattr(transformers, f"{family}ForSequenceClassification")(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name.lower() or name.endswith(".bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(path)
    return model


def texts(*lengths: int) -> list[list[int]]:
    draw = np.random.default_rng(5)
    return [draw.integers(3, 96, length).tolist() for length in lengths]


@torch.inference_mode()
def states(tiny: Tiny, ids: list[int], types: list[int] | None = None) -> np.ndarray[Any, Any]:
    kwargs = {} if types is None else {"token_type_ids": torch.tensor([types])}
    actual: np.ndarray[Any, Any] = tiny.body(torch.tensor([ids]), **kwargs).last_hidden_state[0].numpy()
    return actual

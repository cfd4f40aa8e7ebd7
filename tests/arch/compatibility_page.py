"""Generate docs/compatibility.md from the engine's own checks: `python tests/arch/compatibility_page.py`.

Each pair of features is checked by `configure()`, with a tiny config.json and imaginary GPUs. No weights are
read and no device is used. Some pairs have further checks, which are called directly."""

import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from gguf import GGUFWriter

from quire import configure as prepare
from quire.checkpoint.layout import cache_specs
from quire.config import engine
from quire.config.engine import EngineConfig
from quire.config.machine import Machine
from quire.core.build import _build_drafting
from quire.errors import ConfigError
from quire.layers.lora import AdapterSlots
from quire.layers.moe import ExpertLoRALayers
from quire.models.transformers_backend import TransformersModel
from quire.worker.lora import no_extra_vocab_reason

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
GPUS = Machine("cuda", "NVIDIA H200", 8, 150 << 30, 148 << 30, 64, (9, 0), bf16=True, fp16=True)
CPU = Machine("cpu", "CPU", 1, 64 << 30, 60 << 30, 8, bf16=True)

DENSE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}
MOE = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
MLA = DENSE | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
SSM = {
    "architectures": ["Mamba2ForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "expand": 2,
    "head_dim": 16,
    "num_heads": 8,
    "n_groups": 2,
    "state_size": 16,
    "num_hidden_layers": 4,
}
IMAGES = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "image_token_id": 300,
    "video_token_id": 301,
    "vision_start_token_id": 302,
    "vision_end_token_id": 303,
    "text_config": DENSE
    | {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]}, "model_type": "qwen2_5_vl_text"},
    "vision_config": {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 4,
        "out_hidden_size": 64,
        "fullatt_block_indexes": [1],
    },
}
WHISPER = {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "is_encoder_decoder": True,
    "vocab_size": 320,
    "d_model": 64,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 128,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "num_mel_bins": 80,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "decoder_start_token_id": 1,
}
BERT = DENSE | {"architectures": ["BertModel"], "type_vocab_size": 2, "hidden_act": "gelu"}
AWQ = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2}


@dataclass(frozen=True)
class Feature:
    """A feature, which is a row and a column of the table: changes to config.json and to the engine's
    settings."""

    name: str
    short: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] | None = None
    """Name of the config.json that the feature needs; None: it works with any."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Keys that the feature adds to config.json."""


FEATURES = [
    Feature("LoRA (`--enable-lora`)", "LoRA", {"enable_lora": True}),
    Feature("n-gram speculation", "n-gram", {"speculative_config": NGRAM}),
    Feature("draft model", "draft", {"speculative_config": {"model": "DRAFT", "num_speculative_tokens": 2}}),
    Feature("tensor parallelism (`-tp 2`)", "TP", {"tensor_parallel_size": 2}),
    Feature("pipeline parallelism (`-pp 2`)", "PP", {"pipeline_parallel_size": 2}),
    Feature("data parallelism (`-dp 2`)", "DP", {"data_parallel_size": 2}),
    Feature(
        "expert parallelism (`-tp 2 -ep`)",
        "EP",
        {"tensor_parallel_size": 2, "enable_expert_parallel": True},
        MOE,
    ),
    Feature(
        "expert parallelism over engines (`-dp 2 -ep`)",
        "EP+DP",
        {"data_parallel_size": 2, "enable_expert_parallel": True},
        MOE,
    ),
    Feature("FP8 weights (`--quantization fp8`)", "FP8", {"quantization": "fp8"}),
    Feature("INT8 weights (`--quantization int8`)", "INT8", {"quantization": "int8"}),
    Feature("AWQ checkpoint", "AWQ", changes=AWQ),
    Feature("GGUF file", "GGUF", {"load_format": "gguf"}),
    Feature("images (Qwen2.5-VL)", "images", model=IMAGES),
    Feature("pooling (`--runner pooling`)", "pooling", {"runner": "pooling"}),
    Feature("structured outputs", "structured"),
    Feature("prefix caching", "prefix", {"enable_prefix_caching": True}),
    Feature("FP8 KV cache (`--kv-cache-dtype fp8`)", "FP8 KV", {"kv_cache_dtype": "fp8"}),
]
KINDS = [
    Feature("dense decoder (Llama)", "", model=DENSE),
    Feature("mixture of experts (Qwen3-MoE)", "", model=MOE),
    Feature("MLA (DeepSeek-V2)", "", model=MLA),
    Feature("SSM (Mamba-2)", "", model=SSM),
    Feature("images and videos (Qwen2.5-VL)", "", model=IMAGES),
    Feature("encoder-decoder (Whisper)", "", model=WHISPER),
    Feature("encoder (BERT)", "", model=BERT),
    Feature(
        "decoder, pooled by `MEAN`",
        "",
        {"runner": "pooling", "pooler_config": {"pooling_type": "MEAN"}},
        DENSE,
    ),
    Feature("any decoder through transformers", "", {"model_impl": "transformers"}, DENSE),
]
FORMATS = ("FP8", "INT8", "AWQ", "GGUF", "images")
"""Features without a column in the table of model kinds: they are kinds themselves, or are not checked by
kind."""
COLUMNS = [feature for feature in FEATURES if feature.short not in FORMATS]


@dataclass(frozen=True)
class Answer:
    """Verdict of the checks on a pair of features (yes, no, part or off) and its reason."""

    word: str
    why: str = ""


Answers = dict[tuple[str, str], Answer | None]
"""Answers by the name of the row and the short name of the column."""


class Checks:
    """Runs the checks for pairs of features, in a folder with tiny checkpoints."""

    def __init__(self, folder: Path, machine: Machine) -> None:
        self.folder, self.machine = folder, machine
        self.warnings: list[str] = []
        """Warnings that the last configuration logged."""
        self.draft = self._write(DENSE)
        self.gguf = folder / "tiny.gguf"
        _write_gguf(self.gguf)

    def answer(self, *pair: Feature) -> Answer | None:
        """Return the answer for these features together; None if they cannot be configured together."""
        config = self._configure(*pair)
        if not isinstance(config, EngineConfig):
            return config
        names = {feature.short for feature in pair}
        for short, ask in _FURTHER.items():
            if short in names and (answer := ask(config)):
                return answer
        if "prefix" in names and not config.cache.enable_prefix_caching:
            return Answer(
                "off", next(_first_sentence(text) for text in self.warnings if "prefix" in text.lower())
            )
        return Answer("yes")

    def _configure(self, *pair: Feature) -> EngineConfig | Answer | None:
        models = [feature.model for feature in pair if feature.model is not None]
        settings: dict[str, Any] = {}
        for feature in pair:
            settings |= feature.settings
        is_gguf = settings.get("load_format") == "gguf"
        is_twice = any(settings[key] != feature.settings[key] for feature in pair for key in feature.settings)
        if is_twice or len(set(map(json.dumps, models))) > 1 or (is_gguf and (models or _changes(pair))):
            return None
        model = self.gguf if is_gguf else self._write((models or [DENSE])[0] | _changes(pair))
        if "DRAFT" in str(settings.get("speculative_config")):
            settings["speculative_config"] = settings["speculative_config"] | {"model": str(self.draft)}
        self.warnings.clear()
        try:
            with (
                mock.patch.object(prepare, "detect", lambda device: self.machine),
                mock.patch.object(engine, "warn_once", lambda logger, text: self.warnings.append(text)),
            ):
                return prepare.configure({"load_format": "dummy", **settings, "model": str(model)})
        except ConfigError as error:
            return Answer("no", _first_sentence(str(error)))

    def _write(self, config: Mapping[str, Any]) -> Path:
        path = Path(tempfile.mkdtemp(dir=self.folder))
        (path / "config.json").write_text(json.dumps(config))
        return path


def _changes(pair: tuple[Feature, ...]) -> dict[str, Any]:
    return {key: value for feature in pair for key, value in feature.changes.items()}


def _first_sentence(text: str) -> str:
    text = re.sub(r"/\S+/", "", text)
    text = re.sub(r"\b\w+(ForCausalLM|ForConditionalGeneration|Model)\b", "ARCHITECTURE", text)
    return text.split(". ")[0].rstrip(".").strip()


# ---- checks beyond configure()


def _fp8_cache(config: EngineConfig) -> Answer | None:
    specs = cache_specs(config.checkpoint.facts)
    if any(spec is not None and spec.is_paged for spec in specs):
        return None
    return Answer("off", "The model has no paged KV cache, so that the setting has no effect")


def _structured(config: EngineConfig) -> Answer | None:
    if prepare.open_grammars(config) is None:
        return Answer("no", "A pooling model samples no tokens")
    drafting = _build_drafting(config)
    if drafting is None:
        return None
    row, flags = np.zeros(1, np.intp), {"drafts": True, "constrained": True, "needs_value": False}
    running = SimpleNamespace(**{name: np.array([flag]) for name, flag in flags.items()})
    has_drafts = bool(drafting._may_draft(running, row)[0])  # type: ignore[arg-type]
    return None if has_drafts else Answer("part", "Rows with a grammar get no draft tokens")


def _lora(config: EngineConfig) -> Answer | None:
    facts, parallel = config.checkpoint.facts, config.parallel
    if facts.borrowed is not None:
        try:
            TransformersModel(facts, SimpleNamespace(adapters=object()))  # type: ignore[arg-type]
        except ConfigError as error:
            return Answer("no", _first_sentence(str(error)))
    if parallel.enable_expert_parallel and (why := _expert_refusal()):
        return Answer("part", f"Adapters of experts are refused: {why}")
    why = no_extra_vocab_reason(config)
    return Answer("part", f"Adapters with extra tokens are refused: {why}") if why else None


def _expert_refusal() -> str:
    """Return why the experts of a rank take no adapters, by the layer that would register them."""
    slots = AdapterSlots(max_slots=1, max_rank=8, dtype=torch.float32, device=torch.device("cpu"))
    scope: Any = SimpleNamespace(ops=None, name="mlp", sibling=lambda name: name)
    experts: Any = SimpleNamespace(
        stored_names=lambda: [("mlp.experts.gate_up_proj", "gate_up")],
        names=SimpleNamespace(experts=("experts",)),
        weights=SimpleNamespace(adapts=True),
        places=object(),
    )
    ExpertLoRALayers(slots, 64, scope).register(experts)
    return next(iter(slots.refused.values()), "")


_FURTHER: dict[str, Callable[[EngineConfig], Answer | None]] = {
    "structured": _structured,
    "LoRA": _lora,
    "FP8 KV": _fp8_cache,
}
"""Further checks by feature."""


def _write_gguf(path: Path) -> None:
    """Write a GGUF file of a tiny Llama: the metadata, and an embedding for its vocabulary."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(4)
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((320, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# ---- the page

HEAD = """# Feature compatibility

This page is made by `python tests/arch/compatibility_page.py`, which calls the engine's own checks for each
pair of features with tiny configurations and a machine with GPUs. A test fails when it is out of date.

| cell | meaning |
|---|---|
| yes | the checks at start accept the pair |
| no | the pair is refused with the message in the note |
| part | the engine starts; the note names the limit |
| off | the engine starts and the feature has no effect, for the reason in the note |
| - | the two exclude each other, or the pair cannot be checked without weights |

Only pairs are checked, not larger combinations. Single model families have further limits: see
[models.md](models.md), [multimodal.md](multimodal.md), [lora.md](lora.md) and
[speculation.md](speculation.md#limits). In the notes ARCHITECTURE is the architecture of the model.
"""


class Notes:
    """Numbers the reasons in the order of their first use."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def cell(self, answer: Answer | None) -> str:
        if answer is None:
            return "-"
        if not answer.why:
            return answer.word
        return f"{answer.word} ({self.numbers.setdefault(answer.why, len(self.numbers) + 1)})"


def page() -> str:
    notes = Notes()
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        pairs, kinds = _answers(Checks(Path(first), GPUS))
        on_cpu = _answers(Checks(Path(second), CPU))
    tables = [*_pair_table(pairs, notes), *_kind_table(kinds, notes)]
    differences = [*_differences(pairs | kinds, on_cpu[0] | on_cpu[1], notes)]
    reasons = [f"{number}. {why}." for why, number in notes.numbers.items()]
    return "\n".join([HEAD, *tables, *differences, "## Notes\n", *reasons, ""])


def _answers(checks: Checks) -> tuple[Answers, Answers]:
    """Return the answers for all pairs of features, and for all kinds of models with each feature."""
    pairs = {(b.name, a.short): checks.answer(a, b) for a, b in combinations(FEATURES, 2)}
    kinds = {
        (kind.name, feature.short): checks.answer(kind, _on(feature, kind))
        for kind in KINDS
        for feature in COLUMNS
    }
    return pairs, kinds


def _pair_table(answers: Answers, notes: Notes) -> Iterator[str]:
    yield "## Features with each other\n"
    yield "On a dense decoder (Llama), with expert parallelism on a mixture of experts (Qwen3-MoE).\n"
    yield from _table(FEATURES[1:], FEATURES[:-1], answers, notes)


def _kind_table(answers: Answers, notes: Notes) -> Iterator[str]:
    yield "## Features by kind of model\n"
    yield from _table(KINDS, COLUMNS, answers, notes)


def _table(rows: list[Feature], columns: list[Feature], answers: Answers, notes: Notes) -> Iterator[str]:
    yield _row("", *(feature.short for feature in columns))
    yield "|---" * (len(columns) + 1) + "|"
    for row in rows:
        keys = [(row.name, column.short) for column in columns]
        yield _row(row.name, *(notes.cell(answers[key]) if key in answers else "" for key in keys))
    yield ""


def _differences(answers: Answers, on_cpu: Answers, notes: Notes) -> Iterator[str]:
    yield "## On a CPU\n"
    yield "The tables are for GPUs. On a CPU these pairs differ:\n"
    changed = [key for key in answers if answers[key] != on_cpu[key]]
    yield from (f"- {name}, {short}: {notes.cell(on_cpu[name, short])}" for name, short in changed)
    yield "" if changed else "- none\n"


def _on(feature: Feature, kind: Feature) -> Feature:
    """Return the feature with the model of this kind in place of its own model."""
    return Feature(feature.name, feature.short, feature.settings, kind.model, feature.changes)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

"""The families of models: who reads the facts of which architecture."""

from collections.abc import Callable
from typing import NamedTuple

import quire.config.families.dense as dense
import quire.config.families.gguf as gguf
import quire.config.families.moe as moe
import quire.config.families.windows as windows
from quire.config.facts import ArchFacts
from quire.config.gguf import GGUFFile
from quire.config.keys import Keys


class Family(NamedTuple):
    """The checkpoints of one architecture."""

    model_type: str
    """As in config.json."""
    read: Callable[[Keys], ArchFacts]
    """The facts of a config.json."""


class GGUFFamily(NamedTuple):
    """The GGUF files of one architecture of llama.cpp."""

    architecture: str
    """The architecture it is here."""
    read: Callable[[GGUFFile, Keys], ArchFacts]
    """The facts of a header; the keys are those of the architecture, without its name in front."""


FAMILIES = {
    "LlamaForCausalLM": Family("llama", dense.llama),
    "MistralForCausalLM": Family("mistral", dense.mistral),
    "Qwen2ForCausalLM": Family("qwen2", dense.qwen2),
    "Qwen3ForCausalLM": Family("qwen3", dense.qwen3),
    "Gemma2ForCausalLM": Family("gemma2", windows.gemma2),
    "Gemma3ForCausalLM": Family("gemma3_text", windows.gemma3),
    "GptOssForCausalLM": Family("gpt_oss", windows.gpt_oss),
    "MixtralForCausalLM": Family("mixtral", moe.mixtral),
    "Qwen2MoeForCausalLM": Family("qwen2_moe", moe.qwen2_moe),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", moe.qwen3_moe),
    "OlmoeForCausalLM": Family("olmoe", moe.olmoe),
    "GraniteMoeForCausalLM": Family("granitemoe", moe.granite_moe),
    "GraniteMoeSharedForCausalLM": Family("granitemoeshared", moe.granite_moe),
    "Llama4ForCausalLM": Family("llama4_text", moe.llama4),
    "Glm4MoeForCausalLM": Family("glm4_moe", moe.glm4_moe),
}
GGUF_FAMILIES = {
    "llama": GGUFFamily("LlamaForCausalLM", gguf.llama),
    "qwen2": GGUFFamily("Qwen2ForCausalLM", gguf.qwen2),
    "qwen3": GGUFFamily("Qwen3ForCausalLM", gguf.qwen3),
}

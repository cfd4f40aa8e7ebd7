"""The families of models: who reads the facts of which architecture."""

from collections.abc import Callable
from typing import NamedTuple

from quire.config.facts import ArchFacts
from quire.config.families import dense, gguf
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
}
GGUF_FAMILIES = {
    "llama": GGUFFamily("LlamaForCausalLM", gguf.llama),
    "qwen2": GGUFFamily("Qwen2ForCausalLM", gguf.qwen2),
    "qwen3": GGUFFamily("Qwen3ForCausalLM", gguf.qwen3),
}

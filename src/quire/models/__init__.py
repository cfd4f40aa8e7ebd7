"""The model table: one line per architecture."""

from quire.registry import LazyTable

MODELS = LazyTable(
    "architecture",
    {
        "LlamaForCausalLM": "quire.models.llama:Llama",
        "MistralForCausalLM": "quire.models.llama:Llama",
        "Qwen2ForCausalLM": "quire.models.llama:Llama",
        "Qwen3ForCausalLM": "quire.models.llama:Llama",
    },
)

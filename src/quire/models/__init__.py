"""The model table: one line per architecture."""

from quire.registry import LazyTable

MODELS = LazyTable(
    "architecture",
    {
        "LlamaForCausalLM": "quire.models.llama:Llama",
        "MistralForCausalLM": "quire.models.llama:Llama",
        "Qwen2ForCausalLM": "quire.models.llama:Llama",
        "Qwen3ForCausalLM": "quire.models.llama:Llama",
        "Gemma2ForCausalLM": "quire.models.gemma:Gemma",
        "Gemma3ForCausalLM": "quire.models.gemma:Gemma",
        "GptOssForCausalLM": "quire.models.llama:Llama",
        "MixtralForCausalLM": "quire.models.llama:Llama",
        "Qwen2MoeForCausalLM": "quire.models.llama:Llama",
        "Qwen3MoeForCausalLM": "quire.models.llama:Llama",
        "OlmoeForCausalLM": "quire.models.llama:Llama",
        "GraniteMoeForCausalLM": "quire.models.llama:Llama",
        "GraniteMoeSharedForCausalLM": "quire.models.llama:Llama",
        "Llama4ForCausalLM": "quire.models.llama4:Llama4",
        "Glm4MoeForCausalLM": "quire.models.llama:Llama",
    },
)

"""The model table: one line per architecture."""

from quire.registry import LazyTable

MODELS = LazyTable(
    "architecture",
    {
        "Cohere2ForCausalLM": "quire.models.cohere:Cohere",
        "CohereForCausalLM": "quire.models.cohere:Cohere",
        "GPT2LMHeadModel": "quire.models.gpt2:GPT2",
        "Glm4ForCausalLM": "quire.models.glm4:Glm4",
        "GlmForCausalLM": "quire.models.llama:Llama",
        "GraniteForCausalLM": "quire.models.llama:Llama",
        "InternLM3ForCausalLM": "quire.models.llama:Llama",
        "LlamaForCausalLM": "quire.models.llama:Llama",
        "MinistralForCausalLM": "quire.models.llama:Llama",
        "MistralForCausalLM": "quire.models.llama:Llama",
        "NemotronForCausalLM": "quire.models.gpt2:Nemotron",
        "OPTForCausalLM": "quire.models.gpt2:OPT",
        "Olmo2ForCausalLM": "quire.models.olmo2:Olmo2",
        "Olmo3ForCausalLM": "quire.models.olmo2:Olmo2",
        "Phi3ForCausalLM": "quire.models.llama:Llama",
        "Qwen2ForCausalLM": "quire.models.llama:Llama",
        "Qwen3ForCausalLM": "quire.models.llama:Llama",
        "SeedOssForCausalLM": "quire.models.llama:Llama",
        "SmolLM3ForCausalLM": "quire.models.llama:Llama",
        "Starcoder2ForCausalLM": "quire.models.gpt2:Starcoder2",
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
        "DeepseekV2ForCausalLM": "quire.models.deepseek:Deepseek",
        "DeepseekV3ForCausalLM": "quire.models.deepseek:Deepseek",
        "GraniteMoeHybridForCausalLM": "quire.models.granite_hybrid:GraniteHybrid",
        "Qwen3NextForCausalLM": "quire.models.qwen3_next:Qwen3Next",
        "Qwen3_5ForCausalLM": "quire.models.qwen3_next:Qwen35",
        "Qwen3_5MoeForCausalLM": "quire.models.qwen3_next:Qwen35",
    },
)
CLASSIFIERS = LazyTable("classifier", {})
"""By architecture, where it is more than one product."""

"""Tables of model families: the function that reads the config of each architecture."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import quire.checkpoint.families.alibi as alibi
import quire.checkpoint.families.dense as dense
import quire.checkpoint.families.encoder as encoder
import quire.checkpoint.families.gated as gated
import quire.checkpoint.families.gguf as gguf
import quire.checkpoint.families.gguf_gemma as gguf_gemma
import quire.checkpoint.families.gguf_hybrid as gguf_hybrid
import quire.checkpoint.families.gpt as gpt
import quire.checkpoint.families.lfm as lfm
import quire.checkpoint.families.linear_attention as linear
import quire.checkpoint.families.llama_variants as llama_variants
import quire.checkpoint.families.mla as mla
import quire.checkpoint.families.moe as moe
import quire.checkpoint.families.reshaped as reshaped
import quire.checkpoint.families.sliding_window as sliding_window
import quire.checkpoint.families.ssm as ssm
import quire.checkpoint.families.step3 as step3
from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.gguf import GGUFFile
from quire.checkpoint.reader import ConfigReader


class Family(NamedTuple):
    """One architecture of checkpoints with a config.json: the function that reads its config, and its model
    code."""

    model_type: str
    """Model type in config.json."""
    read: Callable[[ConfigReader], ArchFacts]
    """Function that reads a config.json as ArchFacts."""
    model: str = "llama:Llama"
    """File and class of the model code in `quire/models/`."""


class GGUFFamily(NamedTuple):
    """One architecture of GGUF files, as llama.cpp names it: the function that reads its header, and its
    model code."""

    architecture: str
    """Architecture in FAMILIES whose model code runs these files."""
    read: Callable[[GGUFFile, ConfigReader], ArchFacts]
    """Function that reads a GGUF file as ArchFacts, given the file and its header keys without the
    architecture prefix."""


FAMILIES = {
    "Cohere2ForCausalLM": Family("cohere2", dense.cohere2, "parallel_layers:Cohere"),
    "CohereForCausalLM": Family("cohere", dense.cohere, "parallel_layers:Cohere"),
    "ApertusForCausalLM": Family("apertus", dense.apertus, "apertus:Apertus"),
    "ArceeForCausalLM": Family("arcee", dense.arcee, "gpt2:Nemotron"),
    "Ernie4_5ForCausalLM": Family("ernie4_5", dense.ernie),
    "Exaone4ForCausalLM": Family("exaone4", dense.exaone4, "post_norm:Olmo2"),
    "GPT2LMHeadModel": Family("gpt2", dense.gpt2, "gpt2:GPT2"),
    "GPTNeoXForCausalLM": Family("gpt_neox", dense.gpt_neox, "parallel_layers:GPTNeoX"),
    "GemmaForCausalLM": Family("gemma", dense.gemma),
    "Glm4ForCausalLM": Family("glm4", dense.glm, "post_norm:Glm4"),
    "GlmForCausalLM": Family("glm", dense.glm),
    "GraniteForCausalLM": Family("granite", dense.granite),
    "GraniteSWAForCausalLM": Family("granite_swa", dense.granite_swa),
    "HunYuanDenseV1ForCausalLM": Family("hunyuan_v1_dense", dense.hunyuan, "hunyuan:HunYuan"),
    "InternLM3ForCausalLM": Family("internlm3", dense.internlm3),
    "LlamaForCausalLM": Family("llama", dense.llama),
    "Ministral3ForCausalLM": Family("ministral3", dense.ministral3, "llama4:Ministral3"),
    "MinistralForCausalLM": Family("ministral", dense.ministral),
    "MistralForCausalLM": Family("mistral", dense.mistral),
    "NemotronForCausalLM": Family("nemotron", dense.nemotron, "gpt2:Nemotron"),
    "OPTForCausalLM": Family("opt", dense.opt, "gpt2:OPT"),
    "Olmo2ForCausalLM": Family("olmo2", dense.olmo2, "post_norm:Olmo2"),
    "Olmo3ForCausalLM": Family("olmo3", dense.olmo3, "post_norm:Olmo2"),
    "PhiForCausalLM": Family("phi", dense.phi, "parallel_layers:Phi"),
    "Phi3ForCausalLM": Family("phi3", dense.phi3),
    "Qwen2ForCausalLM": Family("qwen2", dense.qwen2),
    "Qwen3ForCausalLM": Family("qwen3", dense.qwen3),
    "SeedOssForCausalLM": Family("seed_oss", dense.seed_oss),
    "SmolLM3ForCausalLM": Family("smollm3", dense.smollm3),
    "Starcoder2ForCausalLM": Family("starcoder2", dense.starcoder2, "gpt2:Starcoder2"),
    "WhisperForConditionalGeneration": Family("whisper", dense.whisper, "whisper:WhisperModel"),
    "BloomForCausalLM": Family("bloom", alibi.bloom, "parallel_layers:Bloom"),
    "MptForCausalLM": Family("mpt", alibi.mpt, "gpt2:MPT"),
    "FalconForCausalLM": Family("falcon", gpt.falcon, "parallel_layers:Falcon"),
    "GPTBigCodeForCausalLM": Family("gpt_bigcode", gpt.gpt_bigcode, "gpt2:BigCode"),
    "GPTJForCausalLM": Family("gptj", gpt.gptj, "parallel_layers:GPTJ"),
    "OlmoForCausalLM": Family("olmo", gpt.olmo),
    "PersimmonForCausalLM": Family("persimmon", gpt.persimmon, "parallel_layers:Persimmon"),
    "StableLmForCausalLM": Family("stablelm", gpt.stablelm, "parallel_layers:StableLM"),
    "Gemma2ForCausalLM": Family("gemma2", sliding_window.gemma2, "gemma:GemmaModel"),
    "Gemma3ForCausalLM": Family("gemma3_text", sliding_window.gemma3, "gemma:GemmaModel"),
    "Gemma3nForCausalLM": Family("gemma3n_text", sliding_window.gemma3n, "gemma3n:Gemma3nModel"),
    "GptOssForCausalLM": Family("gpt_oss", sliding_window.gpt_oss),
    "MixtralForCausalLM": Family("mixtral", moe.mixtral),
    "Qwen2MoeForCausalLM": Family("qwen2_moe", moe.qwen2_moe),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", moe.qwen3_moe),
    "OlmoeForCausalLM": Family("olmoe", moe.olmoe),
    "GraniteMoeForCausalLM": Family("granitemoe", moe.granite_moe),
    "GraniteMoeSharedForCausalLM": Family("granitemoeshared", moe.granite_moe),
    "Llama4ForCausalLM": Family("llama4_text", moe.llama4, "llama4:Llama4Model"),
    "Glm4MoeForCausalLM": Family("glm4_moe", moe.glm4_moe),
    "Ernie4_5_MoeForCausalLM": Family("ernie4_5_moe", moe.ernie_moe),
    "HunYuanMoEV1ForCausalLM": Family("hunyuan_v1_moe", moe.hunyuan_moe, "hunyuan:HunYuan"),
    "Cohere2MoeForCausalLM": Family("cohere2_moe", moe.cohere2_moe, "parallel_layers:Cohere"),
    "Dots1ForCausalLM": Family("dots1", moe.dots1),
    "ExaoneMoeForCausalLM": Family("exaone_moe", moe.exaone_moe),
    "FlexOlmoForCausalLM": Family("flex_olmo", moe.flex_olmo, "post_norm:Olmo2"),
    "GraniteMoeSWAForCausalLM": Family("granitemoe_swa", moe.granite_moe_swa),
    "MiniMaxM2ForCausalLM": Family("minimax_m2", moe.minimax_m2),
    "DbrxForCausalLM": Family("dbrx", moe.dbrx, "llama_variants:DBRX"),
    "Step3TextForCausalLM": Family("step3_text", step3.step3, "step3:Step3Text"),
    "Step3p5ForCausalLM": Family("step3p5", step3.step35, "step3:Step35"),
    "DeepseekV2ForCausalLM": Family("deepseek_v2", mla.deepseek_v2, "deepseek:Deepseek"),
    "DeepseekV3ForCausalLM": Family("deepseek_v3", mla.deepseek_v3, "deepseek:Deepseek"),
    "DeepseekV32ForCausalLM": Family("deepseek_v32", mla.deepseek_v32, "deepseek:Deepseek"),
    "Glm4MoeLiteForCausalLM": Family("glm4_moe_lite", mla.glm4_moe_lite, "deepseek:Deepseek"),
    "GlmMoeDsaForCausalLM": Family("glm_moe_dsa", mla.glm_moe_dsa, "deepseek:Deepseek"),
    "BambaForCausalLM": Family("bamba", ssm.bamba, "hybrid:Bamba"),
    "FalconH1ForCausalLM": Family("falcon_h1", ssm.falcon_h1, "falcon_h1:FalconH1"),
    "FalconMambaForCausalLM": Family("falcon_mamba", ssm.falcon_mamba, "hybrid:MambaModel"),
    "GraniteMoeHybridForCausalLM": Family("granitemoehybrid", ssm.granite_hybrid, "hybrid:GraniteHybrid"),
    "JambaForCausalLM": Family("jamba", ssm.jamba, "hybrid:Jamba"),
    "Lfm2ForCausalLM": Family("lfm2", lfm.lfm2, "hybrid:Lfm2"),
    "Lfm2MoeForCausalLM": Family("lfm2_moe", lfm.lfm2_moe, "hybrid:Lfm2"),
    "Mamba2ForCausalLM": Family("mamba2", ssm.mamba2, "hybrid:MambaModel"),
    "MambaForCausalLM": Family("mamba", ssm.mamba, "hybrid:MambaModel"),
    "NemotronHForCausalLM": Family("nemotron_h", ssm.nemotron_h, "hybrid:NemotronH"),
    "Qwen3NextForCausalLM": Family("qwen3_next", ssm.qwen3_next, "qwen3_next:Qwen3Next"),
    "Qwen3_5ForCausalLM": Family("qwen3_5_text", ssm.qwen3_5, "qwen3_next:Qwen35"),
    "Qwen3_5MoeForCausalLM": Family("qwen3_5_moe_text", ssm.qwen3_next, "qwen3_next:Qwen35"),
    "BaichuanForCausalLM": Family("baichuan", llama_variants.baichuan, "llama_variants:Baichuan"),
    "BaiChuanForCausalLM": Family("baichuan", llama_variants.baichuan_7b, "llama_variants:Baichuan"),
    "BailingMoeForCausalLM": Family("bailing_moe", llama_variants.bailing, "llama_variants:Bailing"),
    "BailingMoeV2ForCausalLM": Family("bailing_moe_v2", llama_variants.bailing_v2, "llama_variants:Bailing"),
    "ChatGLMModel": Family("chatglm", llama_variants.chatglm, "llama_variants:ChatGLM"),
    "DeepseekForCausalLM": Family("deepseek", llama_variants.deepseek),
    "ExaoneForCausalLM": Family("exaone", llama_variants.exaone, "llama_variants:Exaone"),
    "InternLM2ForCausalLM": Family("internlm2", llama_variants.internlm2, "llama_variants:InternLM2"),
    "InternLMForCausalLM": Family("internlm", llama_variants.internlm),
    "MiMoForCausalLM": Family("mimo", llama_variants.mimo),
    "MiniCPMForCausalLM": Family("minicpm", llama_variants.minicpm),
    "OrionForCausalLM": Family("orion", llama_variants.orion),
    "QWenLMHeadModel": Family("qwen", llama_variants.qwen, "llama_variants:Qwen"),
    "DeciLMForCausalLM": Family("nemotron-nas", reshaped.decilm, "reshaped:DeciLM"),
    "OuroForCausalLM": Family("ouro", reshaped.ouro, "reshaped:Ouro"),
    "Plamo3ForCausalLM": Family("plamo3", reshaped.plamo3, "reshaped:Plamo3"),
    "TeleChat2ForCausalLM": Family("telechat", reshaped.telechat2, "reshaped:TeleChat2"),
    "TeleFLMForCausalLM": Family("teleflm", reshaped.teleflm),
    "JAISLMHeadModel": Family("jais", alibi.jais, "gpt2:Jais"),
    "Jais2ForCausalLM": Family("jais2", dense.jais2, "gpt2:Nemotron"),
    "CwmForCausalLM": Family("cwm", dense.cwm),
    "HyperCLOVAXForCausalLM": Family("hyperclovax", dense.hyperclovax, "post_norm:HyperCLOVAX"),
    "AfmoeForCausalLM": Family("afmoe", moe.afmoe, "post_norm:Afmoe"),
    "HYV3ForCausalLM": Family("hy_v3", moe.hy3),
    "SolarOpenForCausalLM": Family("solar_open", moe.solar_open),
    "Zamba2ForCausalLM": Family("zamba2", ssm.zamba2, "zamba2:Zamba2"),
    "MiniCPM3ForCausalLM": Family("minicpm3", mla.minicpm3, "deepseek:Deepseek"),
    "PhimoeForCausalLM": Family("phimoe", moe.phimoe, "phimoe:PhiMoE"),
    "AXK1ForCausalLM": Family("axk1", mla.axk1, "deepseek:AXK1"),
    "Gemma4ForCausalLM": Family("gemma4_text", sliding_window.gemma4, "gemma4:Gemma4"),
    "Gemma4UnifiedForCausalLM": Family("gemma4_unified_text", sliding_window.gemma4, "gemma4:Gemma4"),
    "LongcatFlashForCausalLM": Family("longcat_flash", mla.longcat, "longcat:LongCat"),
    "MellumForCausalLM": Family("mellum", moe.mellum),
    "MiMoV2FlashForCausalLM": Family("mimo_v2_flash", sliding_window.mimo_v2, "mimo_v2:MiMoV2"),
    "Mistral4ForCausalLM": Family("mistral4", mla.mistral4, "deepseek:Deepseek"),
    "VaultGemmaForCausalLM": Family("vaultgemma", sliding_window.vaultgemma, "llama_variants:VaultGemma"),
    "YoutuForCausalLM": Family("youtu", mla.youtu, "deepseek:Deepseek"),
    "BeamForCausalLM": Family("beam", gated.beam, "gated:Beam"),
    "FlintForCausalLM": Family("flint", gated.flint, "gated:Flint"),
    "Kolibri1ForCausalLM": Family("kolibri1", gated.kolibri, "gated:Kolibri"),
    "LagunaForCausalLM": Family("laguna", gated.laguna, "gated:Laguna"),
    "Lfm3ForCausalLM": Family("lfm3", lfm.lfm3, "hybrid:Lfm3"),
    "BailingHybridForCausalLM": Family("bailing_hybrid", linear.ling3, "linear_attention:Ling3"),
    "KimiLinearForCausalLM": Family("kimi_linear", linear.kimi_linear, "linear_attention:KimiLinear"),
    "MiniMaxForCausalLM": Family("minimax", linear.minimax, "linear_attention:MiniMax"),
    "OlmoHybridForCausalLM": Family("olmo_hybrid", linear.olmo_hybrid, "linear_attention:OlmoHybrid"),
    "CLIPModel": Family("clip_text_model", encoder.clip_text, "dual_encoder:ClipText"),
    "SiglipModel": Family("siglip_text_model", encoder.siglip_text, "dual_encoder:SiglipText"),
    "DistilBertModel": Family("distilbert", encoder.distilbert, "bert:DistilBert"),
    "ErnieModel": Family("ernie", encoder.ernie, "bert:Bert"),
    "GteModel": Family("gte", encoder.gte, "bert:RotaryBert"),
    "JinaEmbeddingsV3Model": Family("jina_embeddings_v3", encoder.jina, "bert:RotaryBert"),
    "MPNetModel": Family("mpnet", encoder.mpnet, "bert:MPNet"),
    "NomicBertModel": Family("nomic_bert", encoder.nomic, "bert:RotaryBert"),
    "BertModel": Family("bert", encoder.bert, "bert:Bert"),
    "RobertaModel": Family("roberta", encoder.roberta, "bert:Bert"),
    "XLMRobertaModel": Family("xlm-roberta", encoder.roberta, "bert:Bert"),
    "ModernBertModel": Family("modernbert", encoder.modernbert, "modernbert:ModernBert"),
}
ALIASES = {
    **dict.fromkeys(("AquilaForCausalLM", "AquilaModel", "IQuestCoderForCausalLM"), "LlamaForCausalLM"),
    "BertSpladeSparseEmbeddingModel": "BertModel",
    "BgeM3EmbeddingModel": "XLMRobertaModel",
    "ColBERTModernBertModel": "ModernBertModel",
    "HF_ColBERT": "BertModel",
    "ChatGLMForConditionalGeneration": "ChatGLMModel",
    **dict.fromkeys(("CamembertForMaskedLM", "CamembertForSequenceClassification"), "RobertaModel"),
    **dict.fromkeys(("CamembertForTokenClassification", "CamembertModel"), "RobertaModel"),
    **dict.fromkeys(("EuroBertForMaskedLM", "EuroBertModel"), "LlamaForCausalLM"),
    **dict.fromkeys(("GteNewForSequenceClassification", "GteNewModel", "NewForMaskedLM"), "GteModel"),
    **dict.fromkeys(("NewForSequenceClassification", "NewForTokenClassification", "NewModel"), "GteModel"),
    "GritLM": "MistralForCausalLM",
    "InternLM2ForRewardModel": "InternLM2ForCausalLM",
    "LLaMAForCausalLM": "LlamaForCausalLM",
    "LlamaBidirectionalForSequenceClassification": "LlamaForCausalLM",
    "LlamaBidirectionalModel": "LlamaForCausalLM",
    "MPTForCausalLM": "MptForCausalLM",
    **dict.fromkeys(("MiniMaxM1ForCausalLM", "MiniMaxText01ForCausalLM"), "MiniMaxForCausalLM"),
    "PhiMoEForCausalLM": "PhimoeForCausalLM",
    "Qwen2ForProcessRewardModel": "Qwen2ForCausalLM",
    "Qwen2ForRewardModel": "Qwen2ForCausalLM",
    "RWForCausalLM": "FalconForCausalLM",
    "Rnj1ForCausalLM": "Gemma3ForCausalLM",
    "StableLMEpochForCausalLM": "StableLmForCausalLM",
    "TeleChat3ForCausalLM": "LlamaForCausalLM",
    "TeleChatForCausalLM": "TeleChat2ForCausalLM",
    "XverseForCausalLM": "LlamaForCausalLM",
}
"""Other names of architectures in FAMILIES, mostly from remote-code checkpoints."""
GGUF_FAMILIES = {
    "arcee": GGUFFamily("ArceeForCausalLM", partial(gguf.gguf_decoder, activation="relu2")),
    "baichuan": GGUFFamily("LlamaForCausalLM", gguf.baichuan),
    "bloom": GGUFFamily("BloomForCausalLM", gguf.bloom),
    "chatglm": GGUFFamily("GlmForCausalLM", gguf.chatglm),
    "cohere2": GGUFFamily("Cohere2ForCausalLM", gguf.cohere2),
    "command-r": GGUFFamily("CohereForCausalLM", gguf.cohere),
    "dbrx": GGUFFamily("DbrxForCausalLM", gguf.dbrx),
    "deepseek2": GGUFFamily("DeepseekV3ForCausalLM", gguf.deepseek2),
    "dots1": GGUFFamily("Dots1ForCausalLM", gguf.glm4moe),
    "ernie4_5": GGUFFamily("Ernie4_5ForCausalLM", partial(gguf.gguf_decoder, pairs=True)),
    "exaone": GGUFFamily("ExaoneForCausalLM", gguf.gguf_decoder),
    "falcon": GGUFFamily("FalconForCausalLM", gguf.falcon),
    "gemma": GGUFFamily("GemmaForCausalLM", gguf_gemma.gemma),
    "gemma2": GGUFFamily("Gemma2ForCausalLM", gguf_gemma.gemma2),
    "gemma3": GGUFFamily("Gemma3ForCausalLM", gguf_gemma.gemma3),
    "gemma3n": GGUFFamily("Gemma3nForCausalLM", gguf_gemma.gemma3n),
    "gemma4": GGUFFamily("Gemma4ForCausalLM", gguf_gemma.gemma4),
    "glm4": GGUFFamily("Glm4ForCausalLM", partial(gguf.gguf_decoder, pairs=True, fused_gate_up=True)),
    "glm4moe": GGUFFamily("Glm4MoeForCausalLM", gguf.glm4moe),
    "gpt-oss": GGUFFamily("GptOssForCausalLM", gguf.gpt_oss),
    "gpt2": GGUFFamily("GPT2LMHeadModel", gguf.gpt2),
    "gptneox": GGUFFamily("GPTNeoXForCausalLM", gguf.gptneox),
    "granite": GGUFFamily("GraniteForCausalLM", gguf.granite),
    "granitehybrid": GGUFFamily("GraniteMoeHybridForCausalLM", gguf_hybrid.granitehybrid),
    "granitemoe": GGUFFamily("GraniteMoeForCausalLM", gguf.granitemoe),
    "internlm2": GGUFFamily("LlamaForCausalLM", gguf.llama),
    "lfm2": GGUFFamily("Lfm2ForCausalLM", gguf_hybrid.lfm2),
    "lfm2moe": GGUFFamily("Lfm2MoeForCausalLM", gguf_hybrid.lfm2),
    "llama": GGUFFamily("LlamaForCausalLM", gguf.llama),
    "minicpm": GGUFFamily("MiniCPMForCausalLM", gguf.granite),
    "minimax-m2": GGUFFamily("MiniMaxM2ForCausalLM", gguf.minimax_m2),
    "mpt": GGUFFamily("MptForCausalLM", gguf.mpt),
    "nemotron": GGUFFamily("NemotronForCausalLM", partial(gguf.layer_norm_decoder, activation="relu2")),
    "nemotron_h": GGUFFamily("NemotronHForCausalLM", gguf_hybrid.nemotron_h),
    "nemotron_h_moe": GGUFFamily("NemotronHForCausalLM", gguf_hybrid.nemotron_h),
    "olmo": GGUFFamily("OlmoForCausalLM", gguf.olmo),
    "olmo2": GGUFFamily("Olmo2ForCausalLM", gguf.olmo2),
    "olmoe": GGUFFamily("OlmoeForCausalLM", gguf.olmoe),
    "orion": GGUFFamily("OrionForCausalLM", partial(gguf.layer_norm_decoder, activation="silu")),
    "phi2": GGUFFamily("PhiForCausalLM", gguf.phi2),
    "phi3": GGUFFamily("Phi3ForCausalLM", gguf.phi3),
    "qwen2": GGUFFamily("Qwen2ForCausalLM", gguf.gguf_decoder),
    "qwen2moe": GGUFFamily("Qwen2MoeForCausalLM", gguf.qwen2moe),
    "qwen3": GGUFFamily("Qwen3ForCausalLM", partial(gguf.gguf_decoder, qk_norm="head")),
    "qwen35": GGUFFamily("Qwen3_5ForCausalLM", partial(gguf_hybrid.qwen3next, repeats_keys=True)),
    "qwen35moe": GGUFFamily("Qwen3_5MoeForCausalLM", partial(gguf_hybrid.qwen3next, repeats_keys=True)),
    "qwen3moe": GGUFFamily("Qwen3MoeForCausalLM", gguf.qwen3moe),
    # GGUF files of Qwen3-Next have separate projections of gates, as checkpoints of Qwen3.5 do.
    "qwen3next": GGUFFamily("Qwen3_5MoeForCausalLM", gguf_hybrid.qwen3next),
    "seed_oss": GGUFFamily("SeedOssForCausalLM", gguf.llama),
    "smollm3": GGUFFamily("SmolLM3ForCausalLM", gguf.smollm3),
    "stablelm": GGUFFamily("StableLmForCausalLM", gguf.stablelm),
    "starcoder": GGUFFamily("GPTBigCodeForCausalLM", gguf.gpt2),
    "starcoder2": GGUFFamily("Starcoder2ForCausalLM", gguf.layer_norm_decoder),
}

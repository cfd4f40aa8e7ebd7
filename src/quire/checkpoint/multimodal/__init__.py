"""Tables of multimodal models: functions that read config.json, and the code of processors and encoders."""

from collections.abc import Callable
from typing import NamedTuple

import quire.checkpoint.multimodal.anyres as anyres
import quire.checkpoint.multimodal.aya as aya
import quire.checkpoint.multimodal.clip as clip
import quire.checkpoint.multimodal.deepseek_ocr as deepseek_ocr
import quire.checkpoint.multimodal.dots as dots
import quire.checkpoint.multimodal.gemma as gemma
import quire.checkpoint.multimodal.gemma3n as gemma3n
import quire.checkpoint.multimodal.gemma4 as gemma4
import quire.checkpoint.multimodal.granite_speech as granite_speech
import quire.checkpoint.multimodal.idefics as idefics
import quire.checkpoint.multimodal.intern as intern
import quire.checkpoint.multimodal.kimi as kimi
import quire.checkpoint.multimodal.lfm2 as lfm2
import quire.checkpoint.multimodal.llama4 as llama4
import quire.checkpoint.multimodal.llava as llava
import quire.checkpoint.multimodal.minicpm as minicpm
import quire.checkpoint.multimodal.omni as omni
import quire.checkpoint.multimodal.ovis as ovis
import quire.checkpoint.multimodal.paddle as paddle
import quire.checkpoint.multimodal.paligemma as paligemma
import quire.checkpoint.multimodal.phi4 as phi4
import quire.checkpoint.multimodal.pixtral as pixtral
import quire.checkpoint.multimodal.qwen as qwen
import quire.checkpoint.multimodal.qwen3_asr as qwen3_asr
import quire.checkpoint.multimodal.qwen_audio as qwen_audio
import quire.checkpoint.multimodal.retrieval as retrieval
import quire.checkpoint.multimodal.step3 as step3
import quire.checkpoint.multimodal.whisper as whisper
from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.reader import ConfigReader

MEDIA_FAMILIES: dict[str, Callable[[ConfigReader], tuple[ConfigReader, MediaFacts | None]]] = {
    "AudioFlamingo3ForConditionalGeneration": qwen_audio.audio_flamingo3,
    "AyaVisionForConditionalGeneration": aya.aya_vision,
    "CLIPModel": clip.clip,
    "SiglipModel": clip.siglip,
    "ColPaliForRetrieval": retrieval.col_pali,
    "ColQwen2ForRetrieval": retrieval.col_qwen2,
    "Cohere2VisionForConditionalGeneration": aya.cohere2_vision,
    "Glm46VForConditionalGeneration": qwen.glm46v,
    "Glm4vForConditionalGeneration": qwen.glm4v,
    "Glm4vMoeForConditionalGeneration": qwen.glm4v,
    "GlmAsrForConditionalGeneration": qwen_audio.glm_asr,
    "GlmOcrForConditionalGeneration": qwen.glm_ocr,
    "Qwen2AudioForConditionalGeneration": qwen_audio.qwen2_audio,
    "Qwen2_5OmniForConditionalGeneration": omni.qwen2_5_omni,
    "Qwen2_5OmniModel": omni.qwen2_5_omni,
    "Qwen2_5OmniThinkerForConditionalGeneration": omni.qwen2_5_omni,
    "Qwen2VLForConditionalGeneration": qwen.qwen2_vl,
    "Qwen2_5_VLForConditionalGeneration": qwen.qwen2_5_vl,
    "Qwen3ASRForConditionalGeneration": qwen3_asr.qwen3_asr,
    "Qwen3OmniMoeForConditionalGeneration": omni.qwen3_omni,
    "Qwen3OmniMoeThinkerForConditionalGeneration": omni.qwen3_omni,
    "Qwen3VLForConditionalGeneration": qwen.qwen3_vl("Qwen3ForCausalLM"),
    "Qwen3VLMoeForConditionalGeneration": qwen.qwen3_vl("Qwen3MoeForCausalLM"),
    "Qwen3_5ForConditionalGeneration": qwen.qwen3_vl("Qwen3_5ForCausalLM", sections=(11, 11, 10), deep=False),
    "Qwen3_5MoeForConditionalGeneration": qwen.qwen3_vl(
        "Qwen3_5MoeForCausalLM", sections=(11, 11, 10), deep=False
    ),
    "DeepseekOCR2ForCausalLM": deepseek_ocr.deepseek_ocr2,
    "DeepseekOCRForCausalLM": deepseek_ocr.deepseek_ocr,
    "DotsOCRForCausalLM": dots.dots_ocr,
    "Exaone4_5_ForConditionalGeneration": qwen.exaone45,
    "Gemma3ForConditionalGeneration": gemma.gemma3,
    "Gemma3nForConditionalGeneration": gemma3n.gemma3n,
    "Gemma4ForConditionalGeneration": gemma4.gemma4,
    "Gemma4UnifiedForConditionalGeneration": gemma4.gemma4_unified,
    "GraniteSpeechForConditionalGeneration": granite_speech.granite_speech,
    "GraniteSpeechPlusForConditionalGeneration": granite_speech.granite_speech,
    "HCXVisionV2ForCausalLM": qwen.hyperclovax,
    "HyperCLOVAXVisionV2ForConditionalGeneration": qwen.hyperclovax,
    "Idefics3ForConditionalGeneration": idefics.idefics3,
    "InternVLChatModel": intern.internvl_chat,
    "InternVLForConditionalGeneration": intern.internvl,
    "KimiK25ForConditionalGeneration": kimi.kimi_k25,
    "KimiVLForConditionalGeneration": kimi.kimi_vl,
    "Kimi_K25ForConditionalGeneration": kimi.kimi_k25,
    "Lfm2VlForConditionalGeneration": lfm2.lfm2_vl,
    "Lfm3VlForConditionalGeneration": lfm2.lfm3_vl,
    "LightOnOCRForConditionalGeneration": pixtral.lighton_ocr,
    "LightOnOcrForConditionalGeneration": pixtral.lighton_ocr,
    "Llama4ForConditionalGeneration": llama4.llama4,
    "LlavaForConditionalGeneration": llava.llava,
    "LlavaNextForConditionalGeneration": anyres.llava_next,
    "LlavaNextVideoForConditionalGeneration": anyres.llava_next_video,
    "LlavaOnevisionForConditionalGeneration": anyres.llava_onevision,
    "MiniCPMV": minicpm.minicpm_v,
    "MiniCPMV4_6ForConditionalGeneration": minicpm.minicpm_v46,
    "Mistral3ForConditionalGeneration": pixtral.mistral3,
    "Ovis2ForConditionalGeneration": ovis.ovis2,
    "PaddleOCRVLForConditionalGeneration": paddle.paddleocr_vl,
    "PaliGemmaForConditionalGeneration": paligemma.paligemma,
    "Phi4MMForCausalLM": phi4.phi4,
    "Phi4MultimodalForCausalLM": phi4.phi4,
    "QianfanOCRForConditionalGeneration": intern.qianfan_ocr,
    "SmolVLMForConditionalGeneration": idefics.idefics3,
    "Step3VLForConditionalGeneration": step3.step3,
    "Step3p7ForConditionalGeneration": step3.step37,
    "StepVLForConditionalGeneration": step3.step_vl,
    "VoxtralForConditionalGeneration": qwen_audio.voxtral,
    "WhisperForConditionalGeneration": whisper.whisper,
}
"""Functions that read config.json, by architecture. Each returns the keys of the decoder, as in a text-only
config.json (`architectures` is then a key of FAMILIES), and the multimodal inputs; None: only the decoder is
supported."""


class MediaCode(NamedTuple):
    """The code of a family of multimodal models, as `file:Class`."""

    processor: str
    """Class that processes images, audio and videos, in `quire/multimodal/processors/`."""
    tower: str
    """Class of the encoder, in `quire/models/towers/`."""


MEDIA_CODE = {
    "audio_flamingo3": MediaCode("qwen_audio:AudioFlamingoProcessor", "whisper:QwenAudio"),
    "aya_vision": MediaCode("aya:AyaProcessor", "clip:Aya"),
    "clip": MediaCode("clip:DualProcessor", "clip:ClipEmbedding"),
    "cohere2_vision": MediaCode("aya:Cohere2VisionProcessor", "clip:Aya"),
    "deepseek_ocr": MediaCode("deepseek_ocr:DeepseekOCRProcessor", "deepseek_ocr:DeepseekOCR"),
    "deepseek_ocr2": MediaCode("deepseek_ocr:DeepseekOCR2Processor", "deepseek_ocr2:DeepseekOCR2"),
    "dots_ocr": MediaCode("dots:DotsProcessor", "ocr:DotsOCR"),
    "exaone4_5": MediaCode("qwen:PlainGridProcessor", "qwen_vl:Qwen2_5VL"),
    "gemma3": MediaCode("gemma:Gemma3Processor", "clip:Gemma3"),
    "gemma3n": MediaCode("gemma3n:Gemma3nProcessor", "gemma3n:Gemma3nTower"),
    "gemma4": MediaCode("gemma4:Gemma4Processor", "gemma4_audio:Gemma4Tower"),
    "glm_asr": MediaCode("qwen_audio:GlmAsrProcessor", "whisper:GlmAsr"),
    "glm4v": MediaCode("qwen:GridProcessor", "glm4v:Glm4v"),
    "granite_speech": MediaCode("granite_speech:GraniteSpeechProcessor", "granite_speech:GraniteSpeech"),
    "hyperclovax": MediaCode("qwen:PlainGridProcessor", "qwen_vl:HyperCLOVAX"),
    "idefics3": MediaCode("idefics:Idefics3Processor", "clip:Idefics3"),
    "internvl": MediaCode("intern:InternVLProcessor", "intern:InternVL"),
    "kimi_vl": MediaCode("kimi:KimiVLProcessor", "kimi:KimiVL"),
    "lfm2_vl": MediaCode("lfm2:Lfm2VLProcessor", "lfm2:Lfm2VL"),
    "lfm3_vl": MediaCode("qwen:PlainGridProcessor", "lfm3:Lfm3VL"),
    "lighton_ocr": MediaCode("pixtral:PixtralProcessor", "pixtral:Pixtral"),
    "llama4": MediaCode("llama4:Llama4Processor", "llama4:Llama4Tower"),
    "llava": MediaCode("llava:LlavaProcessor", "clip:Llava"),
    "llava_next": MediaCode("anyres:AnyresProcessor", "clip:Anyres"),
    "llava_next_video": MediaCode("anyres:PooledVideoProcessor", "clip:PooledVideo"),
    "llava_onevision": MediaCode("anyres:AnyresProcessor", "clip:Anyres"),
    "minicpm_v": MediaCode("minicpm:MiniCPMVProcessor", "minicpm:MiniCPMV"),
    "ovis2": MediaCode("ovis:Ovis2Processor", "ovis:Ovis2"),
    "paddleocr_vl": MediaCode("qwen:GridProcessor", "ocr:PaddleOCRVL"),
    "paligemma": MediaCode("paligemma:PaliGemmaProcessor", "clip:PaliGemma"),
    "phi4": MediaCode("phi4:Phi4Processor", "phi4:Phi4"),
    "pixtral": MediaCode("pixtral:PixtralProcessor", "pixtral:Pixtral"),
    "qwen2_5_omni": MediaCode("omni:OmniProcessor", "omni:Omni"),
    "qwen2_5_vl": MediaCode("qwen:GridProcessor", "qwen_vl:Qwen2_5VL"),
    "qwen2_audio": MediaCode("qwen_audio:QwenAudioProcessor", "whisper:QwenAudio"),
    "qwen2_vl": MediaCode("qwen:GridProcessor", "qwen_vl:Qwen2VL"),
    "qwen3_asr": MediaCode("qwen_audio:Qwen3ASRProcessor", "qwen3_omni:Qwen3ASR"),
    "qwen3_omni": MediaCode("omni:Qwen3OmniProcessor", "qwen3_omni:Qwen3Omni"),
    "qwen3_vl": MediaCode("qwen:GridProcessor", "qwen_vl:Qwen3VL"),
    "siglip": MediaCode("clip:DualProcessor", "clip:SiglipEmbedding"),
    "step3": MediaCode("step3:StepVLProcessor", "step3:Step3"),
    "step_vl": MediaCode("step3:StepVLProcessor", "step3:StepVL"),
    "voxtral": MediaCode("qwen_audio:VoxtralProcessor", "whisper:QwenAudio"),
    "whisper": MediaCode("whisper:WhisperProcessor", "whisper:WhisperTower"),
}
"""Processor and encoder, by `MediaFacts.family`."""

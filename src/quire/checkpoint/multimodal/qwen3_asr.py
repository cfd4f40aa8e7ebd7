"""Qwen3-ASR: the audio encoder of Qwen3-Omni, and a Qwen3 decoder."""

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.common import part, text_part
from quire.checkpoint.multimodal.omni import OmniAudioFacts, marks, thinker
from quire.checkpoint.multimodal.whisper import encoder_of
from quire.checkpoint.reader import ConfigReader

_SIZES = {"encoder_layers": 24, "d_model": 1024, "encoder_ffn_dim": 4096, "encoder_attention_heads": 16}


def qwen3_asr(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    """Read Qwen3-ASR in the format of transformers, or the `thinker_config` of the first checkpoints. Without
    images all sections of M-RoPE have equal positions, so that plain RoPE is used."""
    keys = thinker(keys)
    decoder, audio = part(keys, "text_config"), part(keys, "audio_config")
    for name in ("rope_scaling", "rope_parameters"):
        rope = decoder.get(name)
        if isinstance(rope, dict):
            plain = {key: value for key, value in rope.items() if not key.startswith("mrope")}
            decoder = decoder.but(**{name: plain | {"rope_type": rope.get("rope_type") or "default"}})
    tied = keys.flag("tie_word_embeddings", decoder.flag("tie_word_embeddings", True))
    decoder = decoder.but(model_type="qwen3", tie_word_embeddings=tied)
    text = text_part(keys.but(text_config=decoder.values))
    sizes = {key: audio.size(key, size) for key, size in _SIZES.items()}
    window, seen = 2 * audio.size("n_window", 50), audio.size("n_window_infer", 800)
    if window % 4 or seen % window:
        raise audio.wrong("n_window_infer", f"a multiple of {window} frames, the chunks of n_window")
    tower = OmniAudioFacts(
        encoder=encoder_of(audio.but(**sizes)),
        window=window,
        size_out=audio.size("output_dim", 3584),
        **marks(keys, 151676, 151669, 151670),
        seen=seen // window,
        channels=audio.size("downsample_hidden_size", 480),
    )
    if tower.size_out != text.size("hidden_size"):
        raise audio.wrong("output_dim", f"{text.size('hidden_size')}, the hidden size of the decoder")
    return text, MediaFacts("qwen3_asr", ("audio",), tower)

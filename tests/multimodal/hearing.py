"""Tiny audio models, saved to disk with their transformers models and processors."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tiny_seeing import TEXT, make_tokenizer, save_tiny

from quire.multimodal.processors import Audio

RATE = 16000
SECONDS = 2
"""Length of the longest audio."""
MARK = "<|audio_bos|><|AUDIO|><|audio_eos|>"
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if 'audio' in p or 'audio_url' in p or p.type == 'audio' %}" + MARK + "\n"
    "{% elif 'text' in p %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def save_qwen_audio(path: Path) -> tuple[Any, Any]:
    """Save Qwen2-Audio and return the model and the processor."""
    import transformers as hf

    tokenizer = make_tokenizer(["<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"])
    tokenizer.chat_template = TEMPLATE
    features = hf.WhisperFeatureExtractor(feature_size=20, chunk_length=SECONDS)
    processor = hf.Qwen2AudioProcessor(features, tokenizer, chat_template=TEMPLATE)
    config = hf.Qwen2AudioConfig(
        audio_config={
            "model_type": "qwen2_audio_encoder",
            "num_mel_bins": 20,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 40,
            "d_model": 32,
            "max_source_positions": SECONDS * 50,
        },
        text_config=hf.Qwen2Config(**TEXT).to_dict(),
        audio_token_index=processor.audio_token_id,
    )
    return _saved(path, "Qwen2AudioForConditionalGeneration", config, processor), processor


def save_flamingo(path: Path) -> tuple[Any, Any]:
    """Save Audio Flamingo for audio of three windows, and return the model and the processor."""
    import transformers as hf

    tokenizer = make_tokenizer(["<sound>", "<pad>"])
    tokenizer.pad_token = "<pad>"
    features = hf.WhisperFeatureExtractor(feature_size=20, chunk_length=SECONDS)
    processor = hf.AudioFlamingo3Processor(features, tokenizer, max_audio_len=3 * SECONDS)
    config = hf.AudioFlamingo3Config(
        audio_config={
            "model_type": "audioflamingo3_encoder",
            "num_mel_bins": 20,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 40,
            "hidden_size": 32,
            "max_source_positions": SECONDS * 50,
        },
        text_config=hf.Qwen2Config(**TEXT).to_dict(),
        audio_token_id=processor.audio_token_id,
    )
    return _saved(path, "AudioFlamingo3ForConditionalGeneration", config, processor), processor


def save_glm_asr(path: Path) -> tuple[Any, Any]:
    """Save GLM-ASR for audio of three windows, and return the model and the processor."""
    import transformers as hf

    tokenizer = make_tokenizer(["<|pad|>", "<pad>"])
    tokenizer.pad_token = "<pad>"
    features = hf.WhisperFeatureExtractor(feature_size=20, chunk_length=SECONDS)
    processor = hf.GlmAsrProcessor(features, tokenizer, max_audio_len=3 * SECONDS)
    config = hf.GlmAsrConfig(
        audio_config={
            "model_type": "glmasr_encoder",
            "num_mel_bins": 20,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 128,
            "hidden_size": 32,
            "max_position_embeddings": SECONDS * 50,
            "initializer_range": 0.2,
        },
        text_config=hf.LlamaConfig(**TEXT, initializer_range=0.2).to_dict(),
        audio_token_id=processor.audio_token_id,
        tie_word_embeddings=False,
    )
    return _saved(path, "GlmAsrForConditionalGeneration", config, processor), processor


def save_qwen3_asr(path: Path) -> tuple[Any, Any]:
    """Save Qwen3-ASR, with windows of four chunks, and return the model and the processor."""
    import transformers as hf

    marks = ["<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>", "<pad>"]
    tokenizer = make_tokenizer(marks)
    tokenizer.pad_token = "<pad>"
    for name, mark in zip(("audio_bos_token", "audio_token", "audio_eos_token"), marks, strict=False):
        tokenizer._set_model_specific_special_tokens({name: mark})
    features = hf.Qwen3ASRFeatureExtractor(feature_size=20)
    processor = hf.Qwen3ASRProcessor(features, tokenizer)
    begin, audio, end = tokenizer.convert_tokens_to_ids(marks[:3])
    config = hf.Qwen3ASRConfig(
        audio_config={
            "num_mel_bins": 20,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 40,
            "d_model": 32,
            "output_dim": 32,
            "n_window_infer": 400,
            "downsample_hidden_size": 6,
            "initializer_range": 0.2,
        },
        text_config=hf.Qwen3Config(**TEXT, head_dim=16, initializer_range=0.2).to_dict(),
        audio_token_id=audio,
        audio_start_token_id=begin,
        audio_end_token_id=end,
        eos_token_id=159,
        pad_token_id=tokenizer.pad_token_id,
    )
    return _saved(path, "Qwen3ASRForConditionalGeneration", config, processor), processor


STARTS = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"


def save_whisper(path: Path, **settings: Any) -> tuple[Any, Any]:
    """Save Whisper and return the model and the processor."""
    import transformers as hf

    marks = [f"<|{name}|>" for name in ("endoftext", *STARTS[2:-2].split("|><|"))]
    tokenizer = make_tokenizer(marks)
    tokenizer.eos_token = marks[0]
    features = hf.WhisperFeatureExtractor(feature_size=20, chunk_length=SECONDS)
    ends = dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"), tokenizer.eos_token_id)
    ends["decoder_start_token_id"] = tokenizer.convert_tokens_to_ids(marks[1])
    config = hf.WhisperConfig(
        vocab_size=160,
        num_mel_bins=20,
        d_model=32,
        encoder_layers=2,
        encoder_attention_heads=2,
        encoder_ffn_dim=40,
        decoder_layers=3,
        decoder_attention_heads=4,
        decoder_ffn_dim=48,
        max_source_positions=SECONDS * 50,
        max_target_positions=64,
        **(ends | {"init_std": 0.6, "tie_word_embeddings": False} | settings),
    )
    model = save_tiny(path, "WhisperForConditionalGeneration", config, features)
    tokenizer.save_pretrained(path)
    return model, AudioProcessor(features, tokenizer)


SPEECH = "endoftext startoftranscript en de translate transcribe startofprev nospeech notimestamps"
"""Special tokens of a transcription model. The tokens after them are timestamps."""


def save_scribe(path: Path, **settings: Any) -> tuple[Any, Any]:
    """Save Whisper with every special token that the routes need, and 43 timestamps."""
    marks = [f"<|{name}|>" for name in SPEECH.split()]
    tokenizer = make_tokenizer(marks)
    tokenizer.eos_token = marks[0]
    ends = dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"), tokenizer.eos_token_id)
    start = tokenizer.convert_tokens_to_ids(marks[1])
    model, heard = save_whisper(path, **ends, decoder_start_token_id=start, **settings)
    model_settings = {
        "no_timestamps_token_id": tokenizer.convert_tokens_to_ids(marks[-1]),
        "max_initial_timestamp_index": 20,
    }
    for name, value in model_settings.items():
        setattr(model.generation_config, name, value)
    model.generation_config.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return model, AudioProcessor(heard.features, tokenizer)


class AudioProcessor(NamedTuple):
    """Feature extractor and tokenizer: transformers' own processor requires a tokenizer of Whisper."""

    features: Any
    tokenizer: Any


def save_voxtral(path: Path) -> tuple[Any, Any]:
    """Save Voxtral and return the model and its feature extractor: the whole processor needs
    mistral-common."""
    import transformers as hf

    tokenizer = make_tokenizer(["[BEGIN_AUDIO]", "[AUDIO]", "<s>", "[INST]", "[/INST]", "[TRANSCRIBE]"])
    features = hf.WhisperFeatureExtractor(feature_size=20, chunk_length=SECONDS)
    config = hf.VoxtralConfig(
        audio_config={
            "model_type": "voxtral_encoder",
            "num_mel_bins": 20,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 128,
            "hidden_size": 32,
            "max_source_positions": SECONDS * 50,
        },
        text_config=hf.LlamaConfig(**TEXT, head_dim=8).to_dict(),
        audio_token_id=tokenizer.convert_tokens_to_ids("[AUDIO]"),
    )
    tokenizer.save_pretrained(path)
    return _saved(path, "VoxtralForConditionalGeneration", config, features), (features, tokenizer)


def _saved(path: Path, architecture: str, config: Any, processor: Any) -> Any:
    model = save_tiny(path, architecture, config, processor)
    if architecture != "Qwen2AudioForConditionalGeneration":
        return model
    # Published checkpoints have `language_model.model.`; transformers 5.22 writes one part more.
    weights = load_file(path / "model.safetensors")
    published = {
        name.replace("model.model.model.", "model.model."): weight for name, weight in weights.items()
    }
    save_file(published, path / "model.safetensors", {"format": "pt"})
    return model


def noise(count: int, seed: int = 0) -> NDArray[np.float32]:
    """Return a rising tone with noise."""
    random = np.random.default_rng([count, seed])
    tone = np.sin(np.arange(count) ** 1.3 / (5 + seed))
    return (0.3 * tone + 0.05 * random.standard_normal(count)).astype(np.float32)


def sound(count: int, seed: int = 0) -> Audio:
    return Audio(noise(count, seed), RATE)

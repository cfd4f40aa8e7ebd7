"""Qwen2-Audio and Audio Flamingo 3: Whisper's encoder in front of a decoder of Qwen2's kind."""

from dataclasses import dataclass

from quire.config.facts import MediaFacts
from quire.config.keys import Keys
from quire.config.media.parts import part, text_part, token_id


@dataclass(frozen=True, slots=True)
class WhisperFacts:
    """An encoder of sounds."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    mels: int
    """Pitches of a moment."""
    positions: int
    """States of the longest sound; each is of two moments."""
    activation: str


@dataclass(frozen=True, slots=True)
class QwenAudioFacts:
    """An encoder, of whose states two become a vector."""

    encoder: WhisperFacts
    size_out: int
    """Numbers of a vector: the decoder's hidden size."""
    audio_id: int
    """The token in whose places a sound's vectors stand."""
    activation: str = ""
    """Between the two products of the projector; empty: it is a single one."""
    bias: bool = True

    @property
    def moments(self) -> int:
        """Of what the encoder hears at once."""
        return 2 * self.encoder.positions

    @property
    def tokens(self) -> int:
        """Vectors of that."""
        return self.encoder.positions // 2


def whisper(audio: Keys) -> WhisperFacts:
    """What is not said is as in Whisper-large-v3; the files of some have the names of today's models."""
    return WhisperFacts(
        layers=audio.size("encoder_layers", audio.size("num_hidden_layers", 32)),
        hidden=audio.size("d_model", audio.size("hidden_size", 1280)),
        intermediate=audio.size("encoder_ffn_dim", audio.size("intermediate_size", 5120)),
        heads=audio.size("encoder_attention_heads", audio.size("num_attention_heads", 20)),
        mels=audio.size("num_mel_bins", 128),
        positions=audio.size("max_source_positions", 1500),
        activation=audio.get("activation_function") or "gelu",
    )


def qwen2_audio(keys: Keys) -> tuple[Keys, MediaFacts]:
    text = text_part(keys, default="qwen2")
    tower = QwenAudioFacts(
        encoder=whisper(part(keys, "audio_config")),
        size_out=text.size("hidden_size"),
        audio_id=token_id(keys, "audio_token_index", "audio_token_id", default=151646),
    )
    return text, MediaFacts("qwen2_audio", ("audio",), tower)


def audio_flamingo3(keys: Keys) -> tuple[Keys, MediaFacts]:
    text = text_part(keys, default="qwen2")
    tower = QwenAudioFacts(
        encoder=whisper(part(keys, "audio_config")),
        size_out=text.size("hidden_size"),
        audio_id=token_id(keys, "audio_token_id", default=151669),
        activation=keys.get("projector_hidden_act") or "gelu",
        bias=keys.flag("projector_bias", True),
    )
    return text, MediaFacts("audio_flamingo3", ("audio",), tower)

"""Qwen2-Audio, Audio Flamingo 3 and Voxtral: Whisper's encoder and a decoder."""

from dataclasses import dataclass

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.common import part, text_part, token_id
from quire.checkpoint.multimodal.whisper import WhisperFacts, encoder_of
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class QwenAudioFacts:
    """An audio encoder, and the projector that turns its hidden states into decoder tokens."""

    encoder: WhisperFacts
    size_out: int
    """Output size: the decoder's hidden size."""
    audio_id: int
    """Placeholder token of audio."""
    activation: str = ""
    """Activation between the two linear layers of the projector; empty: the projector has one linear
    layer."""
    bias: bool = True
    stack: int = 0
    """Number of encoder hidden states that are concatenated for one token; 0: the mean of two hidden
    states."""

    @property
    def num_frames(self) -> int:
        """Return the number of mel frames per encoder input."""
        return self.encoder.num_frames

    @property
    def tokens(self) -> int:
        """Return the number of tokens per encoder input."""
        return self.encoder.positions // self.states

    @property
    def states(self) -> int:
        """Return the number of encoder hidden states per token."""
        return self.stack or 2

    @property
    def num_weights(self) -> int:
        """Return the approximate number of parameters."""
        return self.encoder.num_weights + self.size_out * (
            max(1, self.stack) * self.encoder.hidden + (self.size_out if self.activation else 0)
        )


def qwen2_audio(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    text, encoder = text_part(keys, default="qwen2"), encoder_of(part(keys, "audio_config"))
    audio_id = token_id(keys, "audio_token_index", "audio_token_id", default=151646)
    tower = QwenAudioFacts(encoder, text.size("hidden_size"), audio_id)
    return text, MediaFacts("qwen2_audio", ("audio",), tower)


def audio_flamingo3(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    text = text_part(keys, default="qwen2")
    tower = QwenAudioFacts(
        encoder=encoder_of(part(keys, "audio_config")),
        size_out=text.size("hidden_size"),
        audio_id=token_id(keys, "audio_token_id", default=151669),
        activation=keys.get("projector_hidden_act") or "gelu",
        bias=keys.flag("projector_bias", True),
    )
    return text, MediaFacts("audio_flamingo3", ("audio",), tower)


def voxtral(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    text = text_part(keys)
    encoder = encoder_of(part(keys, "audio_config"))
    tower = QwenAudioFacts(
        encoder=encoder,
        size_out=text.size("hidden_size"),
        audio_id=token_id(keys, "audio_token_id", default=24),
        activation=keys.get("projector_hidden_act") or "gelu",
        bias=False,
        stack=encoder.intermediate // encoder.hidden,
    )
    if encoder.intermediate % encoder.hidden or encoder.positions % tower.states:
        raise ConfigError(
            f"{keys.source}: {encoder.positions} encoder states of size {encoder.hidden} cannot be stacked "
            f"to size {encoder.intermediate}"
        )
    return text, MediaFacts("voxtral", ("audio",), tower, transcribes=True)

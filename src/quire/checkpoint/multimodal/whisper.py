"""Whisper: an audio encoder, with states that the decoder cross-attends to."""

from dataclasses import dataclass

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.reader import ConfigReader


@dataclass(frozen=True, slots=True)
class WhisperFacts:
    """Sizes of an audio encoder with Whisper's layers, which other audio models use as well."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    mels: int
    """Mel bands per frame."""
    positions: int
    """Number of encoder hidden states of the longest input; each stands for two mel frames."""
    activation: str

    @property
    def num_frames(self) -> int:
        """Return the number of mel frames per encoder input."""
        return 2 * self.positions

    @property
    def num_weights(self) -> int:
        """Return the approximate number of parameters, without biases."""
        layer = self.hidden * (4 * self.hidden + 2 * self.intermediate)
        return self.layers * layer + self.hidden * (3 * self.mels + 3 * self.hidden + self.positions)


def encoder_of(audio: ConfigReader) -> WhisperFacts:
    """Read an audio encoder by Whisper's keys or newer key names. Defaults are those of Whisper-large-v3."""
    return WhisperFacts(
        layers=audio.size("encoder_layers", audio.size("num_hidden_layers", 32)),
        hidden=audio.size("d_model", audio.size("hidden_size", 1280)),
        intermediate=audio.size("encoder_ffn_dim", audio.size("intermediate_size", 5120)),
        heads=audio.size("encoder_attention_heads", audio.size("num_attention_heads", 20)),
        mels=audio.size("num_mel_bins", 128),
        positions=audio.size("max_source_positions", 1500),
        activation=audio.get("activation_function") or "gelu",
    )


def whisper(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    encoder = encoder_of(keys)
    return keys, MediaFacts(
        "whisper", ("audio",), encoder, num_cross_states=encoder.positions, transcribes=True
    )

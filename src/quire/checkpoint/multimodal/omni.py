"""The thinkers of Qwen2.5-Omni and Qwen3-Omni: a vision encoder and an audio encoder."""

from dataclasses import dataclass, replace

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.common import part
from quire.checkpoint.multimodal.qwen import GridFacts, qwen2_5_vl, qwen3_vl
from quire.checkpoint.multimodal.whisper import WhisperFacts, encoder_of
from quire.checkpoint.reader import ConfigReader


@dataclass(frozen=True, slots=True)
class OmniAudioFacts:
    """The audio encoder: Whisper's layers over chunks of audio. Two hidden states become one token; if
    `channels` is set, each hidden state (of eight mel frames) becomes one token."""

    encoder: WhisperFacts
    window: int
    """Mel frames per chunk."""
    size_out: int
    audio_id: int
    """Placeholder token of audio."""
    start_id: int
    """Token before the placeholders of an audio clip."""
    end_id: int
    """Token after the placeholders of an audio clip."""
    seen: int = 0
    """Number of consecutive chunks whose hidden states attend to each other; 0: attention stays within a
    chunk."""
    channels: int = 0
    """Channels of 2-D convolutions over time and mel bands; 0: the convolutions are over time only."""

    @property
    def num_weights(self) -> int:
        """Return the approximate number of parameters; positions are computed, not stored."""
        encoder = self.encoder
        layers = encoder.num_weights - encoder.hidden * (
            encoder.positions + 3 * encoder.mels + 3 * encoder.hidden
        )
        if not self.channels:
            return encoder.num_weights + encoder.hidden * (self.size_out - encoder.positions)
        convolutions = 9 * self.channels * (1 + 2 * self.channels)
        bands = -(-encoder.mels // 8) * self.channels
        return layers + convolutions + encoder.hidden * (bands + encoder.hidden + self.size_out)


@dataclass(frozen=True, slots=True)
class OmniFacts:
    """The two encoders of an Omni model."""

    grid: GridFacts
    sound: OmniAudioFacts

    @property
    def num_weights(self) -> int:
        return self.grid.num_weights + self.sound.num_weights


_MODALITIES = ("image", "video", "audio")


def qwen2_5_omni(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    keys = thinker(keys)
    pace = keys.number("position_id_per_seconds", 25.0)
    vision = part(keys, "vision_config").but(tokens_per_second=pace).values
    text, media = qwen2_5_vl(keys.but(vision_config=vision))
    audio = part(keys, "audio_config")
    sound = OmniAudioFacts(
        encoder=encoder_of(audio),
        window=2 * audio.size("n_window", 100),
        size_out=audio.size("output_dim", 3584),
        **marks(keys, 151646, 151647, 151648),
    )
    return text, MediaFacts("qwen2_5_omni", _MODALITIES, OmniFacts(media.tower, sound))


def qwen3_omni(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    keys = thinker(keys)
    text, media = qwen3_vl("Qwen3MoeForCausalLM")(keys)
    grid = replace(media.tower, times="", pace=keys.number("position_id_per_seconds", 25.0))
    audio = part(keys, "audio_config")
    window = 2 * audio.size("n_window", 50)
    sound = OmniAudioFacts(
        encoder=encoder_of(audio),
        window=window,
        size_out=audio.size("output_dim", 3584),
        **marks(keys, 151675, 151669, 151670),
        seen=max(1, audio.size("n_window_infer", 800) // window),
        channels=audio.size("downsample_hidden_size", 480),
    )
    return text, replace(media, family="qwen3_omni", modalities=_MODALITIES, tower=OmniFacts(grid, sound))


def thinker(keys: ConfigReader) -> ConfigReader:
    """Return the keys of the thinker (the part that outputs text), with token ids under the names of other
    models."""
    if isinstance(section := keys.get("thinker_config"), dict):
        keys = keys.but(**section)
    if keys.get("tie_word_embeddings") is not None:  # the top-level value overrides the decoder's
        text = part(keys, "text_config").but(tie_word_embeddings=keys.flag("tie_word_embeddings"))
        keys = keys.but(text_config=text.values)
    for kind in ("image", "video", "audio"):
        if keys.get(f"{kind}_token_id") is None and keys.get(f"{kind}_token_index") is not None:
            keys = keys.but(**{f"{kind}_token_id": keys.get(f"{kind}_token_index")})
    return keys


def marks(keys: ConfigReader, audio: int, start: int, end: int) -> dict[str, int]:
    """Return the fields audio_id, start_id and end_id of OmniAudioFacts; `audio`, `start` and `end` are the
    defaults for ids that config.json does not set."""
    names = {"audio_id": ("audio_token_id", audio), "start_id": ("audio_start_token_id", start)}
    names["end_id"] = ("audio_end_token_id", end)
    return {name: (keys.token_ids(key) or (default,))[0] for name, (key, default) in names.items()}

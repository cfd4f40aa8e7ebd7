"""Phi-4-multimodal: SigLIP over the tiles of an image, and a conformer over audio."""

from dataclasses import dataclass
from typing import Any

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.common import ViTFacts, part, read_vit, token_id
from quire.checkpoint.reader import ConfigReader
from quire.logs import get_logger, warn_once

logger = get_logger(__name__)

_SIGLIP: dict[str, Any] = {
    "layers": 27,
    "hidden": 1152,
    "intermediate": 4304,
    "heads": 16,
    "image": 448,
    "patch": 14,
}
"""Sizes of the vision encoder, which the published config.json does not have."""
_PUBLISHED_KEYS = {
    "hidden_size": "attention_dim",
    "num_attention_heads": "attention_heads",
    "intermediate_size": "linear_units",
    "depthwise_separable_out_channel": "depthwise_seperable_out_channel",
}
"""Keys of the audio encoder in the published config.json, by their names in transformers."""


@dataclass(frozen=True, slots=True)
class Phi4AudioFacts:
    """A conformer after convolutions that reduce time and mel bins."""

    layers: int
    hidden: int
    heads: int
    intermediate: int
    mels: int
    kernel: int
    """Kernel size of the convolution in a layer."""
    channels: int
    """Channels of the convolutions before the layers."""
    halvings: int
    """Number of convolutions with stride 2 before the layers."""
    distance: int
    """Largest relative position with an attention bias of its own."""

    @property
    def num_bins(self) -> int:
        """Return the number of mel bins after the convolutions."""
        factor: int = 2**self.halvings
        return -(-self.mels // factor)

    @property
    def num_weights(self) -> int:
        """Return the approximate number of parameters."""
        size = self.hidden
        layer = size * (6 * self.intermediate + 8 * size + self.kernel + 26) + 4 * self.intermediate
        channels = self.channels * (self.num_bins * size + (self.halvings - 1) * (self.channels + 11) + 10)
        return self.layers * layer + channels + 2 * self.distance * self.heads


@dataclass(frozen=True, slots=True)
class Phi4Facts:
    """Both encoders, and the size of their outputs."""

    vit: ViTFacts
    depth: int
    """Number of layers of the vision encoder that are used."""
    sound: Phi4AudioFacts
    size_out: int
    image_id: int
    audio_id: int

    @property
    def side(self) -> int:
        """Return the number of embeddings per side of a tile."""
        return self.vit.side // 2

    @property
    def num_weights(self) -> int:
        size = self.size_out
        projectors = size * (self.vit.hidden + 2 * self.sound.hidden + 3 * size)
        return self.vit.num_weights(self.depth) + self.sound.num_weights + projectors


def phi4(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    """Read Phi-4-multimodal as published (`Phi4MMForCausalLM`) or as transformers has it. The decoder is
    Phi-3's."""
    text = keys.defaults(tie_word_embeddings=True, original_max_position_embeddings=4096).but(
        architectures=["Phi3ForCausalLM"]
    )
    vision = part(keys.defaults(vision_config={}), "vision_config")
    vit = read_vit(vision, **_SIGLIP)
    if vit.side % 2:
        raise vision.wrong("image_size", "an even number of patches per side")
    if vision.size("crop_size", vit.image) != vit.image:
        raise vision.wrong("crop_size", f"{vit.image}, the image size of the vision encoder")
    layer: Any = -2 if vision.get("feature_layer") is None else vision.get("feature_layer")
    if not isinstance(layer, int) or not -vit.layers <= layer <= vit.layers:
        raise vision.wrong("feature_layer", f"one of {vit.layers} layers")
    facts = Phi4Facts(
        vit=vit,
        depth=layer % (vit.layers + 1),
        sound=_read_audio(keys),
        size_out=text.size("hidden_size"),
        image_id=token_id(vision, "image_token_id", default=200010),
        audio_id=token_id(
            part(keys.defaults(audio_config={}), "audio_config"), "audio_token_id", default=200011
        ),
    )
    warn_once(
        logger,
        "This model has LoRA adapters for images and for audio, which are not applied by themselves: serve it"
        " with --enable-lora --max-lora-rank 320 --lora-modules vision=FOLDER/vision-lora"
        " speech=FOLDER/speech-lora, where FOLDER is that of the checkpoint, and name one of them as the"
        " model in requests with images or audio",
    )
    return text, MediaFacts("phi4", ("image", "audio"), facts)


def _read_audio(keys: ConfigReader) -> Phi4AudioFacts:
    audio = part(keys, "audio_config") if keys.get("audio_config") is not None else _published_audio(keys)
    hidden, factor = audio.size("hidden_size", 1024), audio.size("time_reduction", 8)
    for key, value in (("ext_pw_out_channel", hidden), ("depthwise_separable_out_channel", hidden)):
        if audio.size(key, value) != value:
            raise audio.wrong(key, f"{value}, the hidden size of the audio encoder")
    for key, value in (("chunk_size", -1), ("bias_symmetric", False), ("depthwise_multiplier", 1)):
        audio.require(key, value)
    for key, activation in (
        ("activation", "swish"),
        ("conv_activation", "swish"),
        ("nemo_activation", "relu"),
    ):
        audio.require(key, activation)
    audio.require("conv_glu_type", "swish")
    audio.require("downsample_rate", 1)
    if factor & (factor - 1) or factor < 2:
        raise audio.wrong("time_reduction", "a power of 2")
    return Phi4AudioFacts(
        layers=audio.size("num_blocks", 24),
        hidden=hidden,
        heads=audio.size("num_attention_heads", 16),
        intermediate=audio.size("intermediate_size", 1536),
        mels=audio.size("input_size", 80),
        kernel=audio.size("kernel_size", 3),
        channels=audio.size("nemo_conv_channels", 1024),
        halvings=factor.bit_length() - 1,
        distance=audio.size("bias_max_distance", 1000),
    )


def _published_audio(keys: ConfigReader) -> ConfigReader:
    """Return the keys of the audio encoder in the published config.json under their names in transformers."""
    audio = part(part(keys, "audio_processor"), "config")
    audio = audio.but(**{name: audio.get(key) for name, key in _PUBLISHED_KEYS.items()})
    bias = part(audio.defaults(relative_attention_bias_args={}), "relative_attention_bias_args")
    convolutions = part(audio.defaults(nemo_conv_settings={}), "nemo_conv_settings")
    return audio.but(
        bias_max_distance=bias.get("t5_bias_max_distance"),
        bias_symmetric=bias.get("t5_bias_symmetric"),
        nemo_conv_channels=convolutions.get("conv_channels"),
    )

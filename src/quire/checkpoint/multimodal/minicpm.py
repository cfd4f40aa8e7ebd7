"""MiniCPM-V 2.5 to 4.6: SigLIP over an image and its slices, with a resampler or merger after it."""

from dataclasses import dataclass

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.common import ViTFacts, part, read_vit, side_of, text_part, token_id
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError

_DECODERS = {
    2.5: "LlamaForCausalLM",
    2.6: "Qwen2ForCausalLM",
    4.0: "LlamaForCausalLM",
    4.5: "Qwen3ForCausalLM",
}
"""Maps versions of MiniCPM-V to the architecture of the decoder."""


@dataclass(frozen=True, slots=True)
class MiniCPMFacts:
    """A vision encoder, and the resampler or merger that reduces its outputs."""

    vit: ViTFacts
    """The encoder; its image size is the largest square that it has position embeddings for."""
    depth: int
    """Number of encoder layers that are used."""
    size_out: int
    image_id: int | None
    """Placeholder token of an image; None: the tokenizer's unknown token."""
    video_id: int | None = None
    """Placeholder token of a video; None: the placeholder token of an image."""
    queries: int = 0
    """Number of resampler queries per slice; 0: squares of patches are merged instead."""
    merged: int | None = None
    """Layer after which patches are merged a first time; None: patches are only merged at the end."""
    is_valued: bool = False
    """Whether the resampler adds positions to values, not to keys."""
    in_one_row: bool = False
    """Whether the encoder's position embeddings treat an image as one row of patches, whatever its shape
    (2.5)."""
    nests_slices: bool = False
    """Whether one pair of slice tokens encloses all slices of an image, each of them between image tokens
    (2.5)."""

    @property
    def unit(self) -> int:
        """Return the side of the square of patches that are merged into one token."""
        return 1 if self.queries else 2 if self.merged is None else 4

    @property
    def num_weights(self) -> int:
        """Return the approximate number of parameters."""
        vit, wide = self.vit.num_weights(self.depth), 4 * self.vit.hidden
        if self.queries:
            return vit + self.size_out * (self.vit.hidden + self.queries + 5 * self.size_out)
        inner = 0 if self.merged is None else wide * (5 * self.vit.intermediate + self.vit.hidden)
        return vit + inner + wide * (wide + self.size_out)


def minicpm_v(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    """Read MiniCPM-V 2.5 to 4.5 in the original format; the decoder's keys are at the top level."""
    version = _version(keys)
    text = keys.but(architectures=[_DECODERS[version]])
    vit = read_vit(part(keys, "vision_config"))
    facts = MiniCPMFacts(
        vit=vit,
        depth=vit.layers - keys.flag("drop_vision_last_layer"),
        size_out=text.size("hidden_size"),
        image_id=None,
        queries=keys.size("query_num", 64),
        is_valued=version >= 4.5,
        in_one_row=version == 2.5,
        nests_slices=version == 2.5,
    )
    modalities = ("image",) if version == 2.5 else ("image", "video")
    return text, MediaFacts("minicpm_v", modalities, facts)


def _version(keys: ConfigReader) -> float:
    """Return the version of a MiniCPM-V checkpoint from its config.json. Early files of 2.5 and 2.0 have no
    key for it: those of 2.5 are recognized by their 96 queries, and 2.0 is not supported."""
    version = keys.get("version")
    if version is None and keys.get("query_num") == 96:
        return 2.5
    known = {str(number): number for number in _DECODERS}
    known |= {str(int(number)): number for number in _DECODERS if number.is_integer()}
    if str(version) not in known:
        raise keys.wrong("version", f"one of {', '.join(map(str, _DECODERS))}")
    return known[str(version)]


def minicpm_v46(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    """Read MiniCPM-V 4.6 in the format of transformers."""
    text = text_part(keys, default="qwen3_5_text")
    vit = read_vit(part(keys, "vision_config"))
    layer = keys.get("insert_layer_id")
    layer = 6 if layer is None else layer
    if not isinstance(layer, int) or not 0 <= layer < vit.layers:
        raise keys.wrong("insert_layer_id", f"one of {vit.layers} layers")
    if side_of(keys, "merge_kernel_size", 2) != 2 or keys.size("merger_times", 1) != 1:
        raise ConfigError(f"{keys.source}: only one merge of patches by 2 is supported")
    facts = MiniCPMFacts(
        vit=vit,
        depth=vit.layers,
        size_out=text.size("hidden_size"),
        image_id=token_id(keys, "image_token_id"),
        video_id=token_id(keys, "video_token_id", "image_token_id"),
        merged=None if keys.get("downsample_mode") == "4x" else layer,
    )
    return text, MediaFacts("minicpm_v", ("image", "video"), facts)

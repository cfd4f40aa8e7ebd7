"""Qwen2-VL to Qwen3.5, GLM-4.1V, 4.5V and GLM-OCR: images and videos in patches of a grid."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.families.dense import with_defaults
from quire.checkpoint.multimodal.parts import stack_weights
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError

Read = Callable[[ConfigReader], tuple[ConfigReader, MediaFacts]]


@dataclass(frozen=True, slots=True)
class GridFacts:
    """A tower over a grid of patches, and the tokens that its vectors stand in for."""

    depth: int
    """How many layers."""
    hidden: int
    heads: int
    intermediate: int
    size_out: int
    """Numbers of a vector: the decoder's hidden size."""
    patch: int
    """Pixels of a patch's side."""
    frames: int
    """Frames of a video that one patch spans; an image is repeated so often."""
    merge: int
    """One vector is made of a square of patches with this side."""
    activation: str
    norm_eps: float
    image_id: int
    """The token in whose places an image's vectors stand."""
    video_id: int
    start_id: int
    """What stands before those of an image or of a frame, and behind them."""
    end_id: int
    video_start_id: int
    """The same of a video, as templates write it."""
    video_end_id: int
    channels: int = 3
    qkv_bias: bool = True
    window: int = 0
    """Pixels of the side of a window within which most layers look; 0: all look everywhere."""
    far: tuple[int, ...] = ()
    """Those that look everywhere none the less."""
    positions: int = 0
    """The side of the square of learned positions; 0: there are none."""
    aux_layers: tuple[int, ...] = ()
    """Layers behind which further vectors are taken, for the first layers of the decoder."""
    pace: float = 0.0
    """Positions that pass in a second of a video; 0: one for each of its steps, however long."""
    times: str = ""
    """How frames of a video are told apart: by their time `before` each, or `behind`, or by that with the
    word `seconds`; or not at all."""
    merger: int = 0
    """Numbers between the halves of a merger that has a gate; 0: it has none."""
    head_norms: bool = False
    """Whether queries and keys are normed, head by head."""

    @property
    def num_weights(self) -> int:
        """About."""
        first = self.hidden * (self.channels * self.frames * self.patch**2 + self.positions**2)
        wide, size = self.merge**2 * self.hidden, self.size_out
        if self.merger:
            merger = size * (wide + size + 3 * self.merger)
            return first + merger + stack_weights(self.depth, self.hidden, self.intermediate, 3)
        matrices = 3 if self.activation == "silu" else 2
        mergers = (1 + len(self.aux_layers)) * wide * (wide + size)
        return first + mergers + stack_weights(self.depth, self.hidden, self.intermediate, matrices)


def qwen2_vl(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    """`hidden_size` is the decoder's here, and `embed_dim` the tower's own."""
    vision = _vision(keys)
    hidden = vision.size("embed_dim", 1280)
    grid = _grid(
        keys,
        hidden=hidden,
        intermediate=int(hidden * vision.number("mlp_ratio", 4.0)),
        size_out=vision.size("hidden_size", 3584),
        channels=_channels(vision),
        activation=vision.get("hidden_act") or "quick_gelu",
    )
    return _qwen2(keys), MediaFacts("qwen2_vl", ("image", "video"), grid)


def qwen2_5_vl(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    vision = _vision(keys)
    grid = _grid(
        keys,
        channels=_channels(vision),
        window=vision.size("window_size", 112),
        far=_numbers(vision, "fullatt_block_indexes", (7, 15, 23, 31)),
        pace=vision.number("tokens_per_second", 4.0),
    )
    return _qwen2(keys), MediaFacts("qwen2_5_vl", ("image", "video"), grid)


def _channels(vision: ConfigReader) -> int:
    return vision.size("in_channels", vision.size("in_chans", 3))


def _qwen2(keys: ConfigReader) -> ConfigReader:
    rope = {"mrope_section": [16, 24, 24]}
    return decoder_part(keys, "Qwen2ForCausalLM", rope, rms_norm_eps=1e-5, rope_theta=1000000.0)


def qwen3_vl(architecture: str, *, sections: tuple[int, ...] = (24, 20, 20), deep: bool = True) -> Read:
    """With this decoder, whose first layers are given vectors of their own if it is `deep`."""

    def read(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
        vision = _vision(keys)
        aux_layers = _numbers(vision, "deepstack_visual_indexes", (8, 16, 24)) if deep else ()
        grid = _grid(
            keys,
            {"hidden_size": 1152, "intermediate_size": 4304, "patch_size": 16, "depth": 27},
            activation=vision.get("hidden_act") or "gelu_pytorch_tanh",
            positions=round(vision.size("num_position_embeddings", 2304) ** 0.5),
            aux_layers=aux_layers,
            times="before",
        )
        text = decoder_part(keys, architecture, {"mrope_section": [*sections]}, rope_theta=500000.0)
        text = _with_rope(text.but(norm_topk_prob=True), {"mrope_interleaved": True}, over=True)
        return text, MediaFacts("qwen3_vl", ("image", "video"), grid, levels=len(aux_layers))

    return read


def glm4v(keys: ConfigReader, times: str = "behind") -> tuple[ConfigReader, MediaFacts]:
    """Also GLM-4.5V, whose decoder has experts. Layers are as wide within as the decoder, and the
    `intermediate_size` is the merger's."""
    vision = _vision(keys)
    grid = _grid(
        keys,
        {"hidden_size": 1536, "num_heads": 12, "depth": 24, "out_hidden_size": 4096},
        _GLM_MARKS,
        intermediate=vision.size("out_hidden_size", 4096),
        merger=vision.size("intermediate_size", 13696),
        norm_eps=vision.number("rms_norm_eps", 1e-5),
        qkv_bias=vision.flag("attention_bias"),
        positions=vision.size("image_size", 336) // vision.size("patch_size", 14),
        times=times,
    )
    return _glm4(keys), MediaFacts("glm4v", ("image", "video"), grid)


def glm_ocr(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    """Without learned positions, and with norms of queries and keys."""
    vision = _vision(keys)
    sizes = {"hidden_size": 1024, "depth": 24, "intermediate_size": 4096, "out_hidden_size": 1536}
    grid = _grid(
        keys,
        sizes,
        _GLM_MARKS,
        merger=vision.size("out_hidden_size", 1536) * vision.size("in_channels", 3),
        norm_eps=vision.number("rms_norm_eps", 1e-5),
        qkv_bias=vision.flag("attention_bias", True),
        times="seconds",
        head_norms=True,
    )
    return _glm4(keys), MediaFacts("glm4v", ("image", "video"), grid)


def glm46v(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    """The same with either decoder."""
    return glm4v(keys, "seconds")


def _glm4(keys: ConfigReader) -> ConfigReader:
    rope = {"mrope_section": [8, 12, 12]}
    kind = (keys.get("text_config") or {}).get("model_type")
    has_experts = kind == "glm4v_moe_text"
    if has_experts:
        text = decoder_part(keys, "Glm4MoeForCausalLM", rope, rms_norm_eps=1e-5, partial_rotary_factor=0.5)
    else:
        text = decoder_part(keys, "Glm4ForCausalLM", rope, rms_norm_eps=1e-5, partial_rotary_factor=1.0)
    head_dim = text.size("hidden_size") // text.size("num_attention_heads")
    if kind == "glm_ocr_text":
        return with_defaults(text, head_dim=head_dim).but(attention_bias=False)
    own = {"attention_bias": True, "head_dim": head_dim}
    return with_defaults(text, **own) if has_experts else text.but(**own)


def _vision(keys: ConfigReader) -> ConfigReader:
    vision = keys.get("vision_config")
    if not isinstance(vision, dict):
        raise keys.wrong("vision_config", "an object that describes the tower")
    return ConfigReader(f"{keys.source}, vision_config", vision)


_MARKS = {
    "image_id": ("image_token_id", 151655),
    "video_id": ("video_token_id", 151656),
    "start_id": ("vision_start_token_id", 151652),
    "end_id": ("vision_end_token_id", 151653),
    "video_start_id": ("vision_start_token_id", 151652),
    "video_end_id": ("vision_end_token_id", 151653),
}
_GLM_MARKS = {
    "image_id": ("image_token_id", 151343),
    "video_id": ("video_token_id", 151344),
    "start_id": ("image_start_token_id", 151339),
    "end_id": ("image_end_token_id", 151340),
    "video_start_id": ("video_start_token_id", 151341),
    "video_end_id": ("video_end_token_id", 151342),
}
_SIZES = {
    "depth": ("depth", 32),
    "hidden": ("hidden_size", 3584),
    "heads": ("num_heads", 16),
    "intermediate": ("intermediate_size", 3420),
    "size_out": ("out_hidden_size", 3584),
    "patch": ("patch_size", 14),
    "frames": ("temporal_patch_size", 2),
    "merge": ("spatial_merge_size", 2),
    "channels": ("in_channels", 3),
}
"""What the towers call their sizes, and what Qwen2.5-VL means where it is silent."""


def _grid(
    keys: ConfigReader,
    defaults: dict[str, int] | None = None,
    marks: dict[str, tuple[str, int]] = _MARKS,
    **facts: Any,
) -> GridFacts:
    """What all towers call the same, and `facts` as they are."""
    vision, defaults = _vision(keys), defaults or {}
    read: dict[str, Any] = {"activation": vision.get("hidden_act") or "silu", "norm_eps": 1e-6}
    read |= {name: (keys.token_ids(key) or (default,))[0] for name, (key, default) in marks.items()}
    read |= {
        name: vision.size(key, defaults.get(key, default))
        for name, (key, default) in _SIZES.items()
        if name not in facts
    }
    grid = GridFacts(**(read | facts))
    if grid.hidden % grid.heads or grid.hidden // grid.heads % 4:
        raise ConfigError(f"{vision.source}: {grid.heads} heads of {grid.hidden} do not turn by two axes")
    return grid


def _numbers(keys: ConfigReader, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
    numbers = keys.get(key)
    numbers = default if numbers is None else numbers
    if not isinstance(numbers, (list, tuple)) or not all(isinstance(number, int) for number in numbers):
        raise keys.wrong(key, "a list of layers")
    return tuple(numbers)


def decoder_part(
    keys: ConfigReader, architecture: str, rope: dict[str, Any], **defaults: Any
) -> ConfigReader:
    """The decoder as if it were alone: in text_config, or, in the first checkpoints, beside the tower."""
    part = keys.get("text_config")
    text = part if isinstance(part, dict) else {}
    whole = {key: keys.get(key) for key in ("bos_token_id", "eos_token_id") if keys.get(key) is not None}
    tied = keys.flag("tie_word_embeddings", bool(text.get("tie_word_embeddings")))
    if not architecture.startswith("Qwen3"):  # files of before may have it in either place
        tied = tied or bool(text.get("tie_word_embeddings"))
    values = {**keys.values, **text, **whole, "tie_word_embeddings": tied, "architectures": [architecture]}
    return _with_rope(with_defaults(ConfigReader(keys.source, values), **defaults), rope)


def _with_rope(keys: ConfigReader, facts: dict[str, Any], *, over: bool = False) -> ConfigReader:
    """Its rotation with these facts, or with them where it says nothing."""
    name = "rope_parameters" if keys.get("rope_parameters") else "rope_scaling"
    block = keys.get(name) or {}
    if not isinstance(block, dict):
        raise keys.wrong(name, "an object")
    given = block | facts if over else facts | block
    if given.get("rope_type", given.get("type")) == "mrope":
        given = {key: value for key, value in given.items() if key != "type"} | {"rope_type": "default"}
    return keys.but(**{name: given})

"""Parts of tiny vision models: sizes, a tokenizer, seeded weights, images."""

import base64
import io
import json
import string
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "max_position_embeddings": 4096,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
STRONG = TEXT | {"initializer_range": 0.3}
"""Sizes of the decoder, with weights large enough for every input to change the output."""
VISION = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2}


def make_tokenizer(marks: Sequence[str]) -> Any:
    """Return a tokenizer with one token per character, runs of newlines as tokens, and markers after
    them."""
    from transformers import PreTrainedTokenizerFast

    runs = ["\n" * count for count in range(2, 7)]
    vocab = {token: i for i, token in enumerate(["<unk>", *string.printable, *runs])}
    merges = [("\n" * (count - 1), "\n") for count in range(2, 7)]
    merges += [("\n\n", "\n\n"), ("\n\n", "\n\n\n"), ("\n\n\n", "\n\n\n")]
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>"))
    backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def save_tiny(path: Path, architecture: Any, config: Any, processor: Any) -> Any:
    """Save a seeded random float32 model with its processor, and return it. The architecture is a class name
    of transformers, or a function that builds the model."""
    import transformers

    torch.manual_seed(0)
    make = getattr(transformers, architecture) if isinstance(architecture, str) else architecture
    model = make(config).float().eval()
    for tensor in model.state_dict().values():  # ones and zeros would hide a layer that ignores them
        if tensor.is_floating_point() and (tensor.ndim == 1 or not tensor.any()):
            tensor.add_(torch.randn_like(tensor) * 0.2)
    model.save_pretrained(path)
    parts = [processor]
    if getattr(processor, "video_processor", ()) is None:
        parts = [processor.image_processor, processor.tokenizer]
    for part in parts:
        part.save_pretrained(path)
    if isinstance(processor, Stand):
        processor.rewrite(path, model)
    return model


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return an image of noise, in which different resize filters give different pixels."""
    random = np.random.default_rng([width, height, seed])
    noise = random.integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(noise)


def url_of(image: Image.Image) -> str:
    """Return the image as a data url."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def part(image: Image.Image) -> dict[str, Any]:
    """Return the image as a part of a message."""
    return {"type": "image_url", "image_url": {"url": url_of(image)}}


def sizes(count: int = 50, least: int = 5, most: int = 150) -> list[tuple[int, int]]:
    random = np.random.default_rng(17)
    return [tuple(map(int, integer)) for integer in random.integers(least, most, (count, 2))]


def close(actual: NDArray[Any], expected: Any, within: float = 1e-5) -> None:
    expected = np.asarray(expected)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=0, atol=within)


def without_torchvision(model: str) -> Any:
    """Return transformers' module of an image processor that cannot be imported without torchvision, for its
    functions of sizes."""
    import transformers

    file = Path(transformers.__file__).parent / "models" / model / f"image_processing_{model}.py"
    lines = file.read_text().splitlines()
    kept = [line for line in lines if not line.startswith(("from torchvision", "@auto_docstring"))]
    module = types.ModuleType(file.stem)
    module.__package__ = f"transformers.models.{model}"
    exec(compile("\n".join(kept), str(file), "exec"), module.__dict__)
    return module


class Stand:
    """Replacement for a processor of transformers that needs torchvision or does not exist: an independent
    implementation."""

    settings: dict[str, Any] = {}
    """Contents of the checkpoint's preprocessor_config.json."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.ours: Any = None
        """Our processor, for subclasses that take the pixels from it."""

    def save_pretrained(self, path: Path) -> None:
        self.tokenizer.save_pretrained(path)
        (path / "preprocessor_config.json").write_text(json.dumps(self.settings))

    def rewrite(self, path: Path, model: Any) -> None:
        """Rewrite the checkpoint as published, where transformers saves another form."""

    def pixels(self, image: Image.Image) -> dict[str, NDArray[Any]]:
        """Return the pixels of one image in our layout; empty if they are not compared."""
        return {}

    def features(self, model: Any, inputs: Any) -> torch.Tensor:
        return torch.cat(list(model.model.get_image_features(**inputs).pooler_output))

    def __call__(self, images: list[Image.Image], text: str, return_tensors: str) -> Any:
        """Return the inputs of the model."""
        raise NotImplementedError

"""What tiny models that see are made of: sizes, a tokenizer, seeded weights, pictures."""

import string
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
VISION = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2}


def make_tokenizer(marks: Sequence[str]) -> Any:
    """Characters are tokens, so are runs of newlines, and the marks have the ids that come behind."""
    from transformers import PreTrainedTokenizerFast

    runs = ["\n" * count for count in range(2, 7)]
    vocab = {token: i for i, token in enumerate(["<unk>", *string.printable, *runs])}
    merges = [("\n" * (count - 1), "\n") for count in range(2, 7)]
    merges += [("\n\n", "\n\n"), ("\n\n", "\n\n\n"), ("\n\n\n", "\n\n\n")]
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>"))
    backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def save_tiny(path: Path, architecture: str, config: Any, processor: Any) -> Any:
    """A seeded random float32 model, saved with its processor: the twin."""
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, architecture)(config).float().eval()
    for tensor in model.state_dict().values():  # ones and zeros would hide a layer that ignores them
        if tensor.is_floating_point() and (tensor.ndim == 1 or not tensor.any()):
            tensor.add_(torch.randn_like(tensor) * 0.2)
    model.save_pretrained(path)
    parts = [processor]
    if getattr(processor, "video_processor", ()) is None:
        parts = [processor.image_processor, processor.tokenizer]
    for part in parts:
        part.save_pretrained(path)
    return model


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth colours and noise, so that filters differ."""
    random = np.random.default_rng([width, height, seed])
    noise = random.integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(noise)


def sizes(count: int = 50, least: int = 5, most: int = 150) -> list[tuple[int, int]]:
    random = np.random.default_rng(17)
    return [tuple(map(int, each)) for each in random.integers(least, most, (count, 2))]


def close(ours: NDArray[Any], theirs: Any, within: float = 1e-5) -> None:
    theirs = np.asarray(theirs)
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=within)

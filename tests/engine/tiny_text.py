"""A tiny Llama with text: random weights, and a byte-level tokenizer trained here."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from oracle import make_tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

from quire import LLM

TOKENS = 340
VOCAB = 344
"""The model has a few more ids than the tokenizer, as padded checkpoints do."""
EOS, IM_END = 2, 4
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "A page is a block of a book; a quire is a gathering of pages.",
    "One two three four five six seven eight nine ten.",
    "naïve café, über straße, 日本語, 🙂",
]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}TOOLS {{ tools | tojson }}\n{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GENERATION = {"eos_token_id": [EOS, IM_END], "temperature": 0.7, "top_k": 20, "max_new_tokens": 5}


@dataclass(frozen=True)
class TextModel:
    path: Path
    hf: Any
    """transformers model with the same weights."""

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> Tensor:
        """Return logits [len(token_ids), VOCAB]."""
        logits: Tensor = self.hf(torch.tensor([token_ids])).logits[0]
        return logits

    def logprobs(self, token_ids: list[int]) -> Tensor:
        return self.logits(token_ids).log_softmax(-1)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """Return transformers' greedy output, ignoring eos."""
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[len(prompt) :]


@functools.cache
def text_model(directory: Path) -> TextModel:
    """Return the model, which is built once in `directory` (for example pytest's base temporary
    directory).
    """
    directory = directory / "tiny_text"
    directory.mkdir(exist_ok=True)
    path, hf = make_tiny("llama", directory, vocab_size=VOCAB)
    _train_tokenizer().save(str(path / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    _write(path / "tokenizer_config.json", {**named, "chat_template": CHATML})
    _write(path / "generation_config.json", GENERATION)
    return TextModel(path, hf)


def variant(model: TextModel, directory: Path, **files: dict[str, Any]) -> TextModel:
    """Save the same model in `directory` with some of its JSON files replaced, each named without its
    suffix.
    """
    for file in model.path.iterdir():
        if file.stem in files:
            _write(directory / file.name, files[file.stem])
        else:
            (directory / file.name).symlink_to(file)
    return TextModel(directory, model.hf)


def open_text(model: TextModel, **settings: Any) -> LLM:
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "block_size": 4,
        "max_num_seqs": 16,
        "num_gpu_blocks_override": 400,
        "use_tqdm_on_load": False,
    }
    return LLM(str(model.path), **(defaults | settings))


def _train_tokenizer() -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    assert backend.get_vocab_size() == TOKENS
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")

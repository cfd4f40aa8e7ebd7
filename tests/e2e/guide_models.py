"""Tiny models under the model names of the optimization guide, and their prompts."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from formats import AWQ, GPTQ, SIZES, STORED
from group_files import quantize_files
from oracle import make_tiny
from PIL import Image
from tiny_adapter import write_adapter
from tiny_qwen import made
from tiny_text import VOCAB, TextModel

from quire import LLM, SamplingParams
from quire.cli import main

PROMPTS = ["The quick brown fox", "One two three four", "A page is a block"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
IMAGES = [
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (24 + seed, 32, 3), np.uint8))
    for seed in range(8)
]
TEMPLATE = """{% for message in messages %}{% for part in message.content %}
{%- if part.type == "text" %}{{ part.text }}{% else %}<begin><image><end>{% endif %}
{%- endfor %}{% endfor %}"""

DENSE = ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.3-70B-Instruct")
DRAFT = "meta-llama/Llama-3.2-1B-Instruct"
EXPERTS = "mistralai/Mixtral-8x7B-Instruct-v0.1"
SEEING = {"Qwen/Qwen2.5-VL-3B-Instruct": 2, "Qwen/Qwen2.5-VL-72B-Instruct": 4}
"""Vision models of the guide, with their number of attention heads."""
PACKED = {
    "TheBloke/Llama-2-7B-Chat-AWQ": (AWQ, STORED["awq"].config),
    "TheBloke/Llama-2-7B-Chat-GPTQ": (GPTQ, STORED["gptq"].config),
}
GGUF = "TheBloke/Llama-2-7B-Chat-GGUF/llama-2-7b-chat.Q8_0.gguf"
_TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
NINE = [
    *("num_requests_running", "num_requests_waiting", "gpu_cache_usage_perc", "num_preemptions_total"),
    *("avg_prompt_throughput_toks_per_s", "avg_generation_throughput_toks_per_s"),
    *("time_to_first_token_seconds_count", "time_per_output_token_seconds_count"),
    "e2e_request_latency_seconds_count",
]
"""Metrics of the guide without the prefix `vllm:`."""


def make_models(folder: Path, tiny: TextModel, base: Path) -> Path:
    """Make a working directory in which each model name of the guide is a folder with a tiny model, and two
    adapters."""
    for name in DENSE:
        _link(folder / name, tiny.path)
    for name, heads in SEEING.items():
        _link(folder / name, made("Qwen2_5_VL", base, heads)[0])
        (folder / name / "chat_template.jinja").write_text(TEMPLATE)
    _with_text(folder / DRAFT, tiny, "llama", num_hidden_layers=1)
    _with_text(folder / EXPERTS, tiny, "mixtral")
    for name, (scheme, config) in PACKED.items():
        path, hf = _with_text(folder / name, tiny, "llama", **SIZES["llama"])
        quantize_files(path, hf, scheme, config)
    _gguf(folder, tiny)
    sizes = json.loads((tiny.path / "config.json").read_text())
    for number, name in enumerate("ab", start=1):
        write_adapter(folder / name, sizes, seed=number)
    return folder


def _link(folder: Path, model: Path) -> None:
    folder.mkdir(parents=True)
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)


def _with_text(folder: Path, tiny: TextModel, family: str, **sizes: Any) -> tuple[Path, Any]:
    """Make a model of this family with the tokenizer of the tiny one."""
    made_at, hf = make_tiny(family, folder.parent, **{"vocab_size": VOCAB, **sizes})
    made_at.rename(folder)
    for name in _TEXT_FILES:
        shutil.copy(tiny.path / name, folder / name)
    return folder, hf


def _gguf(folder: Path, tiny: TextModel) -> None:
    source, _ = _with_text(folder / "source", tiny, "llama", **SIZES["llama"])
    assert main(["quantize", str(source), "--to", "gguf-q8_0", "-o", str(folder / "written")]) == 0
    (written,) = (folder / "written").glob("*.gguf")
    (folder / GGUF).parent.mkdir(parents=True)
    written.rename(folder / GGUF)


def texts(llm: LLM, prompts: Sequence[str] = PROMPTS) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(list(prompts), GREEDY, use_tqdm=False)]


def described(llm: LLM, images: Sequence[Image.Image] = IMAGES) -> list[str]:
    """Return the answer about each image, in a chat."""
    text = {"type": "text", "text": "What is this?"}
    chats: Any = [
        [{"role": "user", "content": [{"type": "image_pil", "image_pil": image}, text]}] for image in images
    ]
    outputs = llm.chat(chats, GREEDY, use_tqdm=False, chat_template=TEMPLATE)
    return [output.outputs[0].text for output in outputs]

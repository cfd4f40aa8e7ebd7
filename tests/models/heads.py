"""EAGLE, EAGLE-3 and MTP in plain torch, written from their papers, over all tokens at once."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

Weights = dict[str, Tensor]
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB, EPS = 64, 4, 2, 16, 96, 128, 1e-6
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "rms_norm_eps": EPS,
}


def layer_weights(prefix: str, size_in: int = HIDDEN) -> Weights:
    sizes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, size_in),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, size_in),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, size_in),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    made = {f"{prefix}.{name}.weight": 0.2 * torch.randn(size) for name, size in sizes.items()}
    return made | norm_weights(f"{prefix}.post_attention_layernorm")


def add_prediction(path: Path, extra: list[str], weights: Weights) -> None:
    """Turn the last layer of the checkpoint at `path` into an MTP layer.

    Its name becomes the first of `extra` in place of the second.
    """
    file, config = path / "model.safetensors", json.loads((path / "config.json").read_text())
    stored = {name.replace(extra[1], extra[0]): tensor for name, tensor in load_file(file).items()}
    save_file(stored | weights, file)
    count = config["num_hidden_layers"] - 1
    shorter = {key: value[:count] for key, value in config.items() if key.endswith("layer_types")}
    config |= {"num_hidden_layers": count, "num_nextn_predict_layers": 1, **shorter}
    (path / "config.json").write_text(json.dumps(config))


@torch.no_grad()
def mtp(
    hf: Any,
    layer: Any,
    weights: Weights,
    tokens: Tensor,
    states: Tensor,
    names: dict[str, str],
    plus: float,
    window: int = 0,
) -> tuple[Tensor, Tensor]:
    """Run an MTP layer of transformers; norms multiply by weight + `plus`.

    With a `window` it uses the RoPE table of sliding-window layers.
    """

    def normed(x: Tensor, name: str) -> Tensor:
        return norm(x, weights[f"{names[name]}.weight"] + plus)

    both = torch.cat((normed(tokens, "token_norm"), normed(states, "states_norm")), -1)
    x, places = (both @ weights[f"{names['join']}.weight"].T)[None], torch.arange(len(tokens))[None]
    mask = torch.full((len(tokens),) * 2, -torch.inf).triu(1)[None, None]
    if window:
        mask += torch.full_like(mask, -torch.inf).tril(-window)
    turns = hf.model.rotary_emb(x, places, *(["sliding_attention"] if window else []))
    x = layer(x, attention_mask=mask, position_ids=places, position_embeddings=turns)
    x = (x if isinstance(x, Tensor) else x[0])[0]
    return normed(x, "last"), x


def norm_weights(*names: str) -> Weights:
    return {f"{name}.weight": 1 + 0.2 * torch.randn(HIDDEN) for name in names}


def save_head(path: Path, weights: Weights, **config: Any) -> Path:
    path.mkdir()
    save_file(weights, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG | config))
    return path


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def rotate(x: Tensor) -> Tensor:
    """Rotate [T, heads, HEAD_DIM] by position."""
    steps = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.arange(len(x))[:, None] * steps
    cos, sin = (torch.cat((item, item), -1)[:, None] for item in (angles.cos(), angles.sin()))
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


def attention(x: Tensor, weights: Weights, prefix: str) -> Tensor:
    def project(name: str) -> Tensor:
        return (x @ weights[f"{prefix}.self_attn.{name}.weight"].T).unflatten(1, (-1, HEAD_DIM))

    q, k, v = rotate(project("q_proj")), rotate(project("k_proj")), project("v_proj")
    q, k, v = (item.transpose(0, 1)[None] for item in (q, k, v))
    seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0]
    return seen.transpose(0, 1).flatten(1) @ weights[f"{prefix}.self_attn.o_proj.weight"].T


def feed_forward(x: Tensor, weights: Weights, prefix: str) -> Tensor:
    x = norm(x, weights[f"{prefix}.post_attention_layernorm.weight"])
    gate, up, down = (weights[f"{prefix}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def eagle(weights: Weights, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """Run EAGLE on token embeddings and the hidden states of the tokens before them."""
    x = torch.cat((tokens, states), -1) @ weights["fc.weight"].T + weights.get("fc.bias", torch.zeros(1))
    x = x + attention(x, weights, "layers.0")
    x = x + feed_forward(x, weights, "layers.0")
    return x, x


def eagle3(
    weights: Weights, tokens: Tensor, states: Tensor, *, prefix: str, keeps_normed: bool
) -> tuple[Tensor, Tensor]:
    tokens = norm(tokens, weights[f"{prefix}.input_layernorm.weight"])
    normed = norm(states, weights[f"{prefix}.hidden_norm.weight"])
    x = (normed if keeps_normed else states) + attention(torch.cat((tokens, normed), -1), weights, prefix)
    x = x + feed_forward(x, weights, prefix)
    return norm(x, weights["norm.weight"]), x


Head = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def drafted(
    head: Head,
    embed: Tensor,
    say: Callable[[Tensor], int],
    tokens: list[int],
    states: Tensor,
    count: int,
) -> list[int]:
    """Return the drafts after `tokens`; `states` has all but the last. `say` returns a hidden
    state's token.
    """
    tokens, start = list(tokens), len(tokens)
    for _ in range(count):
        out, after = head(embed[tokens[1:]], states)
        tokens.append(say(out[-1]))
        states = torch.cat((states, after[-1:]))
    return tokens[start:]

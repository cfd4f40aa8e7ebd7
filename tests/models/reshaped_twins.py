"""Reference models of decoders that transformers does not have: TeleChat 2, TeleFLM, PLaMo 3, Llama-Nemotron
and Ouro, made of its Llama and Gemma 3."""

import re
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from twins import QKV, Settings, Tensors, Twin, called, fuse_parts, llama


def telechat2(settings: Settings) -> Any:
    """Build Llama with biases after attention and after the MLP."""
    sizes = {
        "num_hidden_layers": settings["n_layer"],
        "num_attention_heads": settings["n_head"],
        "intermediate_size": settings["ffn_hidden_size"],
        "rms_norm_eps": settings["layer_norm_epsilon"],
    }
    model = llama(settings, **sizes, attention_bias=True, mlp_bias=True)
    for layer in model.model.layers:
        for part in (
            *(getattr(layer.self_attn, name) for name in QKV),
            layer.mlp.gate_proj,
            layer.mlp.up_proj,
        ):
            part.bias = None
    names = called(
        model__embed_tokens="transformer.word_embeddings",
        model__layers="transformer.h",
        model__norm="transformer.ln_f",
        self_attn="self_attention",
        q_proj="query",
        o_proj="dense",
    )
    heads = settings["num_key_value_heads"]
    return Twin(
        model, settings, lambda t: names(fuse_parts(t, ("k_proj", "v_proj"), "key_value", heads=heads))
    )


def teleflm(settings: Settings) -> Any:
    model = llama(settings)
    embed, head = model.model.embed_tokens.forward, model.lm_head.forward
    scale = settings["output_mult"] / settings["mup_scale_factor"]
    model.model.embed_tokens.forward = lambda ids: embed(ids) * settings["input_mult"]
    model.lm_head.forward = lambda x: head(x) * scale
    return Twin(model, settings, called())


def plamo3(settings: Settings) -> Any:
    """Build Gemma 3, whose norms multiply by 1 plus their weights."""
    ropes = {
        "full_attention": {"rope_type": "default", "rope_theta": settings["rope_theta"]},
        "sliding_attention": {"rope_type": "default", "rope_theta": settings["rope_local_theta"]},
    }
    own = {
        "hidden_activation": "silu",
        "query_pre_attn_scalar": settings["head_dim"],
        "rope_parameters": ropes,
        "sliding_window": settings["window_size"],
        "layer_types": ["sliding_attention", "full_attention"],
        "final_logit_softcapping": None,
    }
    known = {key: value for key, value in settings.items() if key != "rope_theta"}
    model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**(known | own)))
    model.model.embed_tokens.embed_scale.fill_(1)
    names = called(
        model__layers="model.layers.layers",
        self_attn="mixer",
        input_layernorm="pre_mixer_norm",
        post_attention_layernorm="post_mixer_norm",
        pre_feedforward_layernorm="pre_mlp_norm",
        post_feedforward_layernorm="post_mlp_norm",
    )

    def stored(tensors: Tensors) -> Tensors:
        fused = fuse_parts(tensors, QKV, "qkv_proj")
        out = names(fuse_parts(fused, ("gate_proj", "up_proj"), "gate_up_proj"))
        offsets = {"post_mixer_norm": 1 / 5, "post_mlp_norm": 1 / 5**1.5}
        for name, tensor in out.items():
            for norm, offset in offsets.items():
                if norm in name:
                    out[name] = tensor + 1 - offset
        return {name: tensor for name, tensor in out.items() if not name.endswith("embed_scale")}

    return Twin(model, settings, stored)


class Zero(torch.nn.Module):
    """A part of a layer that adds nothing."""

    def forward(self, x: Tensor | None = None, **others: Any) -> Any:
        states = others.get("hidden_states")
        return torch.zeros_like(x) if x is not None else (torch.zeros_like(states), None)


def decilm(settings: Settings) -> Any:
    """Build Llama with layers of different sizes, without some of their parts."""
    sizes = {"num_key_value_heads": 4, "intermediate_size": 96}
    model = llama(settings, **sizes)
    for number, block in enumerate(settings["block_configs"]):
        attention, feed, layer = block["attention"], block["ffn"], model.model.layers[number]
        one = {"num_hidden_layers": 1}
        if attention.get("no_op"):
            layer.self_attn, layer.input_layernorm = Zero(), torch.nn.Identity()
        else:
            kv_heads = settings["num_attention_heads"] // attention["n_heads_in_group"]
            layer.self_attn = (
                llama(settings, **(sizes | one | {"num_key_value_heads": kv_heads})).model.layers[0].self_attn
            )
            layer.self_attn.layer_idx = number
        if feed.get("no_op"):
            layer.mlp, layer.post_attention_layernorm = Zero(), torch.nn.Identity()
        else:
            inner = feed.get("intermediate_size") or -(-int(2 * feed["ffn_mult"] * 64 / 3) // 256) * 256
            layer.mlp = llama(settings, **(sizes | one | {"intermediate_size": inner})).model.layers[0].mlp
    return Twin(model, settings, called())


class OuroTwin(Twin):
    """Llama with a norm after attention and MLP, whose layers run several times."""

    def forward(self, input_ids: Tensor) -> Any:
        body, x = self.model.model, self.model.model.embed_tokens(input_ids)
        places = torch.arange(input_ids.shape[1])[None]
        rotations = body.rotary_emb(x, places)
        mask = torch.full((x.shape[1],) * 2, torch.finfo(torch.float32).min).triu(1)[None, None]
        for _ in range(self.settings["total_ut_steps"]):
            for layer in body.layers:
                mixed = layer.self_attn(
                    layer.input_layernorm(x), position_embeddings=rotations, attention_mask=mask
                )[0]
                x = x + layer.input_layernorm_2(mixed)
                fed = layer.mlp(layer.post_attention_layernorm(x))
                x = x + layer.post_attention_layernorm_2(fed)
            x = body.norm(x)
        return SimpleNamespace(logits=self.model.lm_head(x))


def ouro(settings: Settings) -> Any:
    model = llama(settings)
    for layer in model.model.layers:
        layer.input_layernorm_2 = LlamaRMSNorm(settings["hidden_size"], 1e-6)
        layer.post_attention_layernorm_2 = LlamaRMSNorm(settings["hidden_size"], 1e-6)

    def stored(tensors: Tensors) -> Tensors:
        assert sum(bool(re.search("norm_2", name)) for name in tensors) == 4
        return tensors | {"model.early_exit_gate.weight": torch.zeros(1, 64)}

    return OuroTwin(model, settings, stored)

"""Tests of per-token pooling against transformers: token classes and step rewards."""

import asyncio
import json
from pathlib import Path
from typing import Any

import encoders
import httpx
import numpy as np
import pytest
import torch
from oracle import make_tiny
from tiny import prompts_of
from torch import nn

from quire import LLM, PoolingParams
from quire.configure import configure
from quire.entrypoints.child_cores import private_engine
from quire.errors import RequestError
from quire.server.app import Application
from quire.server.settings import make_settings

TOLERANCE = 1e-3
RAW = PoolingParams(use_activation=False)
LENGTHS = (1, 2, 5, 17, 31)
Floats = np.ndarray[Any, Any]
TAG = 5


def opened(path: Path, **settings: Any) -> LLM:
    defaults: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_num_seqs": 4,
        "block_size": 4,
        "num_gpu_blocks_override": 128,
        "use_tqdm_on_load": False,
    }
    return LLM(str(path), **(defaults | settings))


def encoded(llm: LLM, prompts: Any, params: Any = None, task: str = "token_classify") -> list[Floats]:
    return [output.outputs.data for output in llm.encode(prompts, params, pooling_task=task, use_tqdm=False)]


def same(actual: list[Floats], wanted: list[torch.Tensor]) -> None:
    for vectors, expected in zip(actual, wanted, strict=True):
        assert vectors.shape == expected.shape
        assert not vectors.size or np.abs(vectors - expected.numpy()).max() < TOLERANCE


@torch.inference_mode()
def logits(hf: Any, prompts: list[list[int]]) -> list[torch.Tensor]:
    return [hf(torch.tensor([ids])).logits[0] for ids in prompts]


def classifier(path: Path, family: str, body: nn.Module, **settings: Any) -> Any:
    import transformers

    torch.manual_seed(1)
    config: Any = body.config
    config = config.__class__(**(config.to_dict() | settings | {"num_labels": 3}))
    made = getattr(transformers, f"{family}ForTokenClassification")(config).float().eval()
    made.base_model.load_state_dict(body.state_dict(), strict=False)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith(".bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    made.save_pretrained(path)
    return made


@pytest.mark.parametrize("named", [name for name in encoders.ENCODERS if "," not in name])
def test_token_classification_with_encoders(named: str, tmp_path: Path) -> None:
    family, settings = encoders.ENCODERS[named]
    body = encoders.make(tmp_path / "whole", family, **settings).body
    hf = classifier(tmp_path, family, body)
    llm, prompts = opened(tmp_path), encoders.texts(*LENGTHS)
    wanted = logits(hf, prompts)
    same(encoded(llm, prompts, RAW), wanted)
    same(encoded(llm, prompts), [item.softmax(-1) for item in wanted])
    with pytest.raises(RequestError, match="each token and none for a whole text"):
        llm.classify(prompts)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_token_classification_with_decoders(family: str, tmp_path: Path) -> None:
    """Check chunks, and a second run: the prefix cache holds no hidden states."""
    _, body = make_tiny(family.lower(), tmp_path)
    hf = classifier(tmp_path / "classes", family, body.model)
    llm = opened(tmp_path / "classes", max_num_batched_tokens=9)
    prompts = prompts_of(*LENGTHS)
    wanted = logits(hf, prompts)
    for _ in range(2):
        same(encoded(llm, prompts, RAW), wanted)
    same(encoded(llm, prompts), [item.softmax(-1) for item in wanted])
    for call in (llm.classify, llm.embed, lambda texts: llm.score(texts[0], texts[1])):
        with pytest.raises(RequestError):
            call(prompts)


def test_pooling_type_all_returns_all_tokens(tmp_path: Path) -> None:
    path, hf = make_tiny("qwen3", tmp_path)
    llm = opened(path, runner="pooling", pooler_config={"pooling_type": "ALL", "use_activation": False})
    prompts = prompts_of(*LENGTHS)
    with torch.inference_mode():
        wanted = [hf.model(torch.tensor([ids])).last_hidden_state[0] for ids in prompts]
    assert llm.config.cache.enable_prefix_caching
    same(encoded(llm, prompts, task="token_embed"), wanted)
    same(encoded(llm, prompts, task="embed"), [item[-1] for item in wanted])


def prompts_with_step_tags(prompts: list[list[int]]) -> list[list[int]]:
    """Return prompts of steps, each with a tag at its end; the first prompt has none."""
    kept = [[token if token != TAG else TAG + 1 for token in ids] for ids in prompts]
    return [
        kept[0],
        *([TAG if place % 4 == 3 else token for place, token in enumerate(ids)] for ids in kept[1:]),
    ]


class RewardModel(nn.Module):
    """The heads of Qwen2.5-Math-PRM and of earlier reward models."""

    def __init__(self, body: nn.Module, hidden: int, num_labels: int) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.body = body
        self.score = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, num_labels))

    @torch.inference_mode()
    def forward(self, ids: list[int]) -> torch.Tensor:
        out: torch.Tensor = self.score(self.body(torch.tensor([ids])).last_hidden_state[0])
        return out

    def save(self, path: Path, name: str) -> Path:
        from safetensors.torch import load_file, save_file

        tensors = load_file(path / "model.safetensors")
        tensors.pop("lm_head.weight", None)
        save_file(tensors | {f"score.{key}": item for key, item in self.score.state_dict().items()},
                  path / "model.safetensors")  # fmt: skip
        config = json.loads((path / "config.json").read_text()) | {"architectures": [name]}
        (path / "config.json").write_text(json.dumps(config))
        return path


@pytest.mark.parametrize("chunk", [7, 256])
def test_process_reward_model(chunk: int, tmp_path: Path) -> None:
    path, hf = make_tiny("qwen2", tmp_path)
    reward = RewardModel(hf.model, hf.config.hidden_size, 2)
    reward.save(path, "Qwen2ForProcessRewardModel")
    llm = opened(path, max_num_batched_tokens=chunk, pooler_config={"step_tag_id": TAG})
    assert not llm.config.cache.enable_prefix_caching
    prompts = prompts_with_step_tags(prompts_of(*LENGTHS))
    full = [reward(ids) for ids in prompts]
    steps = [item[torch.tensor(ids) == TAG] for ids, item in zip(prompts, full, strict=True)]
    assert [len(item) for item in steps] == [0, 0, 1, 4, 7]
    same(encoded(llm, prompts), [item.softmax(-1) for item in steps])
    same(
        encoded(llm, prompts, PoolingParams(returned_token_ids=[1])),
        [item[:, 1:].sigmoid() for item in steps],
    )
    last = PoolingParams(step_tag_id=prompts[4][-1], use_activation=False)
    same(encoded(llm, prompts[4:], last), [full[4][torch.tensor(prompts[4]) == prompts[4][-1]]])
    assert opened(path).config.pooling.step_tag_id == 151651  # type: ignore[union-attr]


def test_outcome_reward_model(tmp_path: Path) -> None:
    """Check one raw number per token."""
    path, hf = make_tiny("qwen2", tmp_path)
    reward = RewardModel(hf.model, hf.config.hidden_size, 1)
    llm, prompts = opened(reward.save(path, "Qwen2ForRewardModel")), prompts_of(*LENGTHS)
    same(encoded(llm, prompts), [reward(ids) for ids in prompts])


def test_internlm2_reward_model(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path, hf = make_tiny("internlm2", tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors["v_head.weight"] = torch.randn(1, hf.model.config.hidden_size)
    save_file(
        {name: body for name, body in tensors.items() if name != "output.weight"}, path / "model.safetensors"
    )
    config = json.loads((path / "config.json").read_text()) | {"architectures": ["InternLM2ForRewardModel"]}
    (path / "config.json").write_text(json.dumps(config))
    prompts = prompts_of(*LENGTHS)
    with torch.inference_mode():
        bodies = [hf.model.model(torch.tensor([ids])).last_hidden_state[0] for ids in prompts]
    same(encoded(opened(path), prompts), [body @ tensors["v_head.weight"].T for body in bodies])


def test_step_rewards_from_two_token_logits(tmp_path: Path) -> None:
    """Check Math-Shepherd's form: a generative model gives the probability of a good step at each tag."""
    path, hf = make_tiny("mistral", tmp_path)
    good, bad = 20, 11
    pooler = {"pooling_type": "STEP", "step_tag_id": TAG, "returned_token_ids": [good, bad]}
    llm = opened(path, runner="pooling", pooler_config=pooler, max_num_batched_tokens=8)
    prompts = prompts_with_step_tags(prompts_of(*LENGTHS))
    steps = [
        logit[torch.tensor(ids) == TAG][:, [good, bad]]
        for ids, logit in zip(prompts, logits(hf, prompts), strict=True)
    ]
    same(encoded(llm, prompts), [logit.softmax(-1) for logit in steps])
    one = PoolingParams(returned_token_ids=[bad], use_activation=False)
    same(encoded(llm, prompts, one), [logit[:, 1:] for logit in steps])


def test_token_pooling_over_http(tmp_path: Path) -> None:
    """Check that /pooling returns token classes with and without a task, and that other routes reject it."""
    _, body = make_tiny("qwen3", tmp_path)
    hf = classifier(tmp_path / "classes", "Qwen3", body.model)
    prompts = prompts_of(5, 12)
    wanted = [logit.softmax(-1) for logit in logits(hf, prompts)]
    settings = {"model": str(tmp_path / "classes"), "skip_tokenizer_init": True, "dtype": "float32"}

    async def go() -> None:
        async with private_engine(configure(settings | {"num_gpu_blocks_override": 64})) as engine:
            transport = httpx.ASGITransport(Application(engine, make_settings({})).asgi)
            async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
                for route in ("/pooling", "/invocations"):
                    for more in ({"task": "token_classify"}, {}):
                        reply = await client.post(route, json={"input": prompts, **more})
                        assert reply.status_code == 200, reply.text
                        actual = [np.array(logit["data"]) for logit in reply.json()["data"]]
                        same(actual, wanted)
                reply = await client.post("/classify", json={"input": prompts})
                assert reply.status_code == 400 and "token_classify" in reply.json()["error"]["message"]

    asyncio.run(go())

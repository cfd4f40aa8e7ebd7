"""Tiny multimodal checkpoints as engines and as encoders of media, and checks of their answers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import generate_preempted

from quire import LLM, SamplingParams
from quire.attention.torch_sdpa import TorchSDPA
from quire.checkpoint.model import read_checkpoint
from quire.loader import load_model
from quire.models.towers import TOWERS

Answer = tuple[list[int], list[float]]
"""Generated tokens and their logprobs."""


def open_llm(path: Path, **settings: Any) -> LLM:
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "block_size": 4,
        "max_num_seqs": 8,
        "max_model_len": 512,
        "num_gpu_blocks_override": 400,
        "use_tqdm_on_load": False,
    }
    return LLM(str(path), **(defaults | settings))


def load_tower(path: Path, **options: Any) -> Any:
    """Load our encoder of images, videos and audio from a checkpoint."""
    checkpoint = read_checkpoint(path)
    media = checkpoint.facts.media
    assert media is not None
    return load_model(
        checkpoint,
        dtype=torch.float32,
        device=torch.device("cpu"),
        backend=TorchSDPA(),
        max_model_len=64,
        show_progress=False,
        build=TOWERS[media.family],
        partly=True,
        **options,
    )


@torch.inference_mode()
def generate_reference(model: Any, inputs: Any, count: int) -> Answer:
    """Return the answer of transformers' model."""
    out = model.generate(
        **inputs, max_new_tokens=count, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    token_ids: list[int] = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    logprobs = torch.cat(out.logits).log_softmax(-1)
    return token_ids, [float(logprobs[at, token]) for at, token in enumerate(token_ids)]


def check_answers(
    llm: LLM, requests: Sequence[Any], expected: Sequence[Answer], at: Sequence[int]
) -> list[Any]:
    """Check the answers to requests in one batch, then with the prefix cache, then with preemptions in the
    steps `at`. Return the outputs of the first run."""
    count = len(expected[0][0])
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=0)
    outputs = llm.generate(requests, params, use_tqdm=False)
    for output, (token_ids, logprobs) in zip(outputs, expected, strict=True):
        answer = output.outputs[0]
        assert answer.token_ids == token_ids, output.prompt
        positions = zip(answer.logprobs, token_ids, strict=True)
        assert [position[token].logprob for position, token in positions] == pytest.approx(logprobs, abs=1e-3)
    again = llm.generate(requests, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in again] == [token_ids for token_ids, _ in expected]
    assert all(output.num_cached_tokens > 0.5 * len(output.prompt_token_ids) for output in again)
    llm.reset_prefix_cache()
    preempted = generate_preempted(llm, requests, count, at=at)
    assert [output.outputs[0].token_ids for output in preempted] == [token_ids for token_ids, _ in expected]
    return outputs

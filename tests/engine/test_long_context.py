"""Tests of long contexts with sliding windows: outputs match transformers, in few blocks."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from oracle import make_tiny
from tiny import prompts_of
from zoo import TURNS, rope

from quire import LLM, SamplingParams
from quire.checkpoint.layout import most_blocks
from quire.data.outputs import RequestOutput
from quire.sched.kv_manager import KVManager

LENGTH, WINDOW, BLOCK, CHUNK = 2048, 64, 16, 256
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral, all windows": ("mistral", {"attn_implementation": "sdpa"}),
    "gemma-3, five windows to one full": (
        "Gemma3ForCausalLM",
        {"num_hidden_layers": 6, "layer_types": TURNS[:1] * 5 + TURNS[1:], "attn_implementation": "sdpa"},
    ),
    "llama 4, every other in chunks": (
        "Llama4ForCausalLM",
        {"num_hidden_layers": 2, "attention_chunk_size": WINDOW, "attn_implementation": "sdpa"},
    ),
    "gpt-oss, every other a window": (
        "GptOssForCausalLM",
        rope("yarn", factor=65.0, original_max_position_embeddings=64),
    ),
}
Tiny = tuple[LLM, Any]


@pytest.fixture(scope="module", params=MODELS)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    family, settings = MODELS[request.param]
    settings = {"sliding_window": WINDOW, "max_position_embeddings": LENGTH + 64, "vocab_size": 64} | settings
    path, hf_model = make_tiny(family, tmp_path_factory.mktemp("long"), **settings)
    llm = LLM(
        str(path),
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=BLOCK,
        max_num_batched_tokens=CHUNK,
        max_num_seqs=2,
        num_gpu_blocks_override=2000,
        use_tqdm_on_load=False,
    )
    return llm, hf_model


def steps_of(llm: LLM, prompt: list[int], count: int) -> Iterator[list[RequestOutput]]:
    engine = llm.llm_engine
    engine.add_request("long", prompt, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
    while engine.has_unfinished_requests():
        yield engine.step()


@torch.inference_mode()
def greedy(hf_model: Any, tokens: list[int], prompt_len: int) -> list[int]:
    """Return transformers' greedy token at each position of the output."""
    output: list[int] = hf_model(torch.tensor([tokens])).logits[0, prompt_len - 1 : -1].argmax(-1).tolist()
    return output


def max_blocks_held(kv: KVManager) -> int:
    """Return the most blocks that a row holds in any group with a window."""
    sliding = [tables for tables, window in zip(kv.tables, kv.windows, strict=True) if window is not None]
    return max(sum(block is not None for block in row) for tables in sliding for row in tables)


def block_limit(chunk: int) -> int:
    """Return the number of blocks that a row may hold with steps of up to this many tokens."""
    return most_blocks(LENGTH, WINDOW, block_size=BLOCK, max_chunk=chunk)


def test_2k_tokens_after_preemption_and_prefix_hit(tiny: Tiny) -> None:
    """Check for blocks that are freed too early, never, or hit with other tokens in them."""
    llm, hf_model = tiny
    scheduler, (prompt,) = llm.llm_engine.core.scheduler, prompts_of(LENGTH, vocab=64)
    reading, answering, outputs = [], [], []
    for number, made in enumerate(steps_of(llm, prompt, 40)):
        (answering if outputs else reading).append(max_blocks_held(scheduler.kv))
        outputs += made
        if number in (3, 20):  # in the middle of the prompt and of the output
            scheduler._preempt(int(scheduler.running.order[0]))
    assert block_limit(1) < max(reading) <= block_limit(CHUNK)
    assert WINDOW // BLOCK <= max(answering) <= block_limit(BLOCK), "the unfinished block is computed again"
    output = list(outputs[-1].outputs[0].token_ids)
    assert scheduler.num_preemptions == 2 and output == greedy(hf_model, prompt + output, LENGTH)
    longer = prompt + output[:30]
    *_, (second,) = steps_of(llm, longer, 10)
    assert second.num_cached_tokens == len(longer) // BLOCK * BLOCK
    assert list(second.outputs[0].token_ids) == output[30:]

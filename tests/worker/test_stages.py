"""Stages of a pipeline give what one worker gives."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import make_tiny
from staged import Engine

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 5},
    "gemma2": {"num_hidden_layers": 4, "sliding_window": 5},
    "qwen3_moe": {"num_hidden_layers": 4},
    "deepseek_v3": {"num_hidden_layers": 4},
    "granitemoehybrid": {},
    "gpt2": {},
}


def answers(model: Path, **given: Any) -> Engine:
    """Chunks of prompts, shared prefixes, more rows than fit the blocks, an abort."""
    engine = Engine(model, max_num_batched_tokens=16, num_gpu_blocks_override=24, max_model_len=64, **given)
    draw = random.Random(3)
    common = [draw.randrange(3, 90) for _ in range(13)]
    for number in range(7):
        own = [draw.randrange(3, 90) for _ in range(draw.randint(1, 11))]
        asked: dict[str, Any] = {"logprobs": 3} if number % 2 else {"prompt_logprobs": 2}
        if number == 4:
            asked = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.3, "seed": 5}
        engine.add(str(number), common + own if number % 3 else own, count=9 + number, **asked)
    engine.add("gone", common, count=40)
    for _ in range(12):
        engine.step()
    assert engine.core.abort(["gone"])
    engine.tokens.pop("gone")
    engine.run()
    engine.close()
    return engine


@pytest.mark.parametrize("family", FAMILIES)
def test_two_and_three_stages_say_what_one_worker_says(family: str, tmp_path: Path) -> None:
    model, _ = make_tiny(family, tmp_path, **FAMILIES[family])
    one = answers(model)
    num_layers = len(one.config.checkpoint.facts.layers)
    uneven = {"pipeline_parallel_size": 3, "pp_layer_partition": f"1,{num_layers - 2},1"}
    for given in [{"pipeline_parallel_size": 2}, *([uneven] if num_layers > 2 else [])]:
        many = answers(model, **given)
        assert many.most_in_flight == given["pipeline_parallel_size"]
        assert many.core.scheduler.num_preemptions > 0, "blocks that suffice prove less"
        assert many.tokens == one.tokens
        for mine, theirs in ((many.logprobs, one.logprobs), (many.prompt_logprobs, one.prompt_logprobs)):
            assert {id: len(found) for id, found in mine.items()} == {
                id: len(found) for id, found in theirs.items()
            }
            for id in mine.keys() - {"gone"}:
                for a, b in zip(mine[id], theirs[id], strict=True):
                    assert a.token_ids[0] == b.token_ids[0]
                    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)

"""Time one stream with and without draft tokens, on texts that repeat themselves and on others.

python benchmarks/spec_workloads.py [MODEL] [--config JSON] [--streams N]
"""

import argparse
import json
import random
import time
from pathlib import Path
from statistics import median
from typing import Any

from quire import LLM, SamplingParams
from quire.data.outputs import RequestOutput

HERE = Path(__file__)
LENGTH = 160
ROUNDS = 3


def workloads(vocab: int, encode: Any) -> dict[str, tuple[list[int], dict[str, Any]]]:
    """Return the prompt token ids and the sampling parameters of each workload, by its name."""
    code = HERE.with_name("structured_outputs.py").read_text()[1000:3200]
    prose = (HERE.parents[1] / "tests/engine/prose.txt").read_text()[:1500]
    numbers = random.Random(1)
    greedy = {"temperature": 0.0}
    edited = (
        f"The file:\n```python\n{code}\n```\nThe file again, with one line changed:\n```python\n{code[:300]}"
    )
    quoted = f"The text:\n{prose}\nThe text again, word by word:\n{prose[:200]}"
    return {
        "code, edited": (encode(edited), greedy),
        "quotes": (encode(quoted), greedy),
        "prose": (encode(prose), {"temperature": 0.8, "seed": 1}),
        "random": ([numbers.randrange(10, vocab) for _ in range(300)], {"temperature": 1.0, "seed": 2}),
    }


def timed(llm: LLM, ids: list[int], asked: dict[str, Any], streams: int) -> tuple[float, list[RequestOutput]]:
    """Return the tokens per second after the first token of each stream, and the outputs."""
    params = [
        SamplingParams(max_tokens=LENGTH, ignore_eos=True, **asked | {"seed": 7 + stream})
        for stream in range(streams)
    ]
    prompts = [{"prompt_token_ids": ids[stream:]} for stream in range(streams)]
    llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)  # the prefix is cached
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return streams * LENGTH / (time.perf_counter() - began), outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--config", type=json.loads, default={"method": "ngram", "num_speculative_tokens": 8})
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--settings", type=json.loads, default={})
    args = parser.parse_args()
    common = {"max_model_len": 2048, "max_num_seqs": 32, "use_tqdm_on_load": False} | args.settings
    config = {"prompt_lookup_min": 3} | args.config if args.config.get("method") == "ngram" else args.config
    plain, drafting = LLM(args.model, **common), LLM(args.model, speculative_config=config, **common)
    encode = plain.get_tokenizer().encode
    vocab = plain.llm_engine.core.scheduler.running.tokens.shape[0] and 30_000
    print("workload | plain tok/s | with drafts | ratio | tokens a draft | same")
    for name, (ids, asked) in workloads(vocab, encode).items():
        pairs, held, drafts = [], 0, 0
        for _ in range(ROUNDS):
            rate, expected = timed(plain, ids, asked, args.streams)
            faster, found = timed(drafting, ids, asked, args.streams)
            pairs.append((rate, faster))
            for each in (each.outputs[0].spec_decode_metrics or {} for each in found):
                held, drafts = held + each.get("num_accepted_tokens", 0), drafts + each.get("num_drafts", 0)
        same = [each.outputs[0].token_ids for each in expected] == [
            each.outputs[0].token_ids for each in found
        ]
        before, after = (median(column) for column in zip(*pairs, strict=True))
        ratio, length = median(b / a for a, b in pairs), 1 + held / max(drafts, 1)
        print(f"{name} | {before:.1f} | {after:.1f} | {ratio:.2f} | {length:.2f} | {same}", flush=True)


if __name__ == "__main__":
    main()

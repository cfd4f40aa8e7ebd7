"""Tests of drafts after target steps, against drafts computed from all tokens at once."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from heads import (
    CONFIG,
    EPS,
    HIDDEN,
    VOCAB,
    add_prediction,
    drafted,
    eagle,
    eagle3,
    layer_weights,
    mtp,
    norm_weights,
    save_head,
)
from oracle import make_batch, make_tiny, run_hf
from torch import Tensor

from quire.attention.batch import Batch
from quire.checkpoint.draft import read_draft
from quire.configure import configure
from quire.data.params import SamplingParams
from quire.data.step_plan import Admission, StepPlan
from quire.kernels.cpu import native
from quire.models.decoder import HiddenWithAux
from quire.worker.spec.drafter import SequenceEnds, TargetStates
from quire.worker.spec.progress import Span, batch_of_spans
from quire.worker.worker import Worker

BLOCK, LONGEST, ROWS, MOST = 4, 64, 3, 3
WIDTH = LONGEST // BLOCK
Expected = Callable[[list[int], int], list[int]]
"""Function from the tokens so far to the expected drafts."""


class Pair:
    """A target model that samples at random, and its draft model."""

    def __init__(self, target: Path, method: str, draft: Path | None = None, **more: Any) -> None:
        """Build the pair; `of_states` is for a target with SSM states, which must accept all drafts."""
        settings = {"model": str(target), "dtype": "float32", "block_size": BLOCK, "max_num_seqs": ROWS}
        settings |= {"max_model_len": LONGEST, "use_tqdm_on_load": False, "num_gpu_blocks_override": 200}
        speculative = {"method": method, "num_speculative_tokens": MOST, "model": draft and str(draft)}
        if more.pop("of_states", False):
            config = configure(settings)
            config = replace(config, draft=read_draft(method, config.checkpoint, MOST))
        else:
            config = configure(settings | {"speculative_config": speculative | more})
        self.worker = Worker(config)
        self.worker.start()
        self.rng = np.random.default_rng(5)
        self.vocab = config.checkpoint.facts.vocab
        groups = len(self.worker.loaded.layout.groups)
        blocks = self.rng.permutation(np.arange(1, 200))[: groups * ROWS * WIDTH]
        self.tables = torch.from_numpy(blocks.reshape(groups, ROWS, WIDTH).astype(np.int32))
        self.tokens: dict[int, list[int]] = {}
        """Tokens by row; all but the last are computed."""
        self.drafts: dict[int, list[int]] = {}
        self.seen: dict[int, int] = {}
        """Number of tokens computed by the draft model, by row."""
        self.close: set[int] = set()
        """Rows that got drafts in the last step."""

    def batch(self, chunks: dict[int, tuple[list[int], int]]) -> Batch:
        rows = list(chunks)
        batch = make_batch(list(chunks.values()), [[0]] * len(rows), BLOCK)
        batch.rows = torch.tensor(rows, dtype=torch.int32)
        seqs = np.repeat(rows, batch.query_lens_host)
        places = [
            table[seqs, batch.positions // BLOCK].long() * BLOCK + batch.positions % BLOCK
            for table in self.tables
        ]
        batch.slots, batch.block_tables = places[0], self.tables[0]
        others = zip(places[1:], self.tables[1:], strict=True)
        batch.others = tuple(replace(batch, slots=slots, block_tables=table) for slots, table in others)
        return batch

    @torch.inference_mode()
    def run(self, chunks: dict[int, tuple[list[int], int]], kept: list[int], following: list[int]) -> None:
        """Run one step with each row's tokens and computed length.

        The arguments also give the number of accepted tokens per row and the token after them.
        """
        worker, batch = self.worker, self.batch(chunks)
        assert worker.loaded.drafter is not None
        for group in batch.groups:
            worker.loaded.backend.plan(group)
        out = worker.model(batch)
        states = out.aux if isinstance(out, HiddenWithAux) else (out,)
        if worker.loaded.drafter.observes:
            worker.loaded.drafter.observe(
                batch, TargetStates(torch.tensor(following), torch.tensor(kept), states)
            )

    @torch.inference_mode()
    def propose(self, rows: list[int], most: int) -> list[list[int]]:
        """Propose drafts; a draft model first computes the tokens it has not seen."""
        drafter, all_rows = self.worker.loaded.drafter, self.worker._rows
        assert drafter is not None and all_rows is not None
        history = torch.zeros(ROWS, LONGEST, dtype=torch.int32)
        for row in rows:
            history[row, : len(self.tokens[row])] = torch.tensor(self.tokens[row])
        lens = {row: len(self.tokens[row]) for row in rows}
        spans = [Span(row, self.seen.get(row, 0), lens[row] - 2) for row in rows if row not in self.close]
        spans = [span for span in spans if span.start < span.end and not drafter.observes]
        all_rows.block_tables[:, :ROWS, :WIDTH] = self.tables
        if spans:
            settings = all_rows, range(len(self.tables)), history, self.tables
            drafter.catch_up(batch_of_spans(spans, *settings))
        self.seen |= lens
        self.close = set(rows)
        last = torch.tensor([lens[row] - 1 for row in rows])
        ids = torch.stack([history[row, lens[row] - 2 : lens[row]] for row in rows]).long()
        room = torch.full((len(rows),), LONGEST)
        ends = SequenceEnds(torch.tensor(rows, dtype=torch.int32), ids, last, room, self.tables)
        return drafter.propose(ends, most).tolist()

    def prompt(self, lens: dict[int, int]) -> None:
        """Add sequences in two chunks each, the first alone and the second beside all other rows."""
        for row, length in lens.items():
            self.tokens[row] = self.rng.integers(3, self.vocab, length).tolist()
        half = {row: length // 2 for row, length in lens.items()}
        first = {row: (self.tokens[row][: half[row]], 0) for row in lens}
        self.run(first, list(half.values()), [self.tokens[row][half[row]] for row in lens])
        chunks = {row: (self.tokens[row][half[row] :], half[row]) for row in lens}
        others = self._verify([row for row in self.tokens if row not in lens])
        kept = [len(ids) for ids, _ in chunks.values()]
        self._finish(chunks | others[0], kept + others[1], MOST)

    def decode(self, accepted: dict[int, int], most: int = MOST) -> None:
        """Verify the drafts of all rows and accept this many of each."""
        chunks, kept = self._verify(list(self.tokens), accepted)
        self._finish(chunks, kept, most)

    def _verify(
        self, rows: list[int], accepted: dict[int, int] | None = None
    ) -> tuple[dict[int, tuple[list[int], int]], list[int]]:
        chunks, kept = {}, []
        for row in rows:
            known, drafts = self.tokens[row], self.drafts[row]
            chunks[row] = ([known[-1], *drafts], len(known) - 1)
            count = min((accepted or {}).get(row, 0), len(drafts))
            kept.append(1 + count)
            known += drafts[:count]
        return chunks, kept

    def _finish(self, chunks: dict[int, tuple[list[int], int]], kept: list[int], most: int) -> None:
        following = self.rng.integers(3, self.vocab, len(chunks)).tolist()
        for row, token in zip(chunks, following, strict=True):
            self.tokens[row].append(token)
        self.run(chunks, kept, following)
        if most:
            self.drafts = dict(zip(chunks, self.propose(list(chunks), most), strict=True))
        else:
            self.drafts, self.close = {row: [] for row in chunks}, set()

    def check(self, expected: Expected) -> None:
        for row, drafts in self.drafts.items():
            assert drafts == expected(self.tokens[row], len(drafts)), f"row {row}"


def drive(pair: Pair, expected: Expected) -> None:
    """Run chunked prompts, drafts of which none, some or all are accepted, steps without drafts, and new
    sequences.
    """
    pair.prompt({0: 9, 2: 6})
    pair.check(expected)
    for accepted in ({0: 3, 2: 0}, {0: 3, 2: 3}, {0: 1, 2: 2}):
        pair.decode(accepted)
        pair.check(expected)
    pair.decode({0: 3, 2: 1}, most=0)
    assert pair.drafts == {0: [], 2: []}
    pair.decode({})
    pair.check(expected)
    pair.prompt({1: 7})
    pair.check(expected)
    pair.decode({0: 3, 1: 3, 2: 0}, most=2)
    pair.check(expected)
    pair.decode({0: 2, 1: 2, 2: 2})
    pair.check(expected)


def greedy(hf: Any, tokens: list[int], count: int) -> list[int]:
    output = list(tokens)
    for _ in range(count):
        output.append(int(run_hf(hf, output)[-1].argmax()))
    return output[len(tokens) :]


def drive_accepting(pair: Pair, expected: Expected) -> None:
    """Run the same steps with all drafts accepted."""
    pair.prompt({0: 9, 2: 6})
    pair.check(expected)
    for _ in range(3):
        pair.decode({0: 3, 2: 3})
        pair.check(expected)


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_key_value_heads": 1, "num_hidden_layers": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafts")


@pytest.mark.parametrize("target", ["qwen3", "gpt_oss"])
def test_draft_model_continues_greedily(folder: Path, target: str) -> None:
    """Check a draft model with and without windows and with other cache pages than the target."""
    path, _ = make_tiny(target, folder)
    draft, hf = make_tiny("llama", folder, **SMALL)

    pair = Pair(path, "draft_model", draft)
    assert pair.worker.loaded.layout.windows == ((None, 8) if target == "gpt_oss" else (None,))
    drive(pair, partial(greedy, hf))


@pytest.fixture(scope="module")
def deep(folder: Path) -> tuple[Path, Any]:
    return make_tiny("llama", folder / "deep", num_hidden_layers=8)


@torch.no_grad()
def states_of(hf: Any, tokens: list[int], aux_hidden_states: list[int]) -> Tensor:
    """Return [T, n * hidden]: the target's last hidden states, or those of the layers of
    `aux_hidden_states`.
    """
    actual = hf.model(torch.tensor([tokens]), output_hidden_states=True)
    return (
        torch.cat([actual.hidden_states[tap][0] for tap in aux_hidden_states], -1)
        if aux_hidden_states
        else actual[0][0]
    )


@pytest.mark.parametrize(
    "own_embedding", [False, True], ids=["the target's embedding", "an embedding of its own"]
)
def test_eagle(folder: Path, deep: tuple[Path, Any], own_embedding: bool) -> None:
    path, hf = deep
    torch.manual_seed(1)
    weights = layer_weights("layers.0") | {"fc.weight": 0.2 * torch.randn(HIDDEN, 2 * HIDDEN)}
    embed = hf.model.embed_tokens.weight
    if own_embedding:
        embed = torch.randn(VOCAB, HIDDEN)
        weights |= {"fc.bias": torch.randn(HIDDEN), "embed_tokens.weight": embed}
    draft = save_head(folder / f"eagle{own_embedding}", weights, architectures=["LlamaForCausalLM"])

    @torch.no_grad()
    def expected(tokens: list[int], count: int) -> list[int]:
        say = lambda x: int(hf.lm_head(x).argmax())  # noqa: E731
        states = states_of(hf, tokens[:-1], [])
        return drafted(partial(eagle, weights), embed, say, tokens, states, count)

    drive(Pair(path, "eagle", draft), expected)


PUBLISHED = {"architectures": ["LlamaForCausalLMEagle3"]}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "transformer_layer_config": CONFIG,
    "eagle_aux_hidden_state_layer_ids": [1, 3, 6],
    **dict.fromkeys(CONFIG),
}


@pytest.mark.parametrize(
    ("config", "prefix", "aux_hidden_states"),
    [(PUBLISHED, "midlayer", [2, 4, 5]), (SPECULATORS, "layers.0", [1, 3, 6])],
)
def test_eagle3(
    folder: Path, deep: tuple[Path, Any], config: dict[str, Any], prefix: str, aux_hidden_states: list[int]
) -> None:
    """Check a head with every third token, and a separate layer config, with which hidden states
    are normed.
    """
    path, hf = deep
    torch.manual_seed(2)
    known = torch.arange(1, VOCAB, 3)
    weights = layer_weights(prefix, 2 * HIDDEN) | {
        **norm_weights(f"{prefix}.input_layernorm", f"{prefix}.hidden_norm", "norm"),
        "fc.weight": 0.1 * torch.randn(HIDDEN, 3 * HIDDEN),
        "lm_head.weight": torch.randn(len(known), HIDDEN),
        "d2t": known - torch.arange(len(known)),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, known, True),
    }
    draft = save_head(folder / f"eagle3.{prefix}", weights, draft_vocab_size=len(known), **config)
    head = partial(eagle3, weights, prefix=prefix, keeps_normed=config is SPECULATORS)

    @torch.no_grad()
    def expected(tokens: list[int], count: int) -> list[int]:
        say = lambda x: int(known[(weights["lm_head.weight"] @ x).argmax()])  # noqa: E731
        states = states_of(hf, tokens[:-1], aux_hidden_states) @ weights["fc.weight"].T
        return drafted(head, hf.model.embed_tokens.weight, say, tokens, states, count)

    drive(Pair(path, "eagle3", draft), expected)


DEEPSEEK = {
    "join": "model.layers.2.eh_proj",
    "token_norm": "model.layers.2.enorm",
    "states_norm": "model.layers.2.hnorm",
    "last": "model.layers.2.shared_head.norm",
}


QWEN = {
    "join": "mtp.fc",
    "token_norm": "mtp.pre_fc_norm_embedding",
    "states_norm": "mtp.pre_fc_norm_hidden",
    "last": "mtp.norm",
}
KINDS = {"layer_types": ["linear_attention", "full_attention", "full_attention"]}


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "qwen3_5_text", "qwen3_next"])
def test_mtp(folder: Path, family: str) -> None:
    """Check the third layer of a tiny model as MTP layer.

    Qwen's norms add 1, and the output of its last norm goes to the next token.
    """
    is_qwen = family.startswith("qwen")
    path, hf = make_tiny(family, folder / "mtp", num_hidden_layers=3, **(KINDS if is_qwen else {}))
    torch.manual_seed(3)
    names = QWEN if is_qwen else DEEPSEEK
    weights = norm_weights(*(names[name] for name in ("token_norm", "states_norm", "last")))
    weights[f"{names['join']}.weight"] = 0.2 * torch.randn(HIDDEN, 2 * HIDDEN)
    add_prediction(path, ["mtp.layers.0" if is_qwen else "model.layers.2", "model.layers.2"], weights)
    layer, hf.model.layers = hf.model.layers[2], hf.model.layers[:2]

    def head(tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        out, summed = mtp(hf, layer, weights, tokens, states, names, plus=float(is_qwen))
        return out, out if is_qwen else summed

    @torch.no_grad()
    def expected(tokens: list[int], count: int) -> list[int]:
        say = lambda x: int(hf.lm_head(x).argmax())  # noqa: E731
        states = states_of(hf, tokens[:-1], [])
        return drafted(head, hf.model.embed_tokens.weight, say, tokens, states, count)

    pair = Pair(path, "mtp", of_states=is_qwen)
    (drive_accepting if is_qwen else drive)(pair, expected)


def test_mtp_of_step(folder: Path) -> None:
    """Check an MTP layer with window, clamped experts and its own head, on hidden states before the norm."""
    path, hf = make_tiny("step3p5", folder / "mtp", rms_norm_eps=EPS)
    torch.manual_seed(3)
    names = DEEPSEEK | {"last": "model.layers.2.transformer.shared_head.norm"}
    weights = norm_weights(*(names[name] for name in ("token_norm", "states_norm", "last")))
    weights[f"{names['join']}.weight"] = 0.2 * torch.randn(HIDDEN, 2 * HIDDEN)
    kinds = hf.config.layer_types
    add_prediction(path, ["model.layers.2"] * 2, weights)
    config = json.loads((path / "config.json").read_text()) | {"layer_types": kinds}
    (path / "config.json").write_text(json.dumps(config))
    layer, hf.model.layers, hf.model.config.num_hidden_layers = hf.model.layers[2], hf.model.layers[:2], 2
    noted: list[Tensor] = []
    hf.model.norm.register_forward_pre_hook(lambda _, settings: noted.append(settings[0][0]))

    def head(tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        return mtp(hf, layer, weights, tokens, states, names, plus=1.0, window=5)

    @torch.no_grad()
    def expected(tokens: list[int], count: int) -> list[int]:
        states_of(hf, tokens[:-1], [])
        say = lambda x: int(hf.lm_head(x).argmax())  # noqa: E731
        return drafted(head, hf.model.embed_tokens.weight, say, tokens, noted.pop(), count)

    drive(Pair(path, "mtp"), expected)


@pytest.mark.parametrize(
    ("same", "temperature"),
    [(True, 0.0), (False, 0.0), (True, 1.0)],
    ids=["its own draft", "another", "by chance"],
)
def test_worker_outputs_are_equal_with_drafts(
    folder: Path, deep: tuple[Path, Any], same: bool, temperature: float
) -> None:
    """Check plans that give only draft counts, beside an unfinished prompt.

    Sampling by the same seeds from the same logits gives the same tokens.
    """
    if temperature and native.library() is None:
        pytest.skip("without the C kernels, drafts are greedy")
    path, hf = deep
    small = path if same else make_tiny("llama", folder, **SMALL)[0]
    method = {"draft_sample_method": "probabilistic" if temperature else "greedy"}
    worker = Pair(path, "draft_model", small, **method).worker
    prompts = {0: list(range(20, 29)), 2: list(range(50, 64))}
    none = np.empty(0, np.int32)
    new = [
        Admission(
            row=row,
            request_id=str(row),
            token_ids=ids,
            prompt_len=len(ids),
            num_computed=0,
            block_ids=[list(range(1 + row * WIDTH, 1 + (row + 1) * WIDTH))],
            params=SamplingParams(temperature=temperature),
            seed=row,
        )
        for row, ids in prompts.items()
    ]
    output: dict[int, list[int]] = {0: [], 2: []}
    lens = []
    for step, (tokens, drafts) in enumerate([((9, 6), (0, 0)), ((4, 8), (3, 0)), *[((4, 3), (3, 2))] * 5]):
        plan = StepPlan(
            step=step + 1,
            released=[],
            admitted=new if not step else [],
            block_rows=none,
            block_ids=none,
            rows=np.array([0, 2], np.int32),
            num_tokens=np.array(tokens, np.int32),
            samples=np.array([True, step > 0]),
            num_drafts=np.array(drafts, np.int32) if any(drafts) else none,
        )
        result = worker.submit(plan).wait()
        counts = result.counts.tolist() or [1] * len(plan.sampling_rows)
        actual = iter(result.token_ids.tolist())
        for row, count in zip(plan.sampling_rows.tolist(), counts, strict=True):
            output[row] += [next(actual) for _ in range(count)]
        lens.append(counts)
    for row, ids in prompts.items():
        assert temperature or output[row] == greedy(hf, ids, len(output[row])), f"row {row}"
    assert not same or lens == [[1], [4, 1], *[[4, 3]] * 5]

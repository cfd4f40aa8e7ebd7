"""PoolingRunner: the runner of a pooling model, whose requests get vectors instead of tokens."""

import functools
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.pooling import PoolingFacts
from quire.config.engine import EngineConfig
from quire.configure import open_tokenizer
from quire.data.pooling import Floats, Pooled, PoolingParams
from quire.data.step_plan import Ints, Pending, StepPlan, StepResult
from quire.errors import ConfigError
from quire.layers.scope import Scope
from quire.logs import get_logger
from quire.memory import CacheSize, activation_bytes, human
from quire.models.pooling import PoolingModel
from quire.worker.cpu import Done
from quire.worker.device import Model, blank_batch
from quire.worker.input_buffers import StepBuffers, bytes_of, tensors
from quire.worker.memory import Needs, measure_peak
from quire.worker.multimodal.bidirectional import last_visible_in_prompts
from quire.worker.rows import Rows

log = get_logger(__name__)

_NO_SECOND = np.iinfo(np.int32).max
_PART = 256
"""Number of tokens for which outputs as wide as the vocabulary are computed at once."""


def pooling_builder(config: EngineConfig) -> Callable[[ArchFacts, Scope], PoolingModel]:
    """Return the function that builds the model; the tokens of classifier_from_token are converted to ids."""
    assert config.pooling is not None
    label_ids, vocab = [*config.pooling.label_ids], config.checkpoint.facts.vocab
    if any(label >= vocab for label in label_ids):
        raise ConfigError(f"pooler_config: returned_token_ids={label_ids} must be below {vocab}")
    if config.pooling.label_tokens:
        tokenizer = open_tokenizer(config)
        if tokenizer is None:
            raise ConfigError("classifier_from_token needs a tokenizer: unset skip_tokenizer_init")
        for token in config.pooling.label_tokens:
            ids = tokenizer.encode(token, add_special_tokens=False)
            if len(ids) != 1:
                raise ConfigError(f"classifier_from_token: {token!r} must be one token, it is {len(ids)}")
            label_ids += ids
    return functools.partial(PoolingModel, pooling=config.pooling, label_ids=label_ids)


class PoolingRunner:
    """Runs the plans of a pooling model: updates the rows, runs the layers and pools the hidden states. The
    prompt of a row may be computed in several chunks, which are pooled together."""

    def __init__(
        self,
        pooler: PoolingModel,
        model: Model,
        all_rows: Rows,
        pooling: PoolingFacts,
        device: torch.device,
        windows: tuple[int | None, ...] | None,
    ) -> None:
        max_rows = len(all_rows.num_tokens)
        self.pooler, self.model = pooler, model
        self.all_rows = all_rows
        self.pooling = pooling
        self.device = device
        self.windows = windows
        """Sliding window of each layer group; None for a model without a cache."""
        self.params: dict[int, PoolingParams] = {}
        self.partial = torch.zeros((max_rows, pooler.hidden), device=device)
        """[rows, hidden], the state of chunked prompts: the sum so far, or the first hidden state."""
        self.states: dict[int, list[Tensor]] = {}
        """Hidden states of all tokens, for rows that pool by token."""
        self.second_start: Ints = np.full(max_rows, _NO_SECOND, np.int32)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> Pending:
        self.all_rows.apply(plan)
        self._admit(plan)
        batch = self._batch(plan)
        hidden = self._forward(batch)
        result = StepResult(np.empty(0, np.int32), pooled=self._pool(plan, batch, hidden))
        self.all_rows.advance(plan)
        return Done(result)

    def _admit(self, plan: StepPlan) -> None:
        for row in plan.released:
            self.params.pop(row, None)
            self.states.pop(row, None)
        for new in plan.admitted:
            assert new.pooling is not None, "a pooling model gets pooling requests only"
            self.params[new.row] = new.pooling
            second = new.pooling.second_start
            self.second_start[new.row] = _NO_SECOND if second is None else second
            self.states.pop(new.row, None)
            if self._needs_states(new.pooling):
                self.states[new.row] = []

    def _needs_states(self, params: PoolingParams) -> bool:
        """Whether the output for these parameters is computed from the hidden states of all tokens, and not
        from one state or a sum."""
        head = self.pooling.head_of(params.task)
        return params.is_by_token or (head is not None and bool(head.reduce))

    def _forward(self, batch: Batch) -> Tensor:
        if self.windows is not None:
            causal, last_visible = self.model.causal_groups, batch.last_visible
            for number, (group, window) in enumerate(zip(batch.groups, self.windows, strict=True)):
                group.last_visible = None if number in causal else last_visible
                if self.pooling.bidirectional:
                    group.last_visible = last_visible_in_prompts(batch, window)
                self.model.attention.plan(group)
        out: Tensor = self.model.run_layers(batch)
        return out

    def _batch(self, plan: StepPlan) -> Batch:
        all_rows = self.all_rows
        features = self.model.features(plan, all_rows, self.device)
        sizes = features.sizes(plan, len(all_rows.block_tables))
        memory = torch.zeros(bytes_of(sizes), dtype=torch.uint8)
        buffers = StepBuffers(memory, sizes)
        buffers.write(plan, all_rows)
        seq_lens = all_rows.num_computed[plan.rows] + plan.num_tokens
        rows, width = int(plan.rows.max()) + 1, -(-int(seq_lens.max()) // all_rows.block_size)
        tables = torch.from_numpy(np.ascontiguousarray(all_rows.block_tables[:, :rows, :width]))
        inputs = tensors(memory.to(self.device), sizes)
        batch = features.batch(inputs, tables.to(self.device), plan.num_tokens, seq_lens)
        second = np.repeat(self.second_start[plan.rows], plan.num_tokens)
        types = (buffers.arrays["positions"] >= second).astype(np.int64)
        batch.token_types = torch.from_numpy(types).to(self.device)
        batch.logit_lora = None
        return batch

    # ---- from hidden states to vectors

    def _pool(self, plan: StepPlan, batch: Batch, hidden: Tensor) -> dict[int, Pooled]:
        """Return the results of rows that end their prompt in this step."""
        self._keep_states(plan, batch, hidden)
        ended = plan.rows[np.flatnonzero(plan.samples)].tolist()
        outputs = {row: self._pool_tokens(row) for row in ended if row in self.states}
        if not self.pooling.head:
            outputs |= self._pool_texts(plan, batch, hidden)
        return outputs

    def _keep_states(self, plan: StepPlan, batch: Batch, hidden: Tensor) -> None:
        if not self.states:
            return
        chunks = hidden.split(plan.num_tokens.tolist()), batch.token_ids.split(plan.num_tokens.tolist())
        for row, chunk, ids in zip(plan.rows.tolist(), *chunks, strict=True):
            if row in self.states:
                self.states[row].append(self._with_output(self.params[row], chunk, ids))

    def _with_output(self, params: PoolingParams, states: Tensor, ids: Tensor) -> Tensor:
        """Return a copy of the hidden states of the tokens that have an output: those with the id
        `step_tag_id` if it is set, otherwise all but those that the pooling head skips."""
        if params.step_tag_id is not None:
            return states[ids == params.step_tag_id]
        head = self.pooling.head_of(params.task)
        if head is not None and head.skipped_ids:
            return states[~torch.isin(ids, torch.tensor(head.skipped_ids, device=ids.device))]
        return states.clone()

    def _pool_tokens(self, row: int) -> Pooled:
        states, params = torch.cat(self.states.pop(row)), self.params[row]
        head = self.pooling.head_of(params.task)
        if head is None or not head.reduce:
            return Pooled.of(post_process(self._vectors(states, params.task), params, self.pooling))
        reduce = torch.amax if head.reduce == "max" else torch.sum
        parts = [reduce(self.pooler.vectors(part, head.task).float(), 0) for part in states.split(_PART)]
        vector: Floats = reduce(torch.stack(parts), 0).cpu().numpy()
        return Pooled.of(post_process(vector, params, self.pooling))

    def _pool_texts(self, plan: StepPlan, batch: Batch, hidden: Tensor) -> dict[int, Pooled]:
        """Update the pooling state of the plan's rows; return the vectors of rows that end their prompt."""
        rows = torch.from_numpy(plan.rows.astype(np.int64)).to(self.device)
        started = torch.from_numpy(self.all_rows.num_computed[plan.rows] > 0).to(self.device)
        before = torch.where(started[:, None], self.partial[rows], 0.0)
        now = _TYPES[self.pooling.type](hidden, batch, before, started[:, None])
        self.partial[rows] = now
        by_text = [not self._needs_states(self.params[row]) for row in plan.rows.tolist()]
        ended = np.flatnonzero(plan.samples & np.array(by_text))
        if not len(ended):
            return {}
        states = now[torch.from_numpy(ended).to(self.device)]
        if self.pooling.type == "MEAN":
            lens = self.all_rows.prompt_len[plan.rows[ended]].astype(np.float32)
            states = states / torch.from_numpy(lens)[:, None].to(self.device)
        return self._finish_rows(plan.rows[ended].tolist(), self._vectors(states, self.pooling.task))

    def _vectors(self, states: Tensor, task: str | None) -> Floats:
        vectors: Floats = self.pooler.vectors(states, task or self.pooling.task).float().cpu().numpy()
        return vectors

    def _finish_rows(self, rows: list[int], vectors: Floats) -> dict[int, Pooled]:
        """Return the output of each row from its pooled vector by `post_process`. Rows with the same
        parameters, usually all rows, are processed together."""
        outputs: dict[int, Pooled] = {}
        groups: dict[tuple[object, ...], list[int]] = {}
        for place, row in enumerate(rows):
            params = self.params[row]
            groups.setdefault((params.use_activation, params.dimensions), []).append(place)
        for places in groups.values():
            done = post_process(vectors[places], self.params[rows[places[0]]], self.pooling)
            outputs |= {rows[place]: Pooled.of(vector) for place, vector in zip(places, done, strict=True)}
        return outputs

    # ---- memory

    def empty_cache(self, config: EngineConfig, weights: int) -> CacheSize:
        """Return the cache size of an encoder: each row has one empty block, and one more reserved."""
        needs = self.needs(config, weights)
        log.info("Memory: %s (weights: %s), no KV cache", human(needs.total), human(needs.weights))
        return CacheSize(2 * config.scheduler.max_num_seqs + 1, config.model.max_model_len, num_tokens=0)

    @torch.inference_mode()
    def needs(self, config: EngineConfig, weights: int, bound: int = 0) -> Needs:
        """Return the memory that the worker needs besides its cache: estimated on a CPU; on a GPU measured by
        the largest step, with a cache of `bound` bytes. `weights` is the size of the weights in bytes."""
        limits = config.scheduler
        partial_bytes = self.partial.nbytes
        if self.device.type == "cpu":
            tokens = limits.max_num_batched_tokens
            activations = activation_bytes(
                config.rank_facts, config.model.dtype, num_tokens=tokens, num_seqs=0
            )
            return Needs(weights, activations, other=partial_bytes)
        batch = self._dummy_batch(limits.max_num_batched_tokens, config.model.max_model_len)

        def run() -> None:
            hidden = self._forward(batch)
            self._vectors(hidden[:_PART].float(), self.pooling.tasks[0])

        activations = measure_peak(run)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return Needs(weights, activations, other=total - free - weights - bound)

    def _dummy_batch(self, num_tokens: int, max_len: int) -> Batch:
        """Build a batch of sequences of maximum length that read the first block and write nothing."""
        lens = np.full(-(-num_tokens // max_len), max_len, np.int32)
        lens[-1] = num_tokens - int(lens[:-1].sum())
        groups, _, width = self.all_rows.block_tables.shape
        tables = torch.zeros((groups, 1, width), dtype=torch.int32, device=self.device)
        batch, _ = blank_batch(lens, tables, self.device)
        batch.token_types = torch.zeros_like(batch.token_ids)
        return batch


# ---- pooling types: functions of hidden states, batch, the rows' states so far, and whether a row has one

Gather = Callable[[Tensor, Batch, Tensor, Tensor], Tensor]


def _last(hidden: Tensor, batch: Batch, before: Tensor, started: Tensor) -> Tensor:
    return hidden[batch.query_starts[1:].long() - 1].float()


def _first(hidden: Tensor, batch: Batch, before: Tensor, started: Tensor) -> Tensor:
    return torch.where(started, before, hidden[batch.query_starts[:-1].long()].float())


def _sum(hidden: Tensor, batch: Batch, before: Tensor, started: Tensor) -> Tensor:
    lens = (batch.query_starts[1:] - batch.query_starts[:-1]).long()
    return before + torch.segment_reduce(hidden.float(), "sum", lengths=lens, axis=0)


_TYPES: dict[str, Gather] = {"LAST": _last, "CLS": _first, "MEAN": _sum}


# ---- results


def post_process(values: Floats, params: PoolingParams, pooling: PoolingFacts) -> NDArray[np.float32]:
    """Return values [..., size] as requested: selected by id, truncated to `dimensions`, with activation."""
    if params.returned_token_ids is not None:
        values = values[..., params.returned_token_ids]
    if (head := pooling.head_of(params.task)) is not None:
        return _ACTIVATIONS[head.activation](values) if params.use_activation else values
    if pooling.task == "embed":
        values = values[..., : params.dimensions]
        return _normalize(values) if params.use_activation else values
    if not params.use_activation:
        return values
    single = pooling.activation == "softmax" and values.shape[-1] == 1
    return _ACTIVATIONS["sigmoid" if single else pooling.activation](values)


def _normalize(values: Floats) -> Floats:
    length = np.sqrt((values.astype(np.float64) ** 2).sum(-1, keepdims=True))
    out: Floats = (values / np.maximum(length, 1e-12)).astype(np.float32)
    return out


def _softmax(values: Floats) -> Floats:
    powers = np.exp(values - values.max(-1, keepdims=True))
    out: Floats = powers / powers.sum(-1, keepdims=True)
    return out


def _sigmoid(values: Floats) -> Floats:
    out: Floats = 0.5 + 0.5 * np.tanh(0.5 * values)
    return out


_ACTIVATIONS: dict[str, Callable[[Floats], Floats]] = {
    "identity": lambda values: values,
    "normalize": _normalize,
    "relu": lambda values: np.maximum(values, 0),
    "sigmoid": _sigmoid,
    "softmax": _softmax,
}

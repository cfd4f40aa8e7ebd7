"""Memory probe: samples with all features at once, to measure the memory that sampling needs."""

from collections.abc import Callable

import numpy as np
from torch import Tensor

from quire.data.params import SamplingParams
from quire.data.step_plan import Masks
from quire.data.timestamps import TimestampTokens
from quire.memory import rows_at_once
from quire.sampling.logprobs import POSITIONS_AT_ONCE, prompt_logprobs
from quire.sampling.random import SamplingTensors
from quire.sampling.rows import SamplingRows
from quire.sampling.sampler import Sampler


def everything(vocab: int, num_logprobs: int) -> SamplingParams:
    """Return sampling parameters that use every feature, for the measurement of memory."""
    return SamplingParams(
        temperature=0.9,
        top_k=min(50, vocab - 1),
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.1,
        frequency_penalty=0.1,
        presence_penalty=0.1,
        min_tokens=2,
        logprobs=num_logprobs,
        logit_bias={0: 1.0, vocab - 1: -1.0},
        allowed_token_ids=list(range(min(vocab, 1024))),
        bad_words_token_ids=[[1], [0, 2]],
        timestamp_tokens=TimestampTokens(zero=vocab - 1, end=0),
    )


def probe_memory(
    sampler: Sampler,
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    logits: Tensor,
    tensors: SamplingTensors | None,
    num_logprobs: int,
) -> None:
    """Sample from `logits` [N, V] with every sampling feature, and compute prompt logprobs of the hidden
    states `hidden` [T, H], so that the caller can measure the peak memory. At most `rows_at_once` rows are
    sampled, as larger batches are split; only the grammar masks are those of all N rows."""
    vocab = logits.shape[1]
    all_rows = np.arange(len(logits), dtype=np.int32)
    masks = Masks(all_rows, np.full((len(logits), -(-vocab // 32)), 2**32 - 1, np.uint32))
    packed = sampler.constrain(logits, masks, all_rows)
    most = min(len(logits), rows_at_once(vocab))
    params = everything(vocab, min(num_logprobs, vocab))
    for num_rows in (1, most):  # small batches use other kernels, which are compiled here
        state = SamplingRows(num_rows, vocab, logits.device)
        for row in range(num_rows):
            state.admit(row, params, prompt_len=1, seed=row, stop_ids=(0,))
        ones, rows = np.ones(num_rows, np.int32), np.arange(num_rows, dtype=np.int32)
        history = np.zeros((num_rows, 2), np.int32), 2 * ones, ones
        columns = tensors and SamplingTensors(*(column[:num_rows] for column in tensors))
        sampled = sampler(logits[:num_rows], rows, state, *history, tensors=columns)
    del packed
    if sampler.counts is not None:
        sampler.counts.forget()
    hidden = hidden[:POSITIONS_AT_ONCE]
    next_ids = sampled.token_ids[:1].expand(len(hidden))
    prompt_logprobs(lambda states: head(states).float(), hidden, next_ids, num_logprobs, sampler.mode)

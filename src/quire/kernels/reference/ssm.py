"""Operations of layers with an SSM state (Mamba, Mamba-2, gated delta rule): interface, choice, reference.

A layer computes a short convolution, then the scan of Mamba or Mamba-2, or the gated delta rule. Its state
has a fixed size per sequence. The worker assigns a row to each running sequence, and each row has a state. A
sequence whose first token in the batch has position 0 starts from zeros, whatever its row contained before.

With speculative decoding a row has several states: state number n % states_per_row is the state after the
first n tokens. A step with draft tokens keeps the state after each token of the step. The next step starts
from the state after the last accepted token, so that rejected draft tokens leave no trace.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from quire.kernels.cpu import native
from quire.kernels.host_to_device import copy_to_device
from quire.registry import LazyTable

IMPLEMENTATIONS = LazyTable(
    "kernels of states",
    {
        "cpu": "quire.kernels.cpu.ssm:CPUStateOps",
        "cpu, half": "quire.kernels.cpu.ssm:HalfStateOps",
        "reference": "quire.kernels.reference.ssm:StateReference",
        "triton": "quire.kernels.triton.ssm:TritonStateOps",
    },
)
CHUNK = 64
"""Tokens per chunk, which is computed with matrix operations."""
_ALIGNED = 4
"""Alignment of int32 tables in elements; unaligned tables would need another compilation of the kernels."""
L2_EPS = 1e-6
"""Epsilon of the L2 norm of queries and keys of the delta rule."""


@dataclass(frozen=True, slots=True)
class Split:
    """Division of the sequences of a batch into short and longer ones, for which there are different
    kernels."""

    short: Tensor | None
    """[num_short] int32, the sequences with at most `states_per_row` tokens; None if all sequences are."""
    num_short: int
    longer: Tensor
    """[num_longer] int32, the sequences with more tokens."""
    chunks: Tensor
    """[num_chunks, 2] int32, chunks of the longer sequences: (sequence, first token of the chunk in it)."""


class SSMSequences:
    """The sequences of one batch, shared by all layers of a step."""

    def __init__(
        self,
        starts: Tensor,
        rows: Tensor,
        positions: Tensor,
        lens: NDArray[np.int32],
        states_per_row: int = 1,
    ) -> None:
        self.starts = starts
        """[B + 1] int32, the first token of each sequence."""
        self.rows = rows
        """[B] int32, the row of the state of each sequence."""
        self.positions = positions
        """[T] int64, position of each token in its sequence."""
        self.lens = lens
        """[B], number of tokens of each sequence in the batch, on the host."""
        self.states_per_row = states_per_row
        """Number of states of each row. Sequences with at most this many tokens in the batch keep the state
        after each token, longer ones only the last state."""
        self.single = bool((lens == 1).all())
        """Whether every sequence has one token in the batch."""
        self.short = bool((lens <= states_per_row).all())
        """Whether every sequence is short, so that the state after every token is kept. Kernel launches then
        do not depend on the lengths."""

    @functools.cached_property
    def split(self) -> Split:
        return _split(self.lens, self.states_per_row, self.rows.device)

    @property
    def firsts(self) -> Tensor:
        """Return the position [B] of the first token that each sequence has in this batch."""
        return self.positions[self.starts[:-1].long()]

    def state_after(self, num_tokens: Tensor) -> Tensor:
        """Return the index [B] of the state of each sequence after its first `num_tokens` [B] tokens."""
        return self.rows.long() * self.states_per_row + num_tokens % self.states_per_row

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """Yield (index in the batch, first token, last token + 1) of each sequence."""
        ends = np.cumsum(self.lens)
        yield from zip(range(len(ends)), (ends - self.lens).tolist(), ends.tolist(), strict=True)


def _split(lens: NDArray[np.int32], states_per_row: int, device: torch.device) -> Split:
    longer = np.flatnonzero(lens > states_per_row)
    short = np.flatnonzero(lens <= states_per_row)
    counts = -(-lens[longer] // CHUNK)
    firsts = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * CHUNK
    chunks = np.stack((np.repeat(longer, counts), firsts), axis=1)
    arrays = [chunks.ravel(), longer, short]
    places = np.cumsum([0, *(-(-len(array) // _ALIGNED) * _ALIGNED for array in arrays)])
    joined = np.zeros(places[-1], np.int32)
    for place, array in zip(places, arrays, strict=False):
        joined[place : place + len(array)] = array
    table = copy_to_device(joined, device)
    parts = [table[place : place + len(array)] for place, array in zip(places, arrays, strict=False)]
    return Split(parts[2] if len(longer) else None, len(short), parts[1], parts[0].view(-1, 2))


class DecayRates(NamedTuple):
    """Parameters of the decay of states: each token multiplies a state by exp(rate * softplus(x + bias)),
    where x is computed from the token (`dt` of Mamba, `a` of the delta rule)."""

    rate: Tensor
    """[heads] float32, negative; for Mamba [channels, size]."""
    bias: Tensor
    """[heads] float32; [heads * key_dim] for the delta rule with a decay per key channel."""


class DeltaForm(NamedTuple):
    """Variant of the gated delta rule."""

    log_bound: float = 0.0
    """Lower limit of the log decay, which then is log_bound * sigmoid(-rate * (a + bias)); 0: no limit."""
    beta_scale: float = 1.0
    """Factor of sigmoid(b), the weight with which a token is written to the state."""


class ConvWeights(NamedTuple):
    """Weights of a causal depthwise convolution."""

    weight: Tensor
    """[channels, kernel]"""
    bias: Tensor | None
    activated: bool = True
    """Whether silu follows the convolution."""


class ScanInputs(NamedTuple):
    """Inputs of Mamba-2's scan besides x, B and C."""

    dt: Tensor
    """[T, heads], time steps before the bias and softplus."""
    rates: DecayRates
    skip: Tensor
    """[heads] float32, factor of x in the output (D of the paper)."""
    limits: tuple[float, float] = (0.0, math.inf)
    """Bounds to which the time step softplus(dt + bias) is clamped."""


class DeltaInputs(NamedTuple):
    """Inputs of the gated delta rule besides queries, keys and values. `b` [T, heads] gives the weight
    sigmoid(b) with which a token is written to the state."""

    a: Tensor
    """Input of the decay, [T, heads]; [T, heads * key_dim] with a decay per key channel (KDA)."""
    b: Tensor
    rates: DecayRates
    form: DeltaForm = DeltaForm()


class MambaInputs(NamedTuple):
    """Inputs of Mamba's scan besides x and the gate."""

    dt: Tensor
    """[T, channels], time steps before the bias and softplus."""
    b: Tensor
    """[T, size], like c; `size` is the state size of a channel."""
    c: Tensor
    rates: DecayRates
    skip: Tensor
    """[channels] float32, factor of x in the output (D of the paper)."""


GATES = ("sigmoid", "silu", "itself")
"""Functions that are applied to a gate; `itself` is the identity. Kernels identify them by index."""


class StateReference:
    """Operations of layers with an SSM state, in plain torch on any device: the reference for every kernel.

    The T tokens of inputs are those of all sequences. Inputs may have a row stride; states change in place.
    """

    def conv(self, x: Tensor, weights: ConvWeights, state: Tensor, seqs: SSMSequences) -> Tensor:
        """Compute a causal depthwise convolution, followed by silu if `weights.activated`.

        `x` [T, channels] -> [T, channels], contiguous; `state` [states, channels, kernel - 1] contains the
        last kernel - 1 inputs of sequences.
        """
        weight, bias, activated = weights
        firsts, kernel = seqs.firsts, weight.shape[1]
        before = state[seqs.state_after(firsts)].masked_fill((firsts == 0)[:, None, None], 0)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        for at, first, end in [(slice(None), 0, len(x))] if seqs.single else seqs.spans():
            # Single tokens are one batch of windows; otherwise each sequence has its own window.
            new = x[first:end].unsqueeze(-1) if seqs.single else x[first:end].T
            window = torch.cat((before[at], new), -1)
            seen = window.float().unfold(-1, kernel, 1)  # [..., channels, tokens, kernel]
            summed = (seen * weight.float()[:, None]).sum(-1)
            y = summed if bias is None else summed + bias.float()[:, None]
            y = F.silu(y) if activated else y
            out[first:end] = (y[..., 0] if seqs.single else y.T).to(x.dtype)
            num_new = new.shape[-1]
            for count in range(1 if num_new <= seqs.states_per_row else num_new, num_new + 1):
                into = seqs.state_after(firsts + count)[at]
                state[into] = window[..., count : count + kernel - 1]
        return out

    def scan(self, xbc: Tensor, mamba: ScanInputs, state: Tensor, seqs: SSMSequences) -> Tensor:
        """Compute the Mamba-2 scan: h = exp(rate * dt) * h + dt * x B^T, y = h C + skip * x, with
        dt = softplus(dt + bias).

        `xbc` [T, heads * head_dim + 2 * groups * size] has x, B and C side by side; `state` is [states,
        heads, head_dim, size] float32. The result is [T, heads * head_dim].
        """
        (dt, rates, skip, limits), (heads, head_dim, size) = mamba, state.shape[1:]
        width = (xbc.shape[1] - heads * head_dim) // 2
        x, b, c = xbc.float().split([heads * head_dim, width, width], 1)
        x = x.unflatten(1, (heads, head_dim))
        b, c = (_per_head(part.unflatten(1, (-1, size)), heads) for part in (b, c))
        dt = F.softplus(dt.float() + rates.bias).clamp(*limits)
        inputs = x * dt[..., None], b, c, dt * rates.rate
        y = _walk(_scan_step, _scan_chunk, inputs, state, seqs).add_(x * skip[:, None])
        return y.flatten(1).to(xbc.dtype)

    def select(
        self, x: Tensor, gate: Tensor, mamba: MambaInputs, state: Tensor, seqs: SSMSequences
    ) -> Tensor:
        """Compute the Mamba scan of each channel: h = exp(rate * dt) * h + dt * x B, y = h C + skip * x, with
        dt = softplus(dt + bias). The result is multiplied by silu(gate).

        `x` and `gate` [T, channels], `state` [states, channels, size] float32 -> [T, channels].
        """
        dt, rate = F.softplus(mamba.dt.float() + mamba.rates.bias), mamba.rates.rate
        inputs = dt, dt * x.float(), mamba.b.float(), mamba.c.float()
        step, chunk = functools.partial(_select_step, rate=rate), functools.partial(_select_chunk, rate=rate)
        y = _walk(step, chunk, inputs, state, seqs).add_(x.float() * mamba.skip)
        return (y * F.silu(gate.float())).to(x.dtype)

    def delta(self, qkv: Tensor, inputs: DeltaInputs, state: Tensor, seqs: SSMSequences) -> Tensor:
        """Compute the gated delta rule: h = exp(rate * softplus(a + bias)) * h, then
        h += k (sigmoid(b) (v - k h))^T, y = q h. Queries and keys are L2-normalized; queries are then scaled
        by 1 / sqrt(key_dim).

        `qkv` [T, 2 * key_heads * key_dim + heads * value_dim] has q, k and v side by side; `state` is
        [states, heads, key_dim, value_dim] float32. The result is [T, heads * value_dim].
        """
        (a, b, rates, form), (heads, key_dim, value_dim) = inputs, state.shape[1:]
        keys = (qkv.shape[1] - heads * value_dim) // 2
        q, k, v = qkv.float().split([keys, keys, heads * value_dim], 1)
        q, k = (_per_head(_unit(part.unflatten(1, (-1, key_dim))), heads) for part in (q, k))
        q, v = q * key_dim**-0.5, v.unflatten(1, (heads, value_dim))
        steps, rate = (a.float() + rates.bias).unflatten(1, (heads, -1)), rates.rate[:, None]
        log_decay = rate * F.softplus(steps)
        if form.log_bound:
            log_decay = form.log_bound * torch.sigmoid(-rate * steps)
        beta = b.float().sigmoid() * form.beta_scale
        chunk = _delta_chunk if log_decay.shape[2] == 1 else _delta_tokens
        y = _walk(_delta_step, chunk, (q, k, v, beta, log_decay), state, seqs)
        return y.flatten(1).to(qkv.dtype)

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, gate_first: bool) -> Tensor:
        """Return the RMS norm of x * silu(gate) if `gate_first`, else (the RMS norm of x) * silu(gate), for x
        and gate [T, n]. The norm is over groups of as many columns as the weight has elements."""
        pieces = (-1, len(weight))
        wide, factor = x.float().unflatten(1, pieces), F.silu(gate.float()).unflatten(1, pieces)
        wide = wide * factor if gate_first else wide
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        y: Tensor = weight * wide.to(x.dtype)
        return (y if gate_first else y * factor).flatten(1).to(x.dtype)

    def gate(self, x: Tensor, gate: Tensor, by: str) -> Tensor:
        """Return x * f(gate) [T, n] for x and gate [T, n]; `by` is the name of f in `GATES`."""
        assert by in GATES
        if by != "itself":
            gate = torch.sigmoid(gate) if by == "sigmoid" else F.silu(gate)
        return x * gate


StateOps = StateReference
"""Interface of the implementations for all devices: the methods of the reference."""


@functools.cache
def choose(device: torch.device, dtype: torch.dtype) -> StateOps:
    """Return the fastest implementation for models of `dtype` on `device`."""
    kind = "triton" if device.type == "cuda" else "reference"
    if native.serves(device, dtype):
        kind = "cpu"
    elif dtype == torch.float16 and native.serves(device, torch.float32):
        kind = "cpu, half"
    ops: StateOps = IMPLEMENTATIONS[kind]()
    return ops


def _per_head(x: Tensor, heads: int) -> Tensor:
    """Expand x [T, groups, n] to [T, heads, n] by repetition; adjacent heads have the same group."""
    return x.repeat_interleave(heads // x.shape[1], 1)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


_Step = Callable[..., tuple[Tensor, Tensor]]
"""Function from a state and the inputs of tokens to the next state and the outputs."""


def _walk(step: _Step, chunk: _Step, inputs: tuple[Tensor, ...], state: Tensor, seqs: SSMSequences) -> Tensor:
    """Return the outputs of all tokens and update the states. If each sequence has one token, `step` computes
    all at once. Otherwise `chunk` computes each sequence by itself: token by token if all its states are
    kept, else `CHUNK` tokens at a time. The first dimension of `inputs` is T."""
    firsts = seqs.firsts
    is_fresh = (firsts == 0).view(-1, *[1] * (state.dim() - 1))
    before = state[seqs.state_after(firsts)].masked_fill(is_fresh, 0)
    if seqs.single:
        state[seqs.state_after(firsts + 1)], y = step(before, *inputs)
        return y
    pieces = []
    for i, first, end in seqs.spans():
        h, size = before[i], CHUNK if end - first > seqs.states_per_row else 1
        for at in range(first, end, size):
            last = min(at + size, end)
            h, y = chunk(h, *(x[at:last] for x in inputs))
            pieces.append(y)
            if size == 1 or last == end:
                state[seqs.state_after(firsts + last - first)[i]] = h
    return torch.cat(pieces)


def _scan_step(h: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    x, b, c, log_decay = inputs
    h = h * log_decay.exp()[..., None, None] + x[..., None] * b[..., None, :]
    return h, (h * c[..., None, :]).sum(-1)


def _scan_chunk(h: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Compute Mamba-2's scan of L tokens of a sequence: h [heads, head_dim, size], inputs [L, heads, ...]."""
    x, b, c, log_decay = inputs
    since = log_decay.cumsum(0)  # from the start of the chunk
    scores = torch.einsum("ihn,jhn->hij", c, b) * _decays(since)
    y = torch.einsum("hij,jhp->ihp", scores, x)
    y += torch.einsum("ihn,hpn->ihp", c * since.exp()[..., None], h)
    until = (since[-1] - since).exp()[..., None]
    h = h * since[-1].exp()[:, None, None] + torch.einsum("jhn,jhp->hpn", b * until, x)
    return h, y


def _select_step(h: Tensor, *inputs: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
    dt, x, b, c = inputs
    h = h * (dt[..., None] * rate).exp() + x[..., None] * b[..., None, :]
    return h, (h * c[..., None, :]).sum(-1)


def _select_chunk(h: Tensor, *inputs: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
    """Compute Mamba's scan of L tokens of a sequence, one by one: h [channels, size], inputs [L, ...]."""
    pieces = []
    for token in zip(*inputs, strict=True):
        h, y = _select_step(h, *token, rate=rate)
        pieces.append(y)
    return h, torch.stack(pieces)


def _delta_step(h: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v, beta, log_decay = inputs
    h = h * log_decay.exp()[..., None]
    recalled = (h * k[..., None]).sum(-2)
    h = h + k[..., None] * ((v - recalled) * beta[..., None])[..., None, :]
    return h, (h * q[..., None]).sum(-2)


def _delta_tokens(h: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the delta rule to L tokens of a sequence, one by one: inputs as in `_delta_chunk`."""
    pieces = []
    for token in zip(*inputs, strict=True):
        h, y = _delta_step(h, *token)
        pieces.append(y)
    return h, torch.stack(pieces)


def _delta_chunk(h: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the delta rule to L tokens of a sequence: h [heads, key_dim, value_dim], inputs [L, heads, ...].

    Token i writes v_i minus the value that the previous state returns for k_i. That state contains the writes
    of earlier tokens, so the writes are the solution of a triangular system.
    """
    q, k, v, beta, log_decay = (x.transpose(0, 1) for x in inputs)  # [heads, L, ...]
    since = log_decay.squeeze(-1).cumsum(1)
    decays = _decays(since.T)
    scaled_k = k * beta[..., None]
    system = (scaled_k @ k.mT * decays).tril(-1)
    recalled = (scaled_k * since.exp()[..., None]) @ h
    written = torch.linalg.solve_triangular(
        system, v * beta[..., None] - recalled, upper=False, unitriangular=True
    )
    y = (q * since.exp()[..., None]) @ h + (q @ k.mT * decays) @ written
    until = (since[:, -1:] - since).exp()[..., None]
    h = h * since[:, -1].exp()[:, None, None] + (k * until).mT @ written
    return h, y.transpose(0, 1)


def _decays(since: Tensor) -> Tensor:
    """Return the decay factors [heads, L, L] from token j to token i >= j (0 for i < j), from log decays [L,
    heads] that are cumulated from the start of the chunk."""
    gaps = since.T[:, :, None] - since.T[:, None, :]
    above = torch.ones(gaps.shape[1:], dtype=torch.bool, device=gaps.device).triu(1)
    return gaps.masked_fill(above, -torch.inf).exp()

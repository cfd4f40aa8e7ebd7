"""Mixtures of experts in C (`csrc/moe.c`). The reference in torch is `kernels/reference/moe.py`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.checkpoint.facts import Routing
from quire.kernels.cpu.linear import FORMS, PANEL, Matrix
from quire.kernels.cpu.native import Kernel
from quire.kernels.reference.activations import in_c
from quire.kernels.reference.moe import ExpertAdapters

MAX_EXPERTS = 1024
"""Maximum number of experts, equal to that in moe.c."""
_MAX_ROWS = 8192
"""Maximum (token, expert) pairs per call of the kernel, which limits its scratch memory."""
_GROUP_FIELDS = 7

_route = Kernel(
    "quire_route",
    "ids weights logits bias",
    "num_tokens num_experts stride per_token sigmoid renormalized num_groups top_groups group_best bf16",
    "scale",
)
_experts = Kernel(
    "quire_experts",
    "out x ids weights gate_up down gate_up_bias down_bias "
    "counts groups tokens places prepared_x prepared_inner inner outer "
    "slots gate_up_a gate_up_b down_a down_b ranks",
    "num_tokens per_token num_experts num_parts hidden size x_stride activation bf16 "
    "prepared_x_bytes prepared_inner_bytes rank slot_stride adapter_bf16",
    "bound",
)


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose experts as `kernels.reference.moe.route` does, from logits [T, experts] in float32 or bfloat16;
    `bias` [experts] is float32. Among equal scores the expert with the lowest id is chosen."""
    num_tokens, num_experts = logits.shape
    assert logits.dtype in FORMS and logits.stride(1) == 1 and num_experts <= MAX_EXPERTS
    assert bias is None or (bias.dtype == torch.float32 and bias.is_contiguous())
    ids = torch.empty(num_tokens, routing.per_token, dtype=torch.int32)
    weights = torch.empty(num_tokens, routing.per_token, dtype=torch.float32)
    _route(
        (ids, weights, logits, bias),
        num_tokens,
        num_experts,
        logits.stride(0),
        routing.per_token,
        routing.scoring == "sigmoid",
        routing.renormalized,
        routing.num_groups,
        routing.top_groups,
        routing.group_best,
        logits.dtype == torch.bfloat16,
        routing.scale,
    )
    return ids, weights


class CpuExperts:
    """The experts of an MoE layer; a call returns the weighted sum of the chosen experts for each token.

    `gate_up` lists for each expert the matrices that are its gate and up projections, concatenated along the
    output; `down` lists the down projections. A row of the result is bitwise equal alone and in any batch,
    with any number of threads.
    """

    def __init__(
        self,
        gate_up: Sequence[Sequence[Matrix]],
        down: Sequence[Matrix],
        activation: str,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> None:
        parts = [part for expert in gate_up for part in expert]
        assert len(gate_up) == len(down) and len(parts) == len(down) * len(gate_up[0])
        assert len({(part.columns, part.interleaved) for part in parts}) == 1
        assert len({(part.rows, part.columns, part.interleaved) for part in down}) == 1
        self.activation, self.bound = in_c(activation)
        self._first, self._last, self._num_parts = parts[0], down[0], len(gate_up[0])
        self._num_experts, self._hidden, self._size = len(down), down[0].rows, down[0].columns
        assert sum(part.rows for part in gate_up[0]) == 2 * self._size
        matrices = [torch.tensor([part.in_c() for part in group]) for group in (parts, list(down))]
        stored = gate_up_bias, down_bias
        biases = [None if bias is None else bias.float().contiguous() for bias in stored]
        self._stored_biases = [bias for bias in stored if bias is not None]
        self._tables = [*matrices, *biases]
        self._biases = [bias for bias in biases if bias is not None]
        self._matrices = [[of[part] for of in gate_up] for part in range(len(gate_up[0]))] + [list(down)]
        self._held = [tensor for part in (*parts, *down) for tensor in part.held]

    def refresh(self) -> None:
        """Update the float32 copies of the biases, after the biases passed to the constructor were changed in
        place."""
        for bias, stored in zip(self._biases, self._stored_biases, strict=True):
            bias.copy_(stored)

    def by_expert(self) -> list[list[Tensor]]:
        """Return the memory of all matrices, scales and biases of the experts as uint8 tensors: one list for
        each kind of tensor, with an entry per expert."""
        tensors = [[matrix.own_bytes for matrix in matrices] for matrices in self._matrices]
        tensors += [
            [matrix.scales.flatten().view(torch.uint8) for matrix in matrices if matrix.scales is not None]
            for matrices in self._matrices
            if matrices[0].scales is not None
        ]
        return tensors + [list(bias.view(torch.uint8)) for bias in self._biases]

    def __call__(
        self, x: Tensor, ids: Tensor, weights: Tensor, adapters: ExpertAdapters | None = None
    ) -> Tensor:
        """Return the weighted sums [T, hidden] of the experts' outputs for x [T, hidden]; `ids` and `weights`
        [T, per_token] are those of `route`."""
        assert x.dtype in FORMS and x.stride(1) == 1 and x.shape[1] == self._first.columns
        assert ids.dtype == torch.int32 and ids.is_contiguous()
        assert weights.dtype == torch.float32 and weights.is_contiguous()
        out = torch.empty(len(x), self._hidden, dtype=x.dtype)
        step = max(_MAX_ROWS // ids.shape[1], 1)
        for start in range(0, len(x), step):
            rows = slice(start, start + step)
            part = None if adapters is None else adapters._replace(tokens=adapters.tokens[rows])
            self._run(out[rows], x[rows], ids[rows], weights[rows], part)
        return out

    def _run(
        self, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor, adapters: ExpertAdapters | None
    ) -> None:
        num_tokens, per_token = ids.shape
        scratch = self._scratch(num_tokens, ids.numel())
        lora, sizes = _adapters_in_c(adapters, ids.numel())
        _experts(
            (out, x, ids, weights, *self._tables, *scratch, *lora),
            num_tokens,
            per_token,
            self._num_experts,
            self._num_parts,
            self._hidden,
            self._size,
            x.stride(0),
            self.activation,
            x.dtype == torch.bfloat16,
            self._first.prepared_bytes,
            self._last.prepared_bytes,
            *sizes,
            self.bound,
            held=self._held,
        )

    def _scratch(self, num_tokens: int, num_rows: int) -> list[Tensor]:
        """Return the scratch memory for `num_rows` (token, expert) pairs: the tensors of the kernel's
        arguments from `counts` to `outer`. Only rows of experts with at least 4 pairs are padded to whole
        panels."""
        panels = num_rows + min(self._num_experts, num_rows // 4) * (PANEL - 1)
        copies = torch.get_num_threads() if num_tokens == 1 else panels
        return [
            torch.empty(1 + self._num_experts, dtype=torch.int64),
            torch.empty(min(self._num_experts, num_rows) * _GROUP_FIELDS, dtype=torch.int64),
            torch.empty(num_rows, dtype=torch.int32),
            torch.empty(num_rows, dtype=torch.int32),
            torch.empty(copies * self._first.prepared_bytes, dtype=torch.uint8),
            torch.empty(panels * self._last.prepared_bytes, dtype=torch.uint8),
            torch.empty(num_rows * 2 * self._size, dtype=torch.float32),
            torch.empty(num_rows * self._hidden, dtype=torch.float32),
        ]


def _adapters_in_c(
    adapters: ExpertAdapters | None, num_rows: int
) -> tuple[Sequence[Tensor | None], list[int]]:
    """Return the kernel's LoRA arguments: the tensors `slots` to `ranks`, and the sizes from `rank` on."""
    if adapters is None:
        return [None] * 6, [0] * 3
    *matrices, tokens = adapters
    rank, stride, dtype = adapters.down_b.shape[-1], adapters.down_b.stride(0), adapters.down_b.dtype
    assert tokens.dtype == torch.int32 and tokens.is_contiguous() and dtype in FORMS
    assert all(matrix[0].is_contiguous() for matrix in matrices)
    assert len(adapters.down_b) == 1 or {matrix.stride(0) for matrix in matrices} == {stride}
    ranks = torch.empty(num_rows * 2 * rank, dtype=torch.float32)
    return [tokens, *matrices, ranks], [rank, stride, dtype == torch.bfloat16]

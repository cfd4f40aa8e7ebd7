"""Step features: code that runs before and after the forward pass, behind one protocol."""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from quire.attention.batch import LoRATokens
from quire.data.step_plan import StepPlan
from quire.layers.lora import AdapterSlots
from quire.sampling.logprobs import prompt_logprobs
from quire.sampling.sampler import Sampled
from quire.worker.device import ForwardResult
from quire.worker.rows import Rows


class StepFeature(Protocol):
    """A feature of requests that needs work before and after the forward pass of each step, such as prompt
    logprobs."""

    def begin(self, plan: StepPlan) -> None:
        """Prepare a step, after its plan is applied to the rows and before the forward pass."""

    def end(self, plan: StepPlan, output: ForwardResult, sampled: Sampled) -> None:
        """Process a step that has been sampled; `Rows.advance` has not been called yet."""


class PromptLogprobs:
    """Computes the logprobs of prompt tokens for the requests that need them."""

    def __init__(
        self,
        head: Callable[..., Tensor],
        all_rows: Rows,
        logprobs_mode: str,
        adapters: AdapterSlots | None = None,
    ) -> None:
        self.head = head
        self.adapters = adapters
        self.all_rows = all_rows
        self.mode = logprobs_mode
        self._num_logprobs: dict[int, int] = {}
        """Number of top logprobs at each position, by row."""
        self._slot = -1
        """LoRA adapter slot of the row whose logprobs are computed; -1 if it has no adapter."""

    def begin(self, plan: StepPlan) -> None:
        for row in plan.released:
            self._num_logprobs.pop(row, None)
        for new in plan.admitted:
            self._num_logprobs.pop(new.row, None)
            if new.params.prompt_logprobs is not None:
                self._num_logprobs[new.row] = new.params.prompt_logprobs

    def end(self, plan: StepPlan, output: ForwardResult, sampled: Sampled) -> None:
        if not self._num_logprobs:
            return
        hidden = output.hidden  # a row per token of the plan: a step with prompts has no padding in between
        all_rows, starts = self.all_rows, np.cumsum(plan.num_tokens) - plan.num_tokens
        for place, row in enumerate(plan.rows.tolist()):
            computed = int(all_rows.num_computed[row])
            count = min(int(plan.num_tokens[place]), int(all_rows.prompt_len[row]) - 1 - computed)
            if row in self._num_logprobs and count > 0:
                self._slot = int(all_rows.adapter[row])
                states = hidden[starts[place] : starts[place] + count]
                next_ids = torch.from_numpy(
                    all_rows.tokens[row, computed + 1 : computed + 1 + count].astype(np.int64)
                )
                sampled.prompt_logprobs[row] = prompt_logprobs(
                    self._logits, states, next_ids.to(hidden.device), self._num_logprobs[row], self.mode
                )

    def _logits(self, states: Tensor) -> Tensor:
        if self.adapters is None or self._slot < 0:
            return self.head(states).float()
        slots = torch.full((len(states),), self._slot, dtype=torch.int32, device=states.device)
        uses_extra_vocab = bool(self.adapters.has_extra_vocab[self._slot])
        return self.head(states, self.adapters.plan(LoRATokens(slots, uses_extra_vocab))).float()


class ExpertsReadback:
    """Copies the experts that the MoE layers chose for each token to the host, together with the sampled
    tokens, for requests that return them."""

    def begin(self, plan: StepPlan) -> None:
        pass

    def end(self, plan: StepPlan, output: ForwardResult, sampled: Sampled) -> None:
        assert output.routes is not None, "the layers of this step did not keep the experts that they chose"
        experts = torch.stack(output.routes.experts, 1).to(torch.int16)
        sampled.routes = _to_host(output.routes.slots), _to_host(experts)


def _to_host(tensor: Tensor) -> Tensor:
    """Start to copy a tensor to the host. The copy is complete once the sampled tokens of the step have
    arrived there."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)

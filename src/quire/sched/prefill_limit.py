"""The number of prompt tokens in a step while other tenants wait for their next tokens."""

from quire.sched.step_cost import Decodes, StepCost

SLOWDOWN = 2.0
"""Largest factor by which prompts of other tenants may lengthen a step over the time of its decodes alone."""
SHORT_S = 0.025
"""Seconds that a step may always take, whatever its decodes alone take."""
LEAST_TOKENS = 8
"""Prompt tokens that every step may have, so that prompts make progress."""


def prefill_limit(cost: StepCost, decodes: Decodes) -> int:
    """Return the number of prompt tokens that the next step may have beside its decodes, so that it takes at
    most SLOWDOWN times as long as the decodes alone, or SHORT_S."""
    seconds = max(SLOWDOWN * cost.step_s(decodes), SHORT_S)
    return max(cost.num_prompt_tokens(seconds, decodes), LEAST_TOKENS)

"""Why a sequence ends."""

from quire.data.params import find_repetition
from quire.data.plan import DEAD_END, Ints, Verdict
from quire.data.request import Request


def why_stopped(request: Request, tokens: Ints, verdict: Verdict = "") -> tuple[str, int | str | None] | None:
    """Reason and stop_reason if a sequence of these tokens ends with the last of them; `verdict` of its
    grammar, if it has one."""
    params, token_id = request.params, int(tokens[-1])
    if verdict == "error":
        return "error", DEAD_END
    if token_id == request.eos_id:
        return "stop", None
    if params.stop_token_ids and token_id in params.stop_token_ids:
        return "stop", token_id
    if verdict:
        return "stop", None
    if len(tokens) >= request.limit:
        return "length", None
    repetition = params.repetition_detection
    if repetition is not None and find_repetition(tokens[request.prompt_len :].tolist(), repetition):
        return "repetition", "repetition_detected"
    return None

"""Stop conditions: the reason why a sequence ends."""

from quire.data.plan import DEAD_END, TOO_COMPLEX, Ints, Verdict
from quire.data.request import Request


def why_stopped(request: Request, tokens: Ints, verdict: Verdict = "") -> tuple[str, int | str | None] | None:
    """Return reason and stop_reason if the sequence ends with its last token, otherwise None. `verdict` is
    that of its grammar, if any."""
    token_id = int(tokens[-1])
    if verdict == "error":
        return "error", DEAD_END
    if verdict == "limit":
        return "error", TOO_COMPLEX
    if token_id == request.eos_id:
        return "stop", None
    if token_id in request.stop_ids:
        return "stop", token_id
    if verdict:
        return "stop", None
    if len(tokens) >= request.limit:
        return "length", None
    repetition = request.repetition
    if repetition is not None and repetition.is_repetition(tokens[request.prompt_len :]):
        return "repetition", "repetition_detected"
    return None

"""Logprobs of one position with the texts of their tokens."""

from quire.data.outputs import Logprob
from quire.data.plan import RowLogprobs
from quire.text.detokenizer import token_text
from quire.text.tokenizer import Tokenizer


def position_of(row: RowLogprobs, tokenizer: Tokenizer | None, *, ranked: bool) -> dict[int, Logprob]:
    """Return the logprobs by token: the sampled token first, then the best in order of rank."""

    def text(token_id: int) -> str | None:
        return None if tokenizer is None else token_text(tokenizer, token_id)

    chosen, ids, values = row.token_ids[0], row.token_ids, row.logprobs
    position = {chosen: Logprob(values[0], row.rank, text(chosen))}
    for rank in range(1, len(ids)):
        if ids[rank] != chosen:
            position[ids[rank]] = Logprob(values[rank], rank if ranked else None, text(ids[rank]))
    return position

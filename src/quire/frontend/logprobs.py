"""The logprobs of one position, with the texts of its tokens."""

from quire.data.outputs import Logprob
from quire.data.plan import RowLogprobs
from quire.text.detokenizer import token_text
from quire.text.tokenizer import Tokenizer


def position_of(found: RowLogprobs, tokenizer: Tokenizer | None, *, ranked: bool) -> dict[int, Logprob]:
    """The chosen token first; the others are the best in order, so their place is their rank."""

    def text(token_id: int) -> str | None:
        return None if tokenizer is None else token_text(tokenizer, token_id)

    chosen, ids, values = found.token_ids[0], found.token_ids, found.logprobs
    position = {chosen: Logprob(values[0], found.rank, text(chosen))}
    for rank in range(1, len(ids)):
        if ids[rank] != chosen:
            position[ids[rank]] = Logprob(values[rank], rank if ranked else None, text(ids[rank]))
    return position

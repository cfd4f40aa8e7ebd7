"""Beam search: each round samples one token per beam, with the best 2 * beam_width logprobs."""

import math
from dataclasses import replace

import msgspec
import numpy as np

from quire.data.lora import LoRARequest
from quire.data.multimodal import Array
from quire.data.outputs import BeamSearchSequence, Logprob
from quire.data.params import BeamSearchParams, SamplingParams
from quire.errors import RequestError
from quire.frontend.inputs import Prompt


def round_params(params: BeamSearchParams) -> SamplingParams:
    """Return the sampling parameters of a request for one token of a beam, with the 2 * beam_width highest
    logprobs."""
    return SamplingParams(
        max_tokens=1,
        logprobs=2 * params.beam_width,
        temperature=params.temperature,
        ignore_eos=True,
        detokenize=False,
    )


def initial_tokens(prompt: Prompt) -> list[int]:
    """Return the token ids that the beams start with; raise a RequestError for prompt embeddings."""
    if prompt.embeds is not None:
        raise RequestError("beam search needs a prompt of text or token ids", param="prompt_embeds")
    return prompt.token_ids


def beam_prompt(prompt: Prompt, token_ids: list[int]) -> Prompt:
    """Return the prompt to continue a beam with: the beam's tokens, which begin with the tokens of `prompt`,
    and the media of `prompt`."""
    media = prompt.media
    if media is not None:
        items = [msgspec.structs.replace(item) for item in media.items]
        positions = _extend_positions(media.positions, len(token_ids))
        media = msgspec.structs.replace(media, items=items, positions=positions)
    return replace(prompt, token_ids=token_ids, text=None, media=media)


def _extend_positions(positions: Array | None, num_tokens: int) -> Array | None:
    """Return M-RoPE positions [3, num_tokens], in which new tokens continue after the largest position; None
    for a prompt without M-RoPE positions."""
    if positions is None:
        return None
    known = positions.numbers()
    more = known.max() + 1 + np.arange(num_tokens - known.shape[1], dtype=known.dtype)
    return Array.of(np.concatenate((known, np.tile(more, (len(known), 1))), axis=1))


class BeamSearch:
    """State of the beam search of one prompt. The `live` beams are extended by further tokens; the `done`
    beams have ended with the eos token."""

    def __init__(
        self,
        prompt_ids: list[int],
        params: BeamSearchParams,
        *,
        eos_id: int | None,
        max_len: int,
        lora_request: LoRARequest | None = None,
    ) -> None:
        self.params = params
        self.eos_id = eos_id
        self.prompt_len = len(prompt_ids)
        self.max_len = min(max_len, len(prompt_ids) + params.max_tokens)
        self.live = [BeamSearchSequence(list(prompt_ids), [], lora_request)]
        self.done: list[BeamSearchSequence] = []

    @property
    def finished(self) -> bool:
        return not self.live or len(self.live[0].tokens) >= self.max_len

    def advance(self, continuations: list[dict[int, Logprob]]) -> None:
        """Extend all beams by one token and keep the best ones; `continuations[i]` has the logprobs of the
        likeliest next tokens of `live[i]`, by token id."""
        for beam in self.live:
            if beam.lora_request is not None and beam.lora_request.load_inplace:  # only in the first round
                beam.lora_request = msgspec.structs.replace(beam.lora_request, load_inplace=False)
        grown: list[BeamSearchSequence] = []
        for beam, choices in zip(self.live, continuations, strict=True):
            for token_id, choice in choices.items():
                ends = token_id == self.eos_id and not self.params.ignore_eos
                keep_token = not ends or self.params.include_stop_str_in_output
                longer = BeamSearchSequence(
                    tokens=[*beam.tokens, token_id] if keep_token else beam.tokens,
                    logprobs=[*beam.logprobs, choices],
                    lora_request=beam.lora_request,
                    cum_logprob=beam.cum_logprob + choice.logprob,
                    finish_reason="stop" if ends else None,
                    stop_reason=self.eos_id if ends else None,
                )
                (self.done if ends else grown).append(longer)
        grown.sort(key=self.score, reverse=True)
        self.live = grown[: self.params.beam_width]

    def score(self, beam: BeamSearchSequence) -> float:
        length = len(beam.tokens)
        if beam.finish_reason == "stop" and self.params.include_stop_str_in_output:
            length -= 1
        return beam.cum_logprob / math.pow(length, self.params.length_penalty)

    def best(self) -> list[BeamSearchSequence]:
        for beam in self.live:
            beam.finish_reason = "length"
        return sorted(self.done + self.live, key=self.score, reverse=True)[: self.params.beam_width]

"""Requests to pooling models: completion of parameters, pairs of texts, and similarity scores."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from quire.checkpoint.pooling import PoolingFacts, dimensions_error
from quire.data.pooling import PoolingParams
from quire.data.pooling_outputs import PoolingOutput, PoolingRequestOutput
from quire.errors import RequestError

T = TypeVar("T")
Base = PoolingRequestOutput[PoolingOutput]

NOT_POOLING = (
    "{what} is only supported for pooling models. Try passing `--runner pooling` to use the model as a "
    "pooling model."
)
_NOT_CONVERTED = {
    "embed": "Embedding API is not supported by this model. "
    "Try converting the model using `--convert embed`.",
    "classify": "Classification API is not supported by this model. "
    "Try converting the model using `--convert classify`.",
}
_ONLY_TOKENS = (
    "this model has an output for each token and none for a whole text: use the task 'token_classify', as in "
    "`LLM.encode(..., pooling_task='token_classify')` or a `task` of /pooling"
)
NO_TASK = (
    "pooling_task required for `LLM.encode`: use `LLM.embed(...)` or pooling_task='embed' for embeddings, "
    "`LLM.classify(...)` or pooling_task='classify' for classes, `LLM.score(...)` for similarity scores, "
    "pooling_task='token_embed' or 'token_classify' for every token."
)
NOT_GENERATIVE = (
    "generation is only supported for generative models, and this one is used for pooling. Try passing "
    "`--runner generate` to use the model as a generative model."
)


def pools(pooling: PoolingFacts | None, what: str) -> PoolingFacts:
    """Return the pooling facts of a pooling model; raise a RequestError for a generative model. `what` names
    the call, for the error message."""
    if pooling is None:
        raise RequestError(NOT_POOLING.format(what=what))
    return pooling


def completed(params: PoolingParams, pooling: PoolingFacts, second_start: int | None) -> PoolingParams:
    """Return a copy of `params` that is checked against the model and has the model's defaults filled in.
    `second_start` is the position of the second of two texts."""
    params = params.clone()
    params.task = params.task or pooling.tasks[0]  # type: ignore[assignment]
    kind = str(params.task).removeprefix("token_")
    if pooling.task_heads and params.task not in pooling.tasks:
        raise RequestError(
            f"this model does not have the task {params.task!r}; its tasks: {', '.join(pooling.tasks)}",
            param="task",
        )
    if not pooling.task_heads and kind != pooling.task:
        raise RequestError(_NOT_CONVERTED[kind], param="task")
    if params.task not in pooling.tasks:
        raise RequestError(_ONLY_TOKENS, param="task")
    if params.use_activation is None:
        params.use_activation = pooling.use_activation
    if params.dimensions is not None and kind == "classify":
        raise RequestError("dimensions are for embeddings: remove them", param="dimensions")
    if params.dimensions is not None and (wrong := dimensions_error(pooling, params.dimensions)):
        raise RequestError(wrong, param="dimensions")
    params.dimensions = params.dimensions or pooling.dimensions
    params.skip_reading_prefix_cache = params.is_by_token or bool(params.skip_reading_prefix_cache)
    params.second_start = second_start if pooling.token_types > 1 else None
    _fill_steps(params, pooling)
    return params


def _fill_steps(params: PoolingParams, pooling: PoolingFacts) -> None:
    """Set step_tag_id and returned_token_ids (as indices of the model's labels) for the pooling type STEP;
    refuse them for other pooling types."""
    if not (params.is_by_token and pooling.token_type == "STEP"):
        for name in ("step_tag_id", "returned_token_ids"):
            if getattr(params, name) is not None:
                raise RequestError(
                    f"{name} is for tasks of tokens with the pooling_type STEP (pooler_config): remove it",
                    param=name,
                )
        return
    if params.step_tag_id is None:
        params.step_tag_id = pooling.step_tag_id
    returned = [*(params.returned_token_ids or pooling.returned_token_ids)]
    known = pooling.label_ids or range(pooling.size)
    if not all(id in known for id in returned):
        allowed = ", ".join(map(str, known)) if pooling.label_ids else f"numbers below {pooling.size}"
        raise RequestError(
            f"returned_token_ids={returned} must be among those of this model: {allowed}",
            param="returned_token_ids",
        )
    params.returned_token_ids = [known.index(id) for id in returned] or None


def second_start(token_type_ids: Sequence[int], num_tokens: int) -> int | None:
    """Return the index of the first token of type 1, or None if all have type 0. Raise a RequestError unless
    there are `num_tokens` types, first zeros and then ones."""
    types = list(token_type_ids)
    start = types.index(1) if 1 in types else len(types)
    if len(types) != num_tokens or types != [0] * start + [1] * (len(types) - start):
        raise RequestError(
            f"token_type_ids must be zeros and then ones, one for each of the {num_tokens} tokens",
            param="token_type_ids",
        )
    return start if start < len(types) else None


# ---- scores


def reads_pairs(pooling: PoolingFacts) -> bool:
    """Return whether the model is a cross-encoder, which scores two texts in one prompt. An embedding model
    scores by `similarity`."""
    if pooling.task == "embed":
        return False
    if pooling.head:
        raise RequestError(_ONLY_TOKENS)
    if pooling.size != 1:
        raise RequestError(f"Score API is only enabled for num_labels == 1, this model has {pooling.size}")
    return True


def pairs(firsts: list[T], seconds: list[T]) -> list[tuple[T, T]]:
    """Return pairs of the inputs of two sides: 1 : 1, 1 : N (the first with each of the second side), or N :
    N by position. Raise a RequestError for other lengths."""
    if not firsts or not seconds:
        raise RequestError("At least one text must be given on each side of a score")
    if len(firsts) not in (1, len(seconds)):
        raise RequestError(
            f"Input lengths must be either 1:1, 1:N or N:N, got {len(firsts)} and {len(seconds)}"
        )
    return list(zip(firsts * len(seconds) if len(firsts) == 1 else firsts, seconds, strict=True))


def embedding_task(pooling: PoolingFacts) -> str:
    """Return the pooling task whose outputs `similarity` compares: `embed`, or `token_embed` for late
    interaction."""
    return "token_embed" if pooling.is_late_interaction else "embed"


def similarity(first: Base, second: Base) -> Base:
    """Compute the similarity of two inputs, as one output: the cosine of two embeddings or, of vectors of
    tokens, the sum over the first input of the largest product with a token of the second (MaxSim)."""
    a, b = (output.outputs.data.astype(np.float64) for output in (first, second))
    if a.ndim == 2:
        closeness = (a @ b.T).max(1).sum()
    else:
        closeness = a @ b / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-12)
    return PoolingRequestOutput(
        request_id=f"{first.request_id}_{second.request_id}",
        outputs=PoolingOutput(np.array(closeness, np.float32)),
        prompt_token_ids=first.prompt_token_ids + second.prompt_token_ids,
        num_cached_tokens=first.num_cached_tokens + second.num_cached_tokens,
        finished=True,
    )

"""The bodies of the routes of pooling models: what clients send and, for the document, what they get."""

from typing import Literal

from pydantic import AliasChoices, BaseModel, Field, JsonValue

from quire.data.params import INT64_MAX
from quire.server.openai.replies import UsageReply
from quire.server.openai.requests import Body, ConversationBody, EngineBody, MediaBody, Prompts, Some

_OLDER = "An older name of use_activation."

# ---- what clients send


class PoolingBody(EngineBody):
    """What all routes of pooling models have in common."""

    use_activation: bool | None = Field(
        None,
        description="Embeddings of length 1, classes as probabilities. Default: as the model says.",
    )
    normalize: bool | None = Field(None, description=_OLDER)
    activation: bool | None = Field(None, description=_OLDER)
    softmax: bool | None = Field(None, description=_OLDER)

    @property
    def activates(self) -> bool | None:
        asked = (self.use_activation, self.normalize, self.activation, self.softmax)
        return next((each for each in asked if each is not None), None)


class VectorOptions(PoolingBody):
    """How vectors are sent."""

    dimensions: int | None = Field(
        None,
        description="Only the first so many numbers, for models that were trained for it.",
        json_schema_extra={"minimum": 1},
    )
    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] = Field(
        "float",
        description="Lists of numbers, base64 of their bytes, or nothing but bytes, with the rest of the "
        "answer in the header `metadata` or without it.",
    )
    embed_dtype: Literal["float32", "float16", "bfloat16"] = Field(
        "float32", description="Of base64 and bytes."
    )
    endianness: Literal["native", "little", "big"] = Field("native", description="Of base64 and bytes.")


class InputBody(PoolingBody):
    """One or more inputs, as texts or as token ids."""

    input: Prompts = Field(
        description="A text, token ids, or many of either.", examples=["The quick brown fox"]
    )
    add_special_tokens: bool = True


class PoolingChatBody(PoolingBody, ConversationBody):
    """A conversation as the one input."""

    add_generation_prompt: bool = False


class EmbeddingInput(InputBody, VectorOptions):
    """The body of /v1/embeddings for texts or token ids."""


class EmbeddingChatBody(PoolingChatBody, VectorOptions):
    """The body of /v1/embeddings for a conversation."""


PoolingTask = Literal["embed", "classify", "token_embed", "token_classify"]


class PoolingInputBody(InputBody, VectorOptions):
    """The body of /pooling for texts or token ids."""

    task: PoolingTask | None = Field(None, description="Default: what the model is for.")


class PoolingChatRequest(PoolingChatBody, VectorOptions):
    """The body of /pooling for a conversation."""

    task: PoolingTask | None = Field(None, description="Default: what the model is for.")


class ContentParts(Body):
    """A text and media that are one, for models that take them: parts as messages have them."""

    content: Some[dict[str, JsonValue]]


Texts = str | ContentParts | Some[str | ContentParts]


class ScoreBody(PoolingBody, MediaBody):
    """The body of /score."""

    text_1: Texts = Field(
        description="One text, or as many as in text_2. Also called `queries` or `data_1`. In place of a text"
        " there may be `content` in parts.",
        validation_alias=AliasChoices("text_1", "queries", "data_1"),
        examples=["Who sleeps?"],
    )
    text_2: Texts = Field(
        description="What they are compared with. Also called `documents`, `items` or `data_2`.",
        validation_alias=AliasChoices("text_2", "documents", "items", "data_2"),
        examples=[["The dog sleeps.", "A page is a block."]],
    )


class RerankBody(PoolingBody, MediaBody):
    """The body of /rerank."""

    query: str | ContentParts = Field(examples=["Who sleeps?"])
    documents: Texts = Field(examples=[["The dog sleeps.", "A page is a block."]])
    top_n: int | None = Field(0, ge=0, le=INT64_MAX, description="How many to return; 0: all.")


# ---- what they get


class PooledReply(BaseModel):
    """What every list of results is in."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    usage: UsageReply


class EmbeddingReplyItem(BaseModel):
    """One input as a vector."""

    index: int
    object: Literal["embedding"]
    embedding: list[float] | str


class EmbeddingReply(PooledReply):
    """An answer of /v1/embeddings."""

    id: str = Field(examples=["embd-1f3b"])
    data: list[EmbeddingReplyItem]


class PooledData(BaseModel):
    """What was pooled of one input: a vector, or one for each token."""

    index: int
    object: Literal["pooling"]
    data: list[list[float]] | list[float] | str


class PoolingReply(PooledReply):
    """An answer of /pooling."""

    id: str = Field(examples=["pooling-1f3b"])
    data: list[PooledData]


class ClassifyReplyItem(BaseModel):
    """One input's classes, and the likeliest by its name."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassifyReply(PooledReply):
    """An answer of /classify."""

    id: str = Field(examples=["classify-1f3b"])
    data: list[ClassifyReplyItem]


class ScoreReplyItem(BaseModel):
    """How well two texts fit."""

    index: int
    object: Literal["score"]
    score: float


class ScoreReply(PooledReply):
    """An answer of /score."""

    id: str = Field(examples=["score-1f3b"])
    data: list[ScoreReplyItem]


class RerankDocument(BaseModel):
    """A document as it was sent: its text, or its parts."""

    text: str | None = None
    multi_modal: list[dict[str, JsonValue]] | None = None


class RerankResult(BaseModel):
    """A document and how well it fits the query; `index` is its place among those sent."""

    index: int
    document: RerankDocument
    relevance_score: float


class RerankUsage(BaseModel):
    """Tokens in."""

    prompt_tokens: int
    total_tokens: int


class RerankReply(BaseModel):
    """An answer of /rerank, the best first."""

    id: str = Field(examples=["rerank-1f3b"])
    model: str
    usage: RerankUsage
    results: list[RerankResult]

"""Request and reply bodies of the pooling routes."""

from typing import Literal

from pydantic import AliasChoices, BaseModel, Field, JsonValue

from quire.data.params import INT64_MAX
from quire.server.openai.replies import UsageReply
from quire.server.openai.requests import Body, ConversationBody, EngineBody, MediaBody, Prompts, Some, doc

_OLDER = "Older name of use_activation."

# ---- requests


class PoolingBody(EngineBody):
    """Fields that all pooling routes share."""

    use_activation: bool | None = doc(
        "Normalize embeddings, return class probabilities. Default: the model's setting."
    )
    normalize: bool | None = doc(_OLDER)
    activation: bool | None = doc(_OLDER)
    softmax: bool | None = doc(_OLDER)

    @property
    def activates(self) -> bool | None:
        values = (self.use_activation, self.normalize, self.activation, self.softmax)
        return next((value for value in values if value is not None), None)


class VectorOptions(PoolingBody):
    """Format of the returned vectors."""

    dimensions: int | None = doc(
        "Truncate the vectors to this size, for Matryoshka models.", json_schema_extra={"minimum": 1}
    )
    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] = doc(
        "Lists of numbers, base64 of their bytes, or raw bytes, with (bytes) or without "
        "(bytes_only) the rest of the reply in the header `metadata`.",
        "float",
    )
    embed_dtype: Literal["float32", "float16", "bfloat16"] = doc("Applies to base64 and bytes.", "float32")
    endianness: Literal["native", "little", "big"] = doc("Applies to base64 and bytes.", "native")


class InputBody(PoolingBody):
    """One or more inputs, as texts or as token ids."""

    input: Prompts = Field(
        description="A text, token ids, or many of either.", examples=["The quick brown fox"]
    )
    add_special_tokens: bool = True


class PoolingChatBody(PoolingBody, ConversationBody):
    """A conversation as the only input."""

    add_generation_prompt: bool = False


class EmbeddingInput(InputBody, VectorOptions):
    """The body of /v1/embeddings for texts or token ids."""


class EmbeddingChatBody(PoolingChatBody, VectorOptions):
    """The body of /v1/embeddings for a conversation."""


PoolingTask = Literal["embed", "classify", "token_embed", "token_classify"]


class PoolingInputBody(InputBody, VectorOptions):
    """The body of /pooling for texts or token ids."""

    task: PoolingTask | None = doc("Default: the model's task.")


class PoolingChatRequest(PoolingChatBody, VectorOptions):
    """The body of /pooling for a conversation."""

    task: PoolingTask | None = doc("Default: the model's task.")


class ContentParts(Body):
    """Text and media that form one input, for multimodal models; parts are those of chat messages."""

    content: Some[dict[str, JsonValue]]


Texts = str | ContentParts | Some[str | ContentParts]


class ScoreBody(PoolingBody, MediaBody):
    """The body of /score."""

    text_1: Texts = Field(
        description="One text, or as many as in text_2. Aliases: `queries`, `data_1`. A text may be replaced "
        "by an object with `content` parts.",
        validation_alias=AliasChoices("text_1", "queries", "data_1"),
        examples=["Who sleeps?"],
    )
    text_2: Texts = Field(
        description="The texts to compare with. Aliases: `documents`, `items`, `data_2`.",
        validation_alias=AliasChoices("text_2", "documents", "items", "data_2"),
        examples=[["The dog sleeps.", "A page is a block."]],
    )


class RerankBody(PoolingBody, MediaBody):
    """The body of /rerank."""

    query: str | ContentParts = Field(examples=["Who sleeps?"])
    documents: Texts = Field(examples=[["The dog sleeps.", "A page is a block."]])
    top_n: int | None = doc("Number of results to return; 0: all.", 0, ge=0, le=INT64_MAX)


# ---- replies


class PooledReply(BaseModel):
    """Fields that the replies with a list `data` of results, one for each input, share."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    usage: UsageReply


class EmbeddingReplyItem(BaseModel):
    """The embedding of input number `index`: numbers, or base64 of their bytes."""

    index: int
    object: Literal["embedding"]
    embedding: list[float] | str


class EmbeddingReply(PooledReply):
    """The reply of /v1/embeddings."""

    id: str = Field(examples=["embd-1f3b"])
    data: list[EmbeddingReplyItem]


class PooledData(BaseModel):
    """The result of input number `index`: a vector, one vector per token, or base64 of the values."""

    index: int
    object: Literal["pooling"]
    data: list[list[float]] | list[float] | str


class PoolingReply(PooledReply):
    """The reply of /pooling."""

    id: str = Field(examples=["pooling-1f3b"])
    data: list[PooledData]


class ClassifyReplyItem(BaseModel):
    """Class probabilities of one input and the label of the likeliest class."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassifyReply(PooledReply):
    """The reply of /classify."""

    id: str = Field(examples=["classify-1f3b"])
    data: list[ClassifyReplyItem]


class ScoreReplyItem(BaseModel):
    """Score of pair number `index`: how similar or relevant the two texts are to each other."""

    index: int
    object: Literal["score"]
    score: float


class ScoreReply(PooledReply):
    """The reply of /score."""

    id: str = Field(examples=["score-1f3b"])
    data: list[ScoreReplyItem]


class RerankDocument(BaseModel):
    """A document as it was received: its text or its parts."""

    text: str | None = None
    multi_modal: list[dict[str, JsonValue]] | None = None


class RerankResult(BaseModel):
    """A document and its relevance to the query; `index` is its position in the request, from 0."""

    index: int
    document: RerankDocument
    relevance_score: float


class RerankUsage(BaseModel):
    """Token counts of a rerank request."""

    prompt_tokens: int
    total_tokens: int


class RerankReply(BaseModel):
    """The reply of /rerank, most relevant first."""

    id: str = Field(examples=["rerank-1f3b"])
    model: str
    usage: RerankUsage
    results: list[RerankResult]

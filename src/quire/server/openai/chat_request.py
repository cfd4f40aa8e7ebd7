"""A chat request that is ready for the engine, as the encoders of its answer use it."""

from dataclasses import dataclass, field

from quire.server.openai.answer_pieces import AnswerFormat, OutputParser, ToolUse
from quire.server.openai.api_call import ApiCall
from quire.server.openai.requests import ChatBody


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A checked chat request: its body, its engine call, and how its output is parsed and returned."""

    body: ChatBody
    call: ApiCall
    role: str
    """Role of the response message."""
    echoed: str
    """Beginning of the response: the last message, if `echo` is set and the roles match."""
    tools: ToolUse = field(default_factory=ToolUse)
    format: AnswerFormat = field(default_factory=AnswerFormat)

    @property
    def parses(self) -> bool:
        return self.format.make_parser is not None

    def parser(self) -> OutputParser:
        return OutputParser(
            self.format.make_parser and self.format.make_parser(),
            reasoning=self.format.reasoning,
            breaks=self.format.breaks,
            omit_reasoning=self.body.include_reasoning is False,
            single_call=not self.tools.parallel,
        )

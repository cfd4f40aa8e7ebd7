"""Answers that a grammar made tool calls, whatever the model's own way to write them."""

from quire.text.parsers.calls import IdMaker, Schemas, ToolParser
from quire.text.parsers.engine import Wait
from quire.text.parsers.json_calls import ObjectParser


class RequiredCalls(ObjectParser):
    """A list of `{"name", "parameters"}`. What breaks off behind a call is dropped."""

    def script(self) -> Wait[None]:
        self.hold()
        whole = yield from self.objects()
        if not whole and self._num_calls == 0:
            self.give_back()
            yield from self.until((), self.text)
        self.release()
        yield from self.until((), lambda text: None)


class NamedCall(ToolParser):
    """The arguments of one function, and nothing else."""

    def __init__(self, name: str, *, schemas: Schemas | None = None, make_id: IdMaker | None = None) -> None:
        self.name = name
        super().__init__(schemas=schemas, make_id=make_id)

    def script(self) -> Wait[None]:
        if (yield from self.space()):
            self.start(self.name)
            yield from self.until((), self.arguments)

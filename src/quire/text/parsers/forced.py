"""Outputs that a grammar forces to be tool calls, in a format independent of the model."""

from quire.text.parsers.calls import IdMaker, Schemas, ToolParser
from quire.text.parsers.engine import Wait
from quire.text.parsers.json_calls import ObjectParser


class RequiredCalls(ObjectParser):
    """A list of `{"name", "parameters"}`. An incomplete call after the first is dropped."""

    def script(self) -> Wait[None]:
        self.hold()
        whole = yield from self.objects()
        if not whole and self._num_calls == 0:
            self.give_back()
            yield from self.until((), self.text)
        self.release()
        yield from self.until((), lambda text: None)


class NamedCall(ToolParser):
    """The arguments of one function without anything else."""

    def __init__(self, name: str, *, schemas: Schemas | None = None, make_id: IdMaker | None = None) -> None:
        self.name = name
        super().__init__(schemas=schemas, make_id=make_id)

    def script(self) -> Wait[None]:
        if (yield from self.space()):
            self.start(self.name)
            yield from self.until((), self.arguments)

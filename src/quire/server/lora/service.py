"""`LoRAService`: from the name that a request gives to the adapter that answers it."""

import asyncio
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.config.env import Env
from quire.data.lora import LoRARequest
from quire.errors import ConfigError, RequestError
from quire.logs import get_logger
from quire.server.engine import Engine
from quire.server.http.errors import Forbidden, InvalidUserInput, NotFound
from quire.server.lora.locations import LoRALocations, is_url, resolved
from quire.server.lora.modules import Module, check_modules, name_problem
from quire.server.lora.registry import LoRARegistry
from quire.server.lora.resolver import Resolver
from quire.server.lora.search import Search
from quire.server.settings import ServerSettings

logger = get_logger(__name__)

_HELD = "quire.adapters"
"""Where a scope holds the names of the adapters that answer it."""


class LoRAService:
    """The adapters of a server: found by requests, loaded and unloaded."""

    def __init__(
        self, engine: Engine, registry: LoRARegistry, places: LoRALocations, resolver: Resolver | None
    ) -> None:
        self._engine, self._registry, self._places, self._resolver = engine, registry, places, resolver
        self.enabled = _is_enabled(engine)
        self._users: Counter[str] = Counter()
        """Requests of this process that are being answered, by adapter."""
        self._left = asyncio.Event()
        self._search = Search()

    def __iter__(self) -> Iterator[Module]:
        known = self._registry.all().values() if self.enabled else ()
        return (module for module in known if not module.is_leaving)

    def get(self, name: str) -> Module | None:
        module = self._registry.all().get(name) if self.enabled else None
        return None if module is None or module.is_leaving else module

    def request_of(self, name: str | None) -> LoRARequest | None:
        """The adapter of this name, to read a prompt or to write an answer for, until the last of these is
        written; None: the model itself."""
        module = self._registry.all().get(name) if name is not None and self.enabled else None
        return None if module is None else module.request()

    # ---- requests

    async def settle(self, name: str) -> None:
        """Have it, if it can be found by its name."""
        resolver = self._resolver
        if resolver is None or not self.enabled or self._is_taken(name):
            return
        if not resolver.may_have(name) or (module := await self._search(resolver.find, name)) is None:
            return
        async with self._registry.only(name):
            if self.get(name) is not None or not resolver.may_have(name):  # somebody else was quicker
                return
            try:
                await self._engine.add_adapter(module.request())
            except RequestError as error:
                if error.param == "lora_request":  # not an engine that sleeps
                    resolver.note(name, error)
                raise
            self._registry.put(module)
            logger.info("Adapter %r found at %r", name, module.root)

    def _is_taken(self, name: str) -> bool:
        """Somebody answers to it, or is about to leave; if that one has died meanwhile, it has left."""
        known = self._registry.all().get(name)
        return known is not None and not (known.is_leaving and self._registry.is_free(name))

    def take(self, name: str, scope: Scope) -> LoRARequest | None:
        """The adapter of this name, which stays until the request of this scope is answered."""
        module = self.get(name)
        if module is None:
            return None
        held: list[str] = scope.get(_HELD, [])
        if name not in held:
            held.append(name)
            self._users[name] += 1
        return module.request()

    def holding(self, app: ASGIApp) -> ASGIApp:
        """`app`, whose requests hold their adapters until they are answered."""

        async def hold(scope: Scope, receive: Receive, send: Send) -> None:
            held = scope[_HELD] = list[str]()
            try:
                await app(scope, receive, send)
            finally:
                self._release(held)

        return hold

    def _release(self, held: list[str]) -> None:
        for name in held:
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name]
        if held:
            left, self._left = self._left, asyncio.Event()
            left.set()

    # ---- changes

    async def read_all(self) -> None:
        """Those that the server began with, once the engine is up."""
        for module in list(self):
            try:
                facts = await self._engine.add_adapter(module.request())
            except RequestError as error:
                raise RequestError(f"lora_modules: {module.name!r} from {module.root!r}: {error}") from None
            logger.info("Adapter %r has rank %d and %d bytes", module.name, facts.rank, facts.num_bytes)
        self._registry.mark_read()

    async def load(
        self, name: str, place: str, *, base: str | None = None, inplace: bool = False, is_3d: bool = False
    ) -> None:
        self._check_enabled()
        if problem := name_problem(name):
            raise InvalidUserInput(problem, param="lora_name")
        if name in self._engine.facts.model_names:
            raise InvalidUserInput(f"{name!r} is a name of the model itself", param="lora_name")
        async with self._registry.only(name):
            if self.get(name) is not None and not inplace:
                raise InvalidUserInput(
                    f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in "
                    "place, set 'load_inplace' to True.",
                    param="lora_name",
                )
            try:
                path = await self._search(self._places.for_client, place)
                module = Module(name, place, str(path), base, is_3d, self._places.bounds(path))
                # Whatever a core still has of this name: it lies there anew.
                await self._engine.add_adapter(module.request(load_inplace=True))
            except RequestError as error:
                raise _named(name, error) from None
            self._registry.put(module)
        logger.info("Adapter %r loaded from %r", name, place)

    async def unload(self, name: str) -> None:
        """Nobody gets it any more from now on; over when those who have it are answered."""
        self._check_enabled()
        unknown = NotFound(f"The lora adapter '{name}' cannot be found.", param="lora_name")
        if self.get(name) is None:
            raise unknown
        async with self._registry.only(name):
            module = self.get(name)
            if module is None:
                raise unknown
            self._registry.put(msgspec.structs.replace(module, is_leaving=True))
            try:
                while self._users[name]:
                    await self._left.wait()
                await self._engine.remove_adapter(name)
            except BaseException:  # whoever asked went away, or a core is gone: it is still there
                self._registry.put(module)
                raise
            self._registry.drop(name)
        logger.info("Adapter %r unloaded", name)

    def _check_enabled(self) -> None:
        if not self.enabled:
            raise RequestError("this server has no adapters; start it with --enable-lora")


def _named(name: str, error: RequestError) -> RequestError:
    """The same error, which says what failed by it."""
    kind = next((each for each in (NotFound, Forbidden) if isinstance(error, each)), RequestError)
    return kind(f"Loading lora {name} failed: {error}", error.param)


def adapters_of(
    engine: Engine, settings: ServerSettings, registry: LoRARegistry | None = None
) -> LoRAService:
    """Those of the command line, unless there is a `registry` of several processes."""
    section, modules = settings.adapters, settings.modules
    check_modules(modules, enabled=_is_enabled(engine), served=engine.facts.model_names)
    roots = section.lora_roots or default_roots(modules, engine.facts.root)
    places = LoRALocations(
        roots=[*roots, *([section.lora_resolver_dir] if section.lora_resolver_dir else [])],
        hub=section.lora_resolver_hub,
        cache=_cache(),
        max_bytes=section.lora_max_download_bytes,
    )
    searches = section.lora_resolver_dir or section.lora_resolver_hub
    return LoRAService(
        engine,
        registry or LoRARegistry(modules=located(settings)),
        places,
        Resolver(section.lora_resolver_dir, places) if searches else None,
    )


def located(settings: ServerSettings) -> list[Module]:
    """The adapters of the command line with their directories, fetched if they are elsewhere."""
    places = LoRALocations(cache=_cache(), max_bytes=settings.adapters.lora_max_download_bytes)
    found = []
    for module in settings.modules:
        try:
            path = places.for_operator(module.root)
        except RequestError as error:
            raise ConfigError(f"lora_modules: {module.name!r}: {error}") from None
        found.append(msgspec.structs.replace(module, path=str(path)))
    return found


def default_roots(modules: Sequence[Module], model: str) -> list[str]:
    """Where the adapters of the command line are, and the model; never a whole disk or a home."""
    found = [_beside(module.root) for module in modules]
    return [*found, *([model] if Path(model).is_dir() else [])]


def _beside(root: str) -> str:
    if is_url(root):
        above = root.rstrip("/").rpartition("/")[0]
        return above if above.count("/") > 2 else root
    folder = resolved(root)
    too_much = (Path(folder.anchor), Path.home())
    return str(folder if folder.parent in too_much else folder.parent)


def _cache() -> Path:
    return Env.read(os.environ).cache_root / "adapters"


def _is_enabled(engine: Engine) -> bool:
    return bool(engine.operation.settings.get("lora", {}).get("enable_lora"))

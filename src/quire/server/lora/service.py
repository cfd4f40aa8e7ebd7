"""`LoRAService`: maps the model name of a request to its adapter."""

import asyncio
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.checkpoint.object_store import is_url
from quire.config.env import Env
from quire.data.lora import LoRARequest
from quire.errors import ConfigError, RequestError
from quire.frontend.engine import AsyncEngine
from quire.logs import get_logger
from quire.memory import human
from quire.server.http.errors import Forbidden, InvalidUserInput, NotFound
from quire.server.lora.locations import LoRALocations, resolve_path
from quire.server.lora.modules import LoRAModule, check_modules, name_problem
from quire.server.lora.registry import LoRARegistry
from quire.server.lora.resolver import AdapterSearch, LoRAResolver
from quire.server.settings import ServerSettings

logger = get_logger(__name__)

_ADAPTERS = "quire.adapters"
"""ASGI scope key of the names of the adapters that the request uses."""


class LoRAService:
    """The adapters of a server: lookup, loading and unloading."""

    def __init__(
        self,
        engine: AsyncEngine,
        registry: LoRARegistry,
        locations: LoRALocations,
        resolver: LoRAResolver | None,
    ) -> None:
        self._engine, self._registry, self._locations, self._resolver = engine, registry, locations, resolver
        self.enabled = _is_enabled(engine)
        self._users: Counter[str] = Counter()
        """Number of running requests of this process, by adapter."""
        self._released = asyncio.Event()
        self._search = AdapterSearch()

    def __iter__(self) -> Iterator[LoRAModule]:
        known = self._registry.all().values() if self.enabled else ()
        return (module for module in known if not module.is_unloading)

    def get(self, name: str) -> LoRAModule | None:
        module = self._registry.all().get(name) if self.enabled else None
        return None if module is None or module.is_unloading else module

    # ---- requests

    async def resolve(self, name: str) -> None:
        """Load the adapter of this name if it is not loaded and the resolver finds it; else do nothing."""
        resolver = self._resolver
        if resolver is None or not self.enabled or self._is_known(name):
            return
        if not resolver.may_find(name) or (module := await self._search(resolver.find, name)) is None:
            return
        async with self._registry.locked(name):
            # Another request may have loaded the adapter meanwhile.
            if self.get(name) is not None or not resolver.may_find(name):
                return
            try:
                await self._engine.operation.add_adapter(module.request())
            except RequestError as error:
                if error.param == "lora_request":  # the adapter is invalid; other errors are the engine's
                    resolver.remember_failure(name, error)
                raise
            self._registry.put(module)
            logger.info("Found LoRA adapter: name %r, path %r", name, module.root)

    def may_resolve(self, name: str) -> bool:
        """Whether the resolver may find an adapter of this name."""
        return self._resolver is not None and self.enabled and self._resolver.may_find(name)

    def _is_known(self, name: str) -> bool:
        """Whether an adapter has this name. An adapter does not count if the process that was unloading it
        has died."""
        known = self._registry.all().get(name)
        return known is not None and not (known.is_unloading and self._registry.is_free(name))

    def hold(self, name: str, scope: Scope) -> LoRARequest | None:
        """Return the loaded adapter of this name, or None. The adapter is not removed before the request with
        the ASGI `scope` has ended."""
        module = self.get(name)
        if module is None:
            return None
        names: list[str] = scope.get(_ADAPTERS, [])
        if name not in names:
            names.append(name)
            self._users[name] += 1
        return module.request()

    def hold_adapters(self, app: ASGIApp) -> ASGIApp:
        """Return `app` wrapped so that the adapters of a request are not removed before it has ended."""

        async def run_with_adapters(scope: Scope, receive: Receive, send: Send) -> None:
            names = scope[_ADAPTERS] = list[str]()
            try:
                await app(scope, receive, send)
            finally:
                self._release(names)

        return run_with_adapters

    def _release(self, names: list[str]) -> None:
        for name in names:
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name]
        if names:
            released, self._released = self._released, asyncio.Event()
            released.set()

    # ---- changes

    async def load_all(self) -> None:
        """Load the adapters of the command line into the engine, which must be ready. Raise RequestError if
        one cannot be loaded."""
        for module in list(self):
            try:
                facts = await self._engine.operation.add_adapter(module.request())
            except RequestError as error:
                raise RequestError(f"lora_modules: {module.name!r} from {module.root!r}: {error}") from None
            logger.info(
                "Loaded LoRA adapter %r: rank %d, %s", module.name, facts.rank, human(facts.num_bytes)
            )
        self._registry.mark_loaded()

    async def load(
        self, name: str, location: str, *, base: str | None = None, inplace: bool = False, is_3d: bool = False
    ) -> None:
        self._check_enabled()
        if problem := name_problem(name):
            raise InvalidUserInput(problem, param="lora_name")
        if name in self._engine.facts.model_names:
            raise InvalidUserInput(f"{name!r} is a name of the base model", param="lora_name")
        async with self._registry.locked(name):
            if self.get(name) is not None and not inplace:
                raise InvalidUserInput(
                    f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in "
                    "place, set 'load_inplace' to True.",
                    param="lora_name",
                )
            try:
                path = await self._search(self._locations.for_client, location)
                module = LoRAModule(name, location, str(path), base, is_3d, self._locations.bounds(path))
                # In place: an engine core may still have an older adapter of this name.
                await self._engine.operation.add_adapter(module.request(load_inplace=True))
            except RequestError as error:
                kind = next((kind for kind in (NotFound, Forbidden) if isinstance(error, kind)), RequestError)
                raise kind(f"Loading lora {name} failed: {error}", error.param) from None
            self._registry.put(module)
        logger.info("Loaded new LoRA adapter: name %r, path %r", name, location)

    async def unload(self, name: str) -> None:
        """Unload an adapter: refuse new requests for it at once, and wait until the running ones have
        ended."""
        self._check_enabled()
        unknown = NotFound(f"The lora adapter '{name}' cannot be found.", param="lora_name")
        if self.get(name) is None:
            raise unknown
        async with self._registry.locked(name):
            module = self.get(name)
            if module is None:
                raise unknown
            self._registry.put(msgspec.structs.replace(module, is_unloading=True))
            try:
                while self._users[name]:
                    await self._released.wait()
                await self._engine.operation.remove_adapter(name)
            except BaseException:  # the client disconnected or an engine core failed: keep the adapter
                self._registry.put(module)
                raise
            self._registry.drop(name)
        logger.info("Removed LoRA adapter: name %r", name)

    def _check_enabled(self) -> None:
        if not self.enabled:
            raise RequestError("this server has no LoRA adapters; start it with --enable-lora")


def open_lora_service(
    engine: AsyncEngine, settings: ServerSettings, registry: LoRARegistry | None = None
) -> LoRAService:
    """Return the service with the adapters of the command line, or those of a shared `registry`."""
    section, modules = settings.adapters, settings.modules
    check_modules(modules, enabled=_is_enabled(engine), served=engine.facts.model_names)
    roots = section.lora_roots or default_roots(modules, engine.facts.root)
    locations = LoRALocations(
        roots=[*roots, *([section.lora_resolver_dir] if section.lora_resolver_dir else [])],
        hub=section.lora_resolver_hub,
        cache=_cache(),
        max_bytes=section.lora_max_download_bytes,
    )
    searches = section.lora_resolver_dir or section.lora_resolver_hub
    return LoRAService(
        engine,
        registry or LoRARegistry(modules=locate_modules(settings)),
        locations,
        LoRAResolver(section.lora_resolver_dir, locations) if searches else None,
    )


def locate_modules(settings: ServerSettings) -> list[LoRAModule]:
    """Return the adapters of the command line with their directories. Remote ones are downloaded."""
    locations = LoRALocations(cache=_cache(), max_bytes=settings.adapters.lora_max_download_bytes)
    modules = []
    for module in settings.modules:
        try:
            path = locations.for_operator(module.root)
        except RequestError as error:
            raise ConfigError(f"lora_modules: {module.name!r}: {error}") from None
        modules.append(msgspec.structs.replace(module, path=str(path)))
    return modules


def default_roots(modules: Sequence[LoRAModule], model: str) -> list[str]:
    """Return the locations from which clients may load adapters by default: the folders above the command
    line's adapters, and the model's directory, but never a whole disk or home directory."""
    roots = [_folder_above(module.root) for module in modules]
    return [*roots, *([model] if Path(model).is_dir() else [])]


def _folder_above(root: str) -> str:
    if is_url(root):
        above = root.rstrip("/").rpartition("/")[0]
        return above if above.count("/") > 2 else root
    folder = resolve_path(root)
    too_much = (Path(folder.anchor), Path.home())
    return str(folder if folder.parent in too_much else folder.parent)


def _cache() -> Path:
    return Env.read(os.environ).cache_root / "adapters"


def _is_enabled(engine: AsyncEngine) -> bool:
    return bool(engine.operation.settings.get("lora", {}).get("enable_lora"))

"""Plugins: entry points of installed packages, which are called once in every process."""

import functools
import importlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from quire.config.env import Env
from quire.errors import ConfigError, nearest, one_line
from quire.logs import get_logger

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

log = get_logger(__name__)

GROUP, VLLM_GROUP = "quire.plugins", "vllm.general_plugins"
"""Entry point groups of plugins: functions without arguments that register models, parsers and the like."""
PROCESSORS = "vllm.logits_processors"
"""Entry point group of logits processor classes."""
STAT_LOGGERS = "vllm.stat_logger_plugins"
"""Entry point group of stat logger classes."""
_NO_EFFECT = {
    "vllm.io_processor_plugins": "Quire has no IO processors",
    "vllm.platform_plugins": "Quire runs on CPUs and on CUDA devices",
    "vllm.endpoint_plugins": "use --middleware",
}
"""Entry point groups of vLLM that are not loaded, each with the reason or the remedy."""
_BUILT_IN = ("lora_filesystem_resolver", "lora_hf_hub_resolver")
"""Plugins of vLLM itself that Quire replaces by built-in features."""


@functools.cache
def load_plugins(broken: tuple[str, ...] | None = None) -> tuple[str, ...]:
    """Load the installed plugins, once per process, and return the names of the plugins that failed.

    A child process passes the plugins that failed in its parent as `broken`: they are not loaded, and the
    other plugins are not logged again. `broken` is None in the first process."""
    allowed = Env.read(os.environ).plugins
    if allowed == () or not (_declares_plugins() or allowed):
        return ()
    entries = _entries()
    if broken is None:
        _report_unused(entries, allowed)
    failed = list(broken or ())
    for name, entry in _selected(entries).items():
        if name in failed or (allowed is not None and name not in allowed):
            continue
        try:
            _call(entry, first=broken is None)
        except (Exception, SystemExit) as error:  # code of the operator, which may raise anything
            _report_failure(entry, error, is_wanted=allowed is not None)
            failed.append(name)
    return tuple(failed)


def _report_failure(entry: "EntryPoint", error: BaseException, *, is_wanted: bool) -> None:
    """Log the failure of a plugin; raise a ConfigError if the operator has listed its name."""
    if is_wanted:
        raise ConfigError(
            f"plugin {entry.name!r} of {_origin(entry)} failed: {one_line(error)}; repair it, or remove it"
            " from the list of plugins (QUIRE_PLUGINS or VLLM_PLUGINS)"
        ) from error
    log.error("Plugin %r of %s failed and is not used: %s", entry.name, _origin(entry), one_line(error))
    log.debug("Stack trace of plugin %r", entry.name, exc_info=error)


def installed_stat_loggers() -> dict[str, Any]:
    """Return the classes of stat loggers of installed packages with vLLM's interface, by name."""
    allowed, classes = Env.read(os.environ).plugins, {}
    for entry in _entries() if _declares_plugins() else ():
        if entry.group == STAT_LOGGERS and (allowed is None or entry.name in allowed):
            try:
                _install_shim()
                classes[entry.name] = entry.load()
            except (Exception, SystemExit) as error:  # code of the operator, which may raise anything
                _report_failure(entry, error, is_wanted=allowed is not None)
    return classes


def installed_processors() -> tuple[str, ...]:
    """Return the paths of the logits processors of installed packages. `VLLM_PLUGINS` does not select them,
    as in vLLM."""
    if not _declares_plugins():
        return ()
    return tuple(entry.value for entry in _entries() if entry.group == PROCESSORS)


def _call(entry: "EntryPoint", *, first: bool) -> None:
    """Import and call a plugin. A plugin for vLLM imports Quire's names as `vllm`."""
    if entry.group == VLLM_GROUP:
        _install_shim()
    had_torch = "torch" in sys.modules
    register: Any = entry.load()
    register()
    if first:
        log.info("Loaded plugin %r of %s", entry.name, _origin(entry))
        if not had_torch and "torch" in sys.modules:
            log.warning(
                "Plugin %r imports torch when it is loaded, which slows the start of every API process:"
                " register classes as 'module:Class' strings, and import torch only in their modules",
                entry.name,
            )


def _install_shim() -> None:
    """Let this process import Quire's names as `vllm`."""
    if getattr(sys.modules.get("vllm"), "__file__", None) is not None:
        raise ConfigError("this process has already imported vLLM itself, which the plugin would extend")
    importlib.import_module("quire.entrypoints.vllm_shim").install()


def _selected(entries: "list[EntryPoint]") -> "dict[str, EntryPoint]":
    """Return the plugins to call, by name. If the same name is registered for Quire and for vLLM, the plugin
    for Quire is called."""
    selected: dict[str, EntryPoint] = {}
    for entry in sorted(entries, key=lambda entry: (entry.group != GROUP, entry.name)):
        if entry.group in (GROUP, VLLM_GROUP):
            selected.setdefault(entry.name, entry)
    return selected


def _report_unused(entries: "list[EntryPoint]", allowed: tuple[str, ...] | None) -> None:
    """Warn about plugins in unsupported entry point groups, and about names in `allowed` that no package
    has."""
    for entry in entries:
        if entry.group in _NO_EFFECT and (allowed is None or entry.name in allowed):
            text = "Plugin %r of %s is not used, since Quire does not load entry points of the group %s: %s"
            log.warning(text, entry.name, _origin(entry), entry.group, _NO_EFFECT[entry.group])
    names = sorted({entry.name for entry in entries})
    for name in allowed or ():
        if name not in names and name not in _BUILT_IN:
            hint = nearest(name, names) or f"; installed: {', '.join(names) or 'none'}"
            text = "QUIRE_PLUGINS or VLLM_PLUGINS lists the plugin %r, which no installed package has%s"
            log.warning(text, name, hint)


def _origin(entry: "EntryPoint") -> str:
    package = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "an unknown package"
    return f"{package} ({entry.value})"


def _entries() -> "list[EntryPoint]":
    """Return the entry points of all plugin groups, without the entry points of vLLM itself."""
    from importlib.metadata import entry_points  # slow to import

    groups = (GROUP, VLLM_GROUP, PROCESSORS, STAT_LOGGERS, *_NO_EFFECT)
    installed = entry_points()
    return [
        entry
        for group in groups
        for entry in installed.select(group=group)
        if entry.value.partition(":")[0].partition(".")[0] != "vllm"
    ]


def _declares_plugins() -> bool:
    """Return whether an installed package may have a plugin. This takes 2 ms for 130 packages, whereas
    importing importlib.metadata and reading all entry points takes 70 ms."""
    groups = [group.encode() for group in (GROUP, VLLM_GROUP, PROCESSORS, STAT_LOGGERS, *_NO_EFFECT)]
    return any(group in text for text in _entry_point_files() for group in groups)


def _entry_point_files() -> Iterator[bytes]:
    """Yield the entry_points.txt of every installed package."""
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue
        for name in names:
            if name.endswith((".dist-info", ".egg-info")):
                try:
                    with open(os.path.join(folder, name, "entry_points.txt"), "rb") as file:
                        yield file.read()
                except OSError:
                    continue

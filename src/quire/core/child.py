"""An engine core as a child process. The process that starts it imports no code of the engine."""

import multiprocessing
from multiprocessing import connection
from multiprocessing.process import BaseProcess

from quire.config.engine import EngineConfig
from quire.core.facts import CoreFacts, config_of_rank, core_name
from quire.metrics.pages import MetricsLayout, MetricsPages
from quire.system.child import Child
from quire.system.waiting_process import WaitingProcess

KILL_AFTER_S = 5.0
"""Seconds that a process has to end after SIGTERM before it is killed."""


def core_child(
    config: EngineConfig,
    rank: int,
    facts: CoreFacts,
    num_ranks: int,
    early: WaitingProcess | None = None,
) -> Child:
    """Return an engine core as a child process that is not started yet. `early` is a process that becomes the
    core at the first start."""

    def make(parent: connection.Connection) -> BaseProcess:
        args = (config_of_rank(config, rank), facts)
        if early is not None and (process := early.call(_run_core, args, parent)) is not None:
            return process
        context = multiprocessing.get_context("spawn")
        return context.Process(target=_run_core, args=(*args, parent), name=core_name(rank, num_ranks))

    return Child("the engine" if num_ranks == 1 else f"engine {rank}", make)


def _run_core(config: EngineConfig, facts: CoreFacts, parent: connection.Connection) -> None:
    from quire.core.process import run_core  # here, so that only the core itself imports it

    run_core(config, facts, parent)


def clear_gauges(layout: MetricsLayout, facts: CoreFacts) -> None:
    """Clear the gauges of a core that has ended, so that metrics do not show its requests."""
    file, page, num_engines = facts.metrics_file, facts.page, facts.num_pages
    MetricsPages(layout, file, engine=page, num_engines=num_engines).clear_gauges()

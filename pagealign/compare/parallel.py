"""Run independent calls over processes, or the same calls over a cluster, with joblib."""

from __future__ import annotations

import contextlib
import importlib
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar, get_args

from pagealign.errors import PagealignError

Where = Literal["processes", "dask", "ray"]
PLACES: tuple[Where, ...] = get_args(Where)
Result = TypeVar("Result")


def run_all(
    function: Callable[..., Result],
    calls: Sequence[tuple],
    where: Where = "processes",
    jobs: int = -1,
    scheduler: str | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[Result]:
    """``function(*call)`` for each call, in their order.

    ``jobs``: processes on this machine, -1 for one per core; a cluster has its own number.
    ``scheduler``: address of a running Dask or Ray cluster; without one, it is started here for
    the time of the call. ``progress`` is told how many calls are done, of how many.
    PagealignError where a package is missing or the cluster can't be reached.
    """
    joblib = _import("joblib", "joblib")
    check(where, jobs, scheduler)
    results: list[Any] = [None] * len(calls)
    progress(0, len(calls))
    with _cluster(where, jobs, scheduler) as backend:
        # Ray's backend hands its results over all at once.
        order = "list" if where == "ray" else "generator_unordered"
        with joblib.parallel_config(backend=backend, n_jobs=jobs):
            found = joblib.Parallel(return_as=order)(
                joblib.delayed(_numbered)(i, function, call) for i, call in enumerate(calls)
            )
            for done, (i, result) in enumerate(found, 1):
                results[i] = result
                progress(done, len(calls))
    return results


def check(where: str, jobs: int, scheduler: str | None) -> None:
    """PagealignError for options that ``run_all`` can't follow."""
    if where not in PLACES:
        raise PagealignError(f"can't run in parallel on {where!r}: use one of {', '.join(PLACES)}")
    if jobs < 1 and jobs != -1:
        raise PagealignError(f"{jobs} jobs: give at least 1, or -1 for one per core")
    if scheduler is not None and where == "processes":
        raise PagealignError("a scheduler's address needs parallel dask or ray")


def _numbered(i: int, function: Callable[..., Result], call: tuple) -> tuple[int, Result]:
    return i, function(*call)


@contextlib.contextmanager
def _cluster(where: Where, jobs: int, scheduler: str | None) -> Iterator[str]:
    """Joblib's name for the backend, with its cluster connected."""
    local = None if jobs < 0 else jobs
    if scheduler is not None:
        _reach(where, scheduler)
    if where == "processes":
        yield "loky"
    elif where == "dask":
        distributed = _import("distributed", "dask distributed")
        with (
            distributed.Client(scheduler)
            if scheduler
            else distributed.Client(n_workers=local, threads_per_worker=1, dashboard_address=None)
        ):
            yield "dask"
    else:
        ray = _import("ray", "ray")
        from ray.util.joblib import register_ray

        if scheduler:
            ray.init(scheduler)
        else:
            ray.init("local", num_cpus=local, include_dashboard=False)
        try:
            register_ray()
            yield "ray"
        finally:
            ray.shutdown()


def _reach(where: Where, address: str) -> None:
    """PagealignError unless somebody listens there: Ray itself tries for minutes."""
    host, _, port = address.rpartition("//")[2].rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, ValueError, OverflowError) as error:
        raise PagealignError(
            f"no {where} cluster at {address}: {error}; give the host:port that it listens on"
        ) from error


def _import(module: str, packages: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise PagealignError(f"{module} is not installed: pip install {packages}") from error

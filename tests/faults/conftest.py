"""A tiny world, uninterrupted runs to compare with, and the seconds that were measured, at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.jobs import PLACES, TOLD, Job, command, whole_command
from tests.integration.conftest import World, world  # noqa: F401


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if TOLD:
        terminalreporter.section("seconds from a fault to the end of the last process")
        for line in TOLD:
            terminalreporter.write_line(line)


@pytest.fixture
def new_job(tmp_path: Path) -> Iterator[Callable[[], Job]]:
    """Jobs of one test; whatever happens, none outlives it."""
    jobs: list[Job] = []

    def new_job() -> Job:
        jobs.append(Job(tmp_path))
        return jobs[-1]

    yield new_job
    for job in jobs:
        job.kill()
        for process in job.started:
            process.wait()


@pytest.fixture(scope="session")
def uninterrupted(world: World, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:  # noqa: F811
    """The folder of a run that nothing has happened to, by its placement."""
    runs: dict[str, Path] = {}

    def uninterrupted(place: str) -> Path:
        if place not in runs:
            folder = tmp_path_factory.mktemp("uninterrupted")
            job, run = Job(folder), folder / "run"
            try:
                assert whole_command(job, command(world, run, *PLACES[place].split())) == 0, job.said()
            finally:
                job.kill()
            runs[place] = run
        return runs[place]

    return uninterrupted

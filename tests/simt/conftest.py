"""Sources for the tests of a session, generated at once; the full matrix behind `DSPARK_SIMT_FULL=1`.

    python -m pytest tests/simt                        hidden 1024 of vLLM's kernels, all sizes of ours
    DSPARK_SIMT_FULL=1 python -m pytest tests/simt     every kernel at every size; TileLang takes its time

Sources and compiled kernels are kept in the test cache folder, by content, so a second run takes seconds.
"""

from __future__ import annotations

import shutil

import pytest

from tests.simt import generate, matrix


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a C++ compiler nothing here can run."""
    if shutil.which("g++") is None:
        mark = pytest.mark.skip(reason="g++ compiles the emulated kernels; install it to run these tests")
        for item in items:
            if "tests/simt" in str(item.path):
                item.add_marker(mark)


@pytest.fixture(scope="session", autouse=True)
def generated_sources(request: pytest.FixtureRequest) -> None:
    """Generate what the collected tests need, in two processes."""
    wanted: dict[str, generate.Job] = {}
    for item in request.session.items:
        callspec = getattr(item, "callspec", None)
        for value in callspec.params.values() if callspec else ():
            if isinstance(value, generate.Job):
                wanted[str(value.stem())] = value
    if any("test_upstream" in str(item.path) for item in request.session.items):
        wanted |= {str(job.stem()): job for job in matrix.FAULTY}
    generate.sources_of(wanted.values())

"""What every test shares: seeds, and which tests a machine can run.

On a developer's machine a test that needs a right or a program that is missing is skipped, with the reason. On CI
(the variable CI is set) it fails: there the tests in network namespaces and under MPI must run.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

ON_CI = os.environ.get("CI", "").lower() not in ("", "0", "false")
SEED_MAX = 2**32
COMPILING = pytest.StashKey[subprocess.Popen[bytes]]()

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("here", deadline=None, print_blob=True)
settings.load_profile("ci" if ON_CI else "here")


# What UCX has to say goes to a buffer of the C library, which is written when Python ends: behind the summary.
os.environ.setdefault("UCX_LOG_LEVEL", "error")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="also run the long studies")
    parser.addoption("--update-golden", action="store_true", help="write what tests/golden compares with, instead")
    parser.addoption("--seed", type=int, help="the seed that tests with the fixture `seed` start from")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--seed") is None:
        config.option.seed = 0 if ON_CI else random.SystemRandom().randrange(SEED_MAX)


def pytest_sessionstart(session: pytest.Session) -> None:
    """All tests together: another process has the kernels compiled, which takes a minute on a fresh clone."""
    config = session.config
    if hasattr(config, "workerinput"):
        return
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.collectonly:
        config.stash[COMPILING] = subprocess.Popen(
            [sys.executable, "-m", "optcc.compile_kernels"],
            cwd=Path(__file__).parents[1],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


def pytest_sessionfinish(session: pytest.Session) -> None:
    compiling = session.config.stash.get(COMPILING, None)
    if compiling is not None:
        compiling.kill()
        compiling.wait()


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.getoption('--seed')} (again with --seed; hypothesis prints its own)"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Helpers and rank programs beside the tests are not collected: to import one may start MPI in this process."""
    name = collection_path.name
    return True if name.endswith(".py") and not name.startswith("test_") and name != "conftest.py" else None


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks at the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow tests run if they are asked for; those that measure time or use the host's network, one after the other.

    Those of the host come first, as they are the longest chain. Then the swarm: it needs no compiled kernel, so that
    this process does not compile what another one is about to. Then what has the longest tests: begun last, one of
    them would keep all other processes waiting.
    """
    for item in items:
        if _is_of_host(item):
            item.add_marker(pytest.mark.xdist_group("host"))
    first = ("test_swarm.py", "test_agreement.py", "test_exploration.py")
    items.sort(key=lambda item: (not _is_of_host(item), item.path.name not in first, item.path.name != first[0]))
    if config.getoption("--run-slow") or "slow" in config.getoption("-m"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Tests of one group run in one process: some versions of pytest and pytest-xdist scatter them without a word."""
    if not getattr(session.config.option, "loadgroup", False):
        return
    for item in session.items:
        # pytest-xdist tells the group of a test by the end of its name.
        if item.get_closest_marker("xdist_group") and item.nodeid.rfind("@") <= item.nodeid.rfind("]"):
            raise pytest.UsageError(f"{item.nodeid}: its xdist_group is lost: install what requirements.lock names")


def _is_of_host(item: pytest.Item) -> bool:
    return any(map(item.get_closest_marker, ("mpi", "netns", "realtime"))) or "tcp" in item.path.name


def no_mpi() -> str | None:
    """Why ranks cannot be started here, or None."""
    beside = Path(sys.executable).with_name("mpirun")
    if not beside.exists() and shutil.which("mpirun") is None:
        return "no mpirun beside this Python or on PATH: pip install 'optcc[mpi]'"
    if find_spec("mpi4py") is None:
        return "no mpi4py: pip install 'optcc[mpi]'"
    return None


def no_namespaces() -> str | None:
    """Why network namespaces cannot be made here, or None."""
    reason: str | None = import_module("optcc.experiments.fabric").can_make_namespaces()
    return reason


def no_nft() -> str | None:
    """Why packets cannot be dropped silently here, or None."""
    found = import_module("optcc.experiments.fabric.programs").which("nft")
    return "no nft: apt-get install nftables" if found is None else None


def no_gpu() -> str | None:
    """Why kernels cannot run on a GPU here, or None."""
    if find_spec("cupy") is None:
        return "no CuPy: pip install 'optcc[gpu]'"
    try:
        count: int = import_module("cupy").cuda.runtime.getDeviceCount()
    except Exception as error:  # CuPy has a class for each way in which a driver can be missing
        return f"no GPU: {error}"
    return None if count else "no GPU"


NEEDS: dict[str, tuple[Callable[[], str | None], bool]] = {
    "mpi": (no_mpi, True),
    "netns": (no_namespaces, True),
    "nft": (no_nft, True),
    "gpu": (no_gpu, False),
}
"""Marker to (why not, whether CI must have it)."""


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, (why_not, on_ci) in NEEDS.items():
        if item.get_closest_marker(marker) is None:
            continue
        reason = why_not()
        if reason is None:
            continue
        if on_ci and ON_CI:
            pytest.fail(f"this test must run on CI: {reason}", pytrace=False)
        pytest.skip(reason)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of this run; it is shown with the output of a test that fails."""
    value: int = request.config.getoption("--seed")
    print(f"seed {value}")
    return value

"""What all tests share: how hypothesis draws, and a cache folder that is not the user's."""

import gc
import os
import sys
import tempfile
from collections import Counter, defaultdict
from random import Random

# Of graphs that torch finds in this cache fewbit has a description in its own, which the tests begin empty. What g++
# has built stays from one run to the next.
os.environ.setdefault("TORCHINDUCTOR_AUTOGRAD_CACHE", "0")

import pytest
from hypothesis import HealthCheck, settings

# The first call of a compiled function takes seconds, so no deadline; a failure in CI must come again on the
# next run. The fixture `backend` is the same for all examples of a test. `make thorough` draws more of them.
settings.register_profile(
    "fewbit",
    max_examples=int(os.environ.get("FEWBIT_EXAMPLES", "40")),
    deadline=None,
    derandomize="CI" in os.environ,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
settings.load_profile("fewbit")


def pytest_configure(config):
    """Let pytest-xdist hand out files as `pytest_collection_modifyitems` orders them, not by their number of tests."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Leave out what only a GPU can run; mark as deep what is not of a sample; begin with the files of most tests.

    With `sample(n)` the n cases of a test that lie evenly among all of them are the sample.
    """
    of_a_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if of_a_gpu and "gpu" not in config.option.markexpr and not sys.modules["torch"].cuda.is_available():
        config.hook.pytest_deselected(items=of_a_gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sample"):
            cases[item.nodeid.split("[")[0]].append(item)
    for of_a_test in cases.values():
        (size,) = of_a_test[0].get_closest_marker("sample").args
        sample = {i * len(of_a_test) // size for i in range(size)}
        for i, item in enumerate(of_a_test):
            if i not in sample:
                item.add_marker("deep")
    tests = Counter(item.path for item in items)
    deep = {item.path for item in items if item.get_closest_marker("deep")}
    if "FEWBIT_TEST_ORDER" in os.environ:  # a seed: within a file, whose fixtures are made once
        Random(os.environ["FEWBIT_TEST_ORDER"]).shuffle(items)
    # A process that began a long file last would keep the others waiting.
    items.sort(key=lambda item: (item.path not in deep, -tests[item.path], item.path))


def pytest_collection():
    """Collect no garbage while importing: what is imported stays."""
    gc.disable()


def pytest_collection_finish():
    """Leave the tests and all that they import out of Python's collections of garbage."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def frozen():
    """Leave out what earlier files imported and compiled too: with it a collection takes a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def cache_of_the_tests(tmp_path_factory):
    """Let tests find nothing that the user has kept, and leave nothing behind; all processes share solved tables."""
    of_this_process = tmp_path_factory.getbasetemp()
    shared = (of_this_process.parent if "PYTEST_XDIST_WORKER" in os.environ else of_this_process) / "solved"
    shared.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        # On a GPU all processes share what one of them compiled.
        patch.setenv("FEWBIT_CACHE", os.environ.get("FEWBIT_TESTS_CACHE", folder))
        patch.setenv("FEWBIT_TESTS_SOLVED", str(shared))
        yield


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Forget what the process's earlier tests compiled: they fill the few compilations that torch allows a function."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"].compiler.reset()


@pytest.fixture(autouse=True)
def seeded():
    """Start every test's random numbers and rounding at seed 0, whatever its process ran before."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)

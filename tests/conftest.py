"""The shim is applied for every test that does not say otherwise."""

import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from accelerate.state import GradientState

import shim
from patches.series import SeriesError, check_out, installed_release, series_for


def pytest_addoption(parser):
    parser.addoption(
        "--refresh-parity",
        action="store_true",
        help="record the result of the matrix for the installed release, and make its tables anew",
    )


@pytest.fixture(autouse=True)
def no_active_dataloader():
    """A training that stops in the middle of an epoch leaves its loader active for all Accelerators of the process."""
    yield
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def applied(request):
    """`@pytest.mark.stock` runs a test on an unpatched transformers."""
    if request.node.get_closest_marker("stock"):
        yield
        shim.revert()  # only where the test has failed before its own
        return
    with shim.applied():
        yield


@pytest.fixture(scope="session")
def patched_tree(tmp_path_factory):
    """Folder for `PYTHONPATH` with the installed transformers and its series of patches applied."""
    try:
        series = series_for(installed_release())
    except SeriesError as error:
        pytest.skip(str(error))
    return check_out(series, tmp_path_factory.mktemp("patched") / "repository")


def pytest_configure(config):
    if "torch2.2" in os.environ.get("TOX_ENV_NAME", "") and sys.version_info >= (3, 13):
        pytest.exit(
            "torch 2.2 has no wheels for Python 3.13 and newer: this lane needs Python 3.9 to 3.12", returncode=0
        )

"""The shim is applied for every test that does not say otherwise."""

import os
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

import shim

warnings.filterwarnings("ignore", category=DeprecationWarning)
warnings.filterwarnings("ignore", category=FutureWarning)


@pytest.fixture(autouse=True)
def applied(request):
    """`@pytest.mark.stock` runs a test on an unpatched transformers."""
    if request.node.get_closest_marker("stock"):
        yield
        shim.revert()  # only where the test has failed before its own
        return
    with shim.applied():
        yield

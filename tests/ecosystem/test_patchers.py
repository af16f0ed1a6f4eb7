"""Beside libraries that patch as well, whichever comes first: wrapt's wrappers around the Trainer, and liger-kernel."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import warnings
from unittest import TestCase

import pytest
import trl
import wrapt
from packaging.version import Version
from parameterized import parameterized
from transformers import Trainer

import shim
from shim import bypass
from tests.ecosystem import trainers
from tests.ecosystem.test_trainers import Sums, history, without_sums
from tests.unit.test_cache_clear import device_called
from tests.unit.test_import import ROOT

pytestmark = pytest.mark.stock
ORDERS = [("before_the_shim", True), ("after_the_shim", False)]
BOTH = {"batch_eval_metrics": True, "cuda_cache_clear": "always"}


class AroundTheTrainingStep(TestCase):
    """As instrumentation does it: a wrapper that shows the attributes of what it wraps as its own."""

    def setUp(self):
        self.calls = 0
        self.stock = vars(Trainer)["training_step"]
        self.addCleanup(setattr, Trainer, "training_step", self.stock)

    def watch(self):
        def watcher(wrapped, instance, args, kwargs):
            self.calls += 1
            return wrapped(*args, **kwargs)

        wrapt.wrap_function_wrapper("transformers.trainer", "Trainer.training_step", watcher)

    @parameterized.expand(ORDERS)
    def test_both_work_and_reverting_leaves_theirs(self, _, theirs_first):
        expected = without_sums(history(trainers.sft(Sums())))
        for patch in (self.watch, shim.apply) if theirs_first else (shim.apply, self.watch):
            patch()
        self.assertEqual(bypass.bypassing_methods(trl.SFTTrainer, Trainer), [])
        with device_called("cuda") as clears:
            found = history(trainers.sft(Sums(), **BOTH))
        self.assertEqual(without_sums(found), expected)
        self.assertEqual((self.calls, len(clears)), (2, 2 + 2 * 3))

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            shim.revert()
        left = [str(warning.message) for warning in caught if "wrapped since by" in str(warning.message)]
        self.assertEqual(len(left), 0 if theirs_first else 1)
        self.assertTrue(all(f"wrapped since by {__name__}" in message for message in left))
        self.assertEqual(without_sums(history(trainers.sft(Sums()))), expected)
        self.assertEqual(self.calls, 4)

    def test_status_names_who_has_wrapped(self):
        self.watch()
        self.assertEqual(shim.status().patches["Trainer.training_step"], f"stock, wrapped by {__name__}")


@pytest.mark.skipif(
    Version(importlib.metadata.version("transformers")) < Version("5.0"), reason="liger-kernel 0.8 needs transformers 5"
)
class LigerKernel(TestCase):
    """Its kernels for rotary embeddings and the fused loss, in Triton's interpreter: there is no GPU here."""

    def reported(self, *steps):
        command = [sys.executable, "-W", "ignore", "-m", "tests.ecosystem.liger", *steps]
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def test_both_orders_give_what_liger_gives_alone(self):
        alone = self.reported("liger")
        self.assertLessEqual({"_triton_rope", "liger_cross_entropy_kernel"}, set(alone["kernels"]))
        for order in (("liger", "shim"), ("shim", "liger")):
            self.assertEqual(self.reported(*order), alone)

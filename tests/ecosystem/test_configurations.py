"""The configuration classes of other libraries have the options, declared before `apply()` or after."""

from __future__ import annotations

import json
import subprocess
import sys
from unittest import TestCase

from parameterized import parameterized

from tests.unit.test_import import ROOT


class Configurations(TestCase):
    @parameterized.expand([("before",), ("after",)])
    def test_keep_the_options_in_every_form_that_the_class_can_take(self, declared):
        command = [sys.executable, "-W", "ignore", "-m", "tests.ecosystem.configurations", declared]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout.splitlines()[-1])
        self.assertLessEqual({"RewardConfig", "SentenceTransformerTrainingArguments"}, set(report["shim"]))
        for name, forms in report["shim"].items():
            for form, outcome in forms.items():
                # One that is not kept fails on stock, without the options, for the same reason.
                self.assertEqual(outcome, report["stock"][name].get(form, "kept"), f"{name}: {form}")
        for name, options in report["defaults"].items():  # of objects from before `apply()`, in the first case
            self.assertEqual(list(options.values()), [False, None, 1], name)
        kept = [name for name, forms in report["shim"].items() if set(forms.values()) == {"kept"}]
        self.assertGreaterEqual(len(kept), len(report["shim"]) - 3)  # GRPO, RLOO, and the multi-vector encoder's

"""The class of trl that replaces a method of the Trainer without `super()` is named once; none of the others is."""

from __future__ import annotations

import importlib
import warnings
from unittest import TestCase

import pytest
from transformers import Trainer

import shim
from shim import bypass
from tests.ecosystem import tiny, trainers
from tests.fixtures import make_args

pytestmark = pytest.mark.stock


class ByPassing(TestCase):
    def test_trainers_that_call_super_are_not_named(self):
        libraries = [importlib.import_module(name) for name in ("trl", "sentence_transformers")]
        found = [getattr(library, name) for library in libraries for name in dir(library) if name.endswith("Trainer")]
        classes = [cls for cls in found if issubclass(cls, Trainer)]
        self.assertGreater(len(classes), 4)
        self.assertEqual([method for cls in classes for method in bypass.bypassing_methods(cls, Trainer)], [])

    @pytest.mark.skipif(not trainers.stacks_preferences(), reason="this trl has no OnlineDPOTrainer")
    def test_online_dpo_is_named_once_by_a_warning_and_by_the_status(self):
        from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

        method = f"{OnlineDPOTrainer.__module__}.OnlineDPOTrainer.training_step"

        def said(**options):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                OnlineDPOTrainer(
                    model=tiny.causal_model(),
                    reward_funcs=lambda *args, **kwargs: [0.0],
                    args=make_args(OnlineDPOConfig, **options),
                    train_dataset=tiny.preferences(tiny.TRAINED),
                    processing_class=tiny.tokenizer(),
                )
            return [str(warning.message) for warning in caught if "by-passes the shim" in str(warning.message)]

        with shim.applied():
            self.assertEqual(said(), [])
            (message,) = said(cuda_cache_clear="never")
            self.assertTrue(message.startswith(f"{method} does not call super()"))
            self.assertEqual(said(cuda_cache_clear="never"), [])
            self.assertIn(method, shim.status().bypassing)

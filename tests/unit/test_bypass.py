"""Trainer classes that replace a wrapped method without `super()` are named; those that pass on are not."""

from __future__ import annotations

import functools
import warnings
from unittest import TestCase

import pytest
from parameterized import parameterized
from transformers import Trainer

import shim
from shim import bypass
from tests.fixtures import Count, has_legacy_loop, make_trainer

HERE = __name__


class OwnStep(Trainer):
    def training_step(self, model, inputs, *args):
        return self.compute_loss(model, inputs)


class OwnLoop(Trainer):
    def evaluation_loop(self, dataloader, description, *args, **kwargs):
        return None


class Below(OwnStep):
    def evaluation_loop(self, *args, **kwargs):
        return super().evaluation_loop(*args, **kwargs)


class LoopOfItsOwn:
    def evaluation_loop(self, dataloader, description, *args, **kwargs):
        return None


class WithMixin(LoopOfItsOwn, Trainer):
    pass


class CallsSuper(Trainer):
    def training_step(self, *args):
        return super().training_step(*args)


class CallsTheClass(Trainer):
    def training_step(self, *args):
        return Trainer.training_step(self, *args)


class CallsSuperWithin(Trainer):
    def training_step(self, *args):
        def later():
            return super(CallsSuperWithin, self).training_step(*args)

        return later()


class Watched(CallsSuper):
    pass


def watched(step):
    def spy(self, *args):
        return step(self, *args)

    return spy


Watched.training_step = watched(CallsSuper.training_step)


class Marked(CallsSuper):
    training_step = functools.wraps(CallsSuper.training_step)(lambda self, *args: None)


class BuiltIn(Trainer):
    training_step = print


class CallsItself(Trainer):
    pass


def endless():
    def training_step(self, *args):
        return training_step(self, *args)

    return training_step


CallsItself.training_step = endless()

NAMED = [
    (OwnStep, ["OwnStep.training_step"]),
    (OwnLoop, ["OwnLoop.evaluation_loop"]),
    (Below, ["OwnStep.training_step"]),
    (WithMixin, ["LoopOfItsOwn.evaluation_loop"]),
    (CallsItself, ["CallsItself.training_step"]),
    *((cls, []) for cls in (Trainer, CallsSuper, CallsTheClass, CallsSuperWithin, Watched, Marked, BuiltIn)),
]


class Methods(TestCase):
    @parameterized.expand([(cls.__name__, cls, named) for cls, named in NAMED])
    def test_those_that_do_not_pass_on_are_named(self, _, cls, named):
        self.assertEqual(bypass.bypassing_methods(cls, Trainer), [f"{HERE}.{name}" for name in named])

    def test_a_wrapper_around_the_method_of_before_apply_is_named(self):
        with shim.applied():
            after = type("After", (Trainer,), {"training_step": watched(Trainer.training_step)})
            self.assertEqual(bypass.bypassing_methods(after, Trainer), [])
        shim.revert()  # conftest has applied it
        before = type("Before", (Trainer,), {"training_step": watched(Trainer.training_step)})
        self.assertEqual(bypass.bypassing_methods(before, Trainer), [])
        with shim.applied():
            self.assertEqual(bypass.bypassing_methods(before, Trainer), [f"{HERE}.Before.training_step"])

    def test_status_names_each_method_once(self):
        named = [method for method in shim.status().bypassing if method.startswith(HERE)]
        self.assertEqual(len(named), len(set(named)))
        self.assertIn(f"{HERE}.OwnStep.training_step", named)
        self.assertIn(f"{HERE}.LoopOfItsOwn.evaluation_loop", named)


@pytest.fixture(autouse=True)
def _nothing_named_yet(monkeypatch):
    monkeypatch.setattr(bypass, "_named", set())


def warnings_of_making(cls, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(Count(), cls=cls, **options)
    ours = [warning for warning in caught if "super()" in str(warning.message)]
    assert all(warning.filename == make_trainer.__code__.co_filename for warning in ours)
    return [str(warning.message) for warning in ours]


class Warned(TestCase):
    @parameterized.expand(
        [
            ("step_with_never", OwnStep, {"cuda_cache_clear": "never"}, "cuda_cache_clear='never' does only"),
            ("loop_with_batches", OwnLoop, {"batch_eval_metrics": True}, "batch_eval_metrics=True does only"),
            (
                "loop_with_both",
                OwnLoop,
                {"batch_eval_metrics": True, "cuda_cache_clear": "eval"},
                "batch_eval_metrics=True and cuda_cache_clear='eval' do only",
            ),
        ]
    )
    def test_once_with_the_options_and_the_remedy(self, _, cls, options, said):
        (message,) = warnings_of_making(cls, **options)
        self.assertIn(said, message)
        self.assertIn("Have it call super().", message)
        self.assertEqual(warnings_of_making(cls, **options), [])

    @parameterized.expand(
        [
            ("everything_off", OwnLoop, {}),
            ("the_loop_passes_on", OwnStep, {"batch_eval_metrics": True}),
            ("all_pass_on", CallsSuper, {"batch_eval_metrics": True, "cuda_cache_clear": True}),
        ]
    )
    def test_not_where_nothing_is_lost(self, _, cls, options):
        self.assertEqual(warnings_of_making(cls, **options), [])

    @pytest.mark.skipif(not has_legacy_loop(), reason="transformers 5 has no legacy prediction_loop")
    def test_of_the_loop_that_is_going_to_run(self):
        options = {"batch_eval_metrics": True, "use_legacy_prediction_loop": True}
        self.assertEqual(warnings_of_making(OwnLoop, **options), [])

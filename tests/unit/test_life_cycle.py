"""`apply`, `revert`, `applied`, `status`: what they patch, and that nothing of it stays."""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from typing import Any, Dict
from unittest import TestCase, mock

import pytest
from parameterized import parameterized
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments

import shim
from shim import compat
from tests.fixtures import Count, make_args, make_trainer, once

ARGUMENTS = (TrainingArguments, Seq2SeqTrainingArguments)
pytestmark = pytest.mark.stock


def everything() -> Dict[str, Any]:
    """Every attribute, field and annotation of the classes that the shim touches."""
    found: Dict[str, Any] = {}
    for cls in (*ARGUMENTS, Trainer, Seq2SeqTrainer):
        found.update({f"{cls.__name__}.{name}": value for name, value in vars(cls).items()})
        found.update({f"{cls.__name__}:{name}": value for name, value in vars(cls).get("__annotations__", {}).items()})
    for cls in ARGUMENTS:
        found.update({f"{cls.__name__}[{name}]": field for name, field in cls.__dataclass_fields__.items()})
    return found


def assert_identical(before: Dict[str, Any], after: Dict[str, Any]) -> None:
    assert list(before) == list(after)
    assert [name for name in before if before[name] is not after[name]] == []


class ThereAndBack(TestCase):
    def test_revert_leaves_the_identical_objects(self):
        before = everything()
        for _ in range(2):
            shim.apply()
            assert before != everything()
            shim.revert()
            assert_identical(before, everything())

    def test_apply_and_revert_are_idempotent(self):
        before = everything()
        shim.apply()
        once_applied = everything()
        shim.apply()
        assert_identical(once_applied, everything())
        shim.revert()
        shim.revert()
        assert_identical(before, everything())

    def test_applied_puts_back_what_was_there(self):
        before = everything()
        with contextlib.suppress(ZeroDivisionError), shim.applied():
            assert shim.status().applied
            raise ZeroDivisionError
        assert_identical(before, everything())
        shim.apply()
        with shim.applied():
            pass
        assert shim.status().applied
        shim.revert()

    def test_a_trainer_that_lives_through_it_all_works_each_time(self):
        with shim.applied():
            count = Count()
            trainer = make_trainer(count, batch_eval_metrics=True)
            assert trainer.evaluate()["eval_rows"] == 10
        trainer.args.batch_eval_metrics = False
        assert trainer.evaluate()["eval_rows"] == 10
        with shim.applied():
            trainer.args.batch_eval_metrics = True
            count.flags.clear()
            trainer.evaluate()
            assert count.flags == once(3)

    def test_signatures_and_names_stay(self):
        before = {
            name: inspect.signature(getattr(Trainer, name)) for name in ("__init__", "evaluation_loop", "training_step")
        }
        with shim.applied():
            for name, signature in before.items():
                assert inspect.signature(getattr(Trainer, name)) == signature
                assert getattr(Trainer, name).__qualname__ == f"Trainer.{name}"


class HalfWay(TestCase):
    def test_an_apply_that_fails_leaves_nothing_patched(self):
        from shim import patching

        before = everything()
        places = 0
        with shim.applied():
            places = len(shim.status().patches)
        for failing in range(places):
            calls = iter(range(places))

            def install(patch, original, calls=calls, failing=failing):
                original(patch)
                if next(calls) == failing:
                    raise ZeroDivisionError

            from shim import arguments

            with (
                mock.patch.object(patching.Patch, "install", functools.partialmethod(install, patching.Patch.install)),
                mock.patch.object(
                    arguments.AddedField, "install", functools.partialmethod(install, arguments.AddedField.install)
                ),
                pytest.raises(ZeroDivisionError),
            ):
                shim.apply()
            assert_identical(before, everything())
            assert not shim.status().applied


class WrappedByOthers(TestCase):
    def test_revert_turns_ours_inert_and_never_strips_theirs(self):
        stock = vars(Trainer)["evaluation_loop"]
        calls = []
        shim.apply()
        ours = Trainer.evaluation_loop

        @functools.wraps(ours)
        def theirs(self, *args, **kwargs):
            calls.append("theirs")
            return ours(self, *args, **kwargs)

        Trainer.evaluation_loop = theirs
        try:
            place = shim.status().patches["Trainer.evaluation_loop"]
            assert place == f"ours, wrapped since by {__name__}"
            with pytest.warns(UserWarning, match=r"left wrappers of others in place.*Trainer\.evaluation_loop"):
                shim.revert()
            assert Trainer.evaluation_loop is theirs
            assert make_trainer(Count()).evaluate()["eval_rows"] == 10
            assert calls == ["theirs"]
            shim.apply()  # on top of theirs, with our inert one inside
            count = Count()
            assert make_trainer(count, batch_eval_metrics=True).evaluate()["eval_rows"] == 10
            assert (calls, count.flags) == (["theirs"] * 2, once(3))
            shim.revert()
            assert Trainer.evaluation_loop is theirs
        finally:
            Trainer.evaluation_loop = stock

    def test_a_reference_kept_from_before_revert_goes_straight_to_stock(self):
        with shim.applied():
            kept, init = Trainer.evaluation_loop, TrainingArguments.__init__
        trainer = make_trainer(Count())
        output = kept(trainer, trainer.get_eval_dataloader(), "Evaluation")
        assert output.metrics["eval_rows"] == 10
        with pytest.raises(TypeError, match="cuda_cache_clear"):
            init(make_args(), "out", cuda_cache_clear="eval")

    def test_a_wrapper_without_a_signature_from_before_is_no_obstacle(self):
        stock = vars(Trainer)["evaluation_loop"]
        Trainer.evaluation_loop = lambda self, *args, **kwargs: stock(self, *args, **kwargs)
        try:
            with shim.applied():
                count = Count()
                assert make_trainer(count, batch_eval_metrics=True).evaluate()["eval_rows"] == 10
                assert count.flags == once(3)
        finally:
            Trainer.evaluation_loop = stock


class Support(TestCase):
    @parameterized.expand([("4.38.2",), ("4.0.0",), ("3.5.1",)])
    def test_an_old_release_is_refused_with_what_to_do(self, version):
        before = everything()
        with (
            mock.patch("transformers.__version__", version),
            pytest.raises(shim.UnsupportedVersionError) as caught,
        ):
            shim.apply()
        message = str(caught.value)
        assert f"found {version}" in message
        assert f">= {compat.OLDEST_SUPPORTED}" in message
        assert "install transformers 4.39.0 to" in message
        assert_identical(before, everything())

    @parameterized.expand(
        [
            ("Trainer.evaluation_loop",),
            ("Trainer.prediction_step",),
            ("Trainer.training_step",),
            ("Trainer.compute_loss",),
        ]
    )
    def test_a_missing_place_is_named(self, path):
        before = everything()
        with (
            mock.patch.object(Trainer, path.split(".")[1], None),
            pytest.raises(
                shim.UnsupportedVersionError,
                match=rf"nothing was changed\. Expected transformers.trainer.{path}, found no such",
            ),
        ):
            shim.apply()
        assert_identical(before, everything())

    def test_a_place_with_other_parameters_is_named(self):
        with (
            mock.patch.object(Trainer, "prediction_step", lambda self, batch: None),
            pytest.raises(
                shim.UnsupportedVersionError,
                match=r"to take model, inputs, prediction_loss_only, found it takes \(self, batch\)",
            ),
        ):
            shim.apply()

    def test_a_newer_release_is_told_once_or_refused_when_strict(self):
        with mock.patch("transformers.__version__", "99.1.0"):
            with pytest.raises(shim.UnsupportedVersionError, match="strict=True asks for a tested release"):
                shim.apply(strict=True)
            assert not shim.status().applied
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                shim.apply()
                shim.apply()
            try:
                assert [str(warning.message)[:26] for warning in told] == ["transformers 99.1.0 is new"]
                assert told[0].filename == __file__
                assert not shim.status().tested
            finally:
                shim.revert()

    def test_transformers_that_is_not_installed_is_told(self):
        with (
            mock.patch.object(compat, "installed_version", return_value=None),
            pytest.raises(shim.UnsupportedVersionError, match="transformers is not installed: install transformers"),
        ):
            shim.apply()

"""`cuda_cache_clear`: how often, when, and of which device the cache is emptied. Cases C42, C43 and C48."""

from __future__ import annotations

import inspect
from typing import Any, List
from unittest import TestCase, mock

import pytest
import torch
from parameterized import parameterized
from transformers import Trainer, TrainerCallback, TrainingArguments

import shim
from tests.fixtures import Count, Rows, device_called, has_legacy_loop, make_trainer, with_evaluation_every_step

EVAL_BATCHES = 3
MICRO_STEPS = 6

# value -> (clears in 3 evaluation batches, clears in 6 micro-steps)
TABLE = {
    False: (0, 0),
    "never": (0, 0),
    "around_eval": (2, 0),
    "eval": (EVAL_BATCHES, 0),
    "train": (0, MICRO_STEPS),
    True: (EVAL_BATCHES, MICRO_STEPS),
    "always": (EVAL_BATCHES, MICRO_STEPS),
}
MODES = {
    "ordinary": {},
    "batched": {"batch_eval_metrics": True},
    "accumulating": {"eval_accumulation_steps": 1},
    "loss_only": {"prediction_loss_only": True},
}
CLEARABLE = ("cuda", "xpu", "npu", "mlu", "musa", "mps")


def stock_clears(mode: str) -> int:
    """Clears that the installed Trainer does unasked in 3 evaluation batches of a mode."""
    by_itself = "empty_cache" in inspect.unwrap(Trainer.evaluation_loop).__code__.co_names
    return EVAL_BATCHES if by_itself and mode in ("batched", "accumulating") else 0


def training(**options: Any) -> Any:
    return make_trainer(
        Count(), train_dataset=Rows(24), max_steps=MICRO_STEPS // 2, gradient_accumulation_steps=2, **options
    )


class Evaluation(TestCase):
    @parameterized.expand([(value, mode) for value in TABLE for mode in MODES])
    def test_clears_follow_the_table_in_every_mode_c42(self, value, mode):
        for method in ("evaluate", "predict"):
            trainer = make_trainer(Count(), cuda_cache_clear=value, **MODES[mode])
            with device_called("cuda") as clears:
                getattr(trainer, method)(*([Rows(10)] if method == "predict" else []))
            self.assertEqual(len(clears), TABLE[value][0], method)

    @parameterized.expand([(mode,) for mode in MODES])
    def test_none_leaves_the_installed_trainer_as_it_is_c42(self, mode):
        with device_called("cuda") as clears:
            make_trainer(Count(), **MODES[mode]).evaluate()
        self.assertEqual(len(clears), stock_clears(mode))

    @parameterized.expand([(1, 3), (2, 1), (3, 1), (4, 0)])
    def test_every_nth_batch_counted_from_each_evaluations_start(self, every, expected):
        trainer = make_trainer(Count(), cuda_cache_clear="eval", cuda_cache_clear_steps=every)
        for _ in range(2):
            with device_called("cuda") as clears:
                trainer.evaluate()
            self.assertEqual(len(clears), expected)

    @parameterized.expand([(value,) for value in TABLE])
    @pytest.mark.skipif(not has_legacy_loop(), reason="transformers 5 has no legacy prediction_loop")
    def test_clears_follow_the_table_in_the_legacy_loop_c51(self, value):
        trainer = make_trainer(
            Count(), cuda_cache_clear=value, batch_eval_metrics=True, use_legacy_prediction_loop=True
        )
        with device_called("cuda") as clears:
            trainer.evaluate()
        self.assertEqual(len(clears), TABLE[value][0])

    def test_a_batch_is_handed_to_the_metric_before_its_clear_and_its_logits_are_gone(self):
        events: List[str] = []

        def metric(eval_pred, compute_result):
            events.append("metric")
            return {}

        trainer = make_trainer(metric, cuda_cache_clear="eval", batch_eval_metrics=True)
        with (
            device_called("cuda") as clears,
            mock.patch.object(torch.cuda, "empty_cache", lambda: events.append("clear")),
        ):
            trainer.evaluate()
        self.assertEqual(events, ["metric", "clear"] * EVAL_BATCHES)
        self.assertEqual(clears, [])

    def test_the_clear_of_the_installed_trainer_keeps_its_place_after_the_metric(self):
        events: List[str] = []

        def metric(eval_pred, compute_result):
            events.append("metric")
            return {}

        for steps in (None, 1):
            events.clear()
            trainer = make_trainer(metric, batch_eval_metrics=True, eval_accumulation_steps=steps)
            with device_called("cuda"), mock.patch.object(torch.cuda, "empty_cache", lambda: events.append("clear")):
                trainer.evaluate()
            self.assertEqual(events, (["metric", "clear"] if stock_clears("batched") else ["metric"]) * EVAL_BATCHES)

    def test_around_eval_clears_before_the_first_batch_and_after_the_last(self):
        events: List[str] = []

        class Loud(Trainer):
            def prediction_step(self, *args, **kwargs):
                events.append("batch")
                return super().prediction_step(*args, **kwargs)

        trainer = make_trainer(Count(), cls=Loud, cuda_cache_clear="around_eval")
        with device_called("cuda"), mock.patch.object(torch.cuda, "empty_cache", lambda: events.append("clear")):
            trainer.evaluate()
        self.assertEqual(events, ["clear", "batch", "batch", "batch", "clear"])

    def test_calls_of_the_users_own_go_through(self):
        class Clearing(TrainerCallback):
            def on_prediction_step(self, *args, **kwargs):
                torch.cuda.empty_cache()

        def metric(eval_pred, compute_result):
            torch.cuda.empty_cache()
            return {}

        trainer = make_trainer(metric, cuda_cache_clear="never", batch_eval_metrics=True, callbacks=[Clearing()])
        with device_called("cuda") as clears:
            trainer.evaluate()
        self.assertEqual(len(clears), 2 * EVAL_BATCHES)

    def test_an_inner_evaluation_of_another_trainer_keeps_its_own_policy(self):
        inner = make_trainer(Count(), batch_eval_metrics=True)

        class Evaluating(TrainerCallback):
            def on_prediction_step(self, *args, **kwargs):
                inner.evaluate()

        outer = make_trainer(Count(), cuda_cache_clear="never", callbacks=[Evaluating()])
        with device_called("cuda") as clears:
            outer.evaluate()
        self.assertEqual(len(clears), EVAL_BATCHES * stock_clears("batched"))

    def test_the_module_of_the_trainer_has_its_own_torch_again_also_after_an_error(self):
        import transformers.trainer

        def metric(eval_pred, compute_result):
            raise ZeroDivisionError

        for method in ("evaluate", "train"):
            trainer = training(cuda_cache_clear="never", batch_eval_metrics=True)
            trainer.compute_metrics = metric
            trainer.compute_loss = (
                mock.Mock(side_effect=ZeroDivisionError) if method == "train" else trainer.compute_loss
            )
            with pytest.raises(ZeroDivisionError):
                getattr(trainer, method)()
            self.assertIs(transformers.trainer.torch, torch)


class Training(TestCase):
    @parameterized.expand([(value,) for value in TABLE])
    def test_clears_follow_the_table_at_each_micro_step_c42(self, value):
        with device_called("cuda") as clears:
            training(cuda_cache_clear=value).train()
        self.assertEqual(len(clears), TABLE[value][1])

    def test_none_leaves_the_installed_trainer_as_it_is_c42(self):
        source = inspect.getsource(inspect.unwrap(Trainer.training_step))
        unasked = "empty_cache()" in source and "torch_empty_cache_steps" not in source
        with device_called("cuda") as clears:
            training().train()
        self.assertEqual(len(clears), MICRO_STEPS if unasked else 0)

    @parameterized.expand([(2, 3), (4, 1), (7, 0)])
    def test_every_nth_micro_step_counted_from_each_runs_start(self, every, expected):
        trainer = training(cuda_cache_clear="train", cuda_cache_clear_steps=every)
        for _ in range(2):
            with device_called("cuda") as clears:
                trainer.train()
            self.assertEqual(len(clears), expected)

    def test_the_clear_lies_between_forward_and_backward(self):
        events: List[str] = []
        trainer = training(cuda_cache_clear="train")
        compute_loss, backward = trainer.compute_loss, trainer.accelerator.backward
        trainer.compute_loss = lambda *args, **kwargs: (compute_loss(*args, **kwargs), events.append("forward"))[0]
        trainer.accelerator.backward = lambda *args, **kwargs: (events.append("backward"), backward(*args, **kwargs))[1]
        own = trainer.compute_loss
        with device_called("cuda"), mock.patch.object(torch.cuda, "empty_cache", lambda: events.append("clear")):
            trainer.train()
        while events and events[0] == "clear":
            events.pop(0)  # accelerate's own, when training starts
        self.assertEqual(events, ["forward", "clear", "backward"] * MICRO_STEPS)
        self.assertIs(vars(trainer)["compute_loss"], own)

    def test_a_step_that_computes_two_losses_clears_once(self):
        class Twice(Trainer):
            def training_step(self, model, inputs, *rest):
                self.compute_loss(model, inputs)
                return super().training_step(model, inputs, *rest)

        class TwiceInside(Trainer):
            def compute_loss(self, model, inputs, *args, **kwargs):
                super().compute_loss(model, inputs)
                return super().compute_loss(model, inputs, *args, **kwargs)

        for cls in (Twice, TwiceInside):
            with device_called("cuda") as clears:
                training(cls=cls, cuda_cache_clear="train").train()
            self.assertEqual(len(clears), MICRO_STEPS)

    @parameterized.expand([(value,) for value in ("never", "eval", "train", "always")])
    def test_weights_are_the_same_to_the_bit_c42(self, value):
        stock, ours = training(), training(cuda_cache_clear=value)
        stock.train()
        ours.train()
        self.assertTrue(torch.equal(stock.model.linear.weight, ours.model.linear.weight))

    def test_torch_empty_cache_steps_keeps_its_meaning(self):
        if not hasattr(TrainingArguments, "torch_empty_cache_steps"):
            self.skipTest("torch_empty_cache_steps came with transformers 4.43")
        module = inspect.getmodule(Trainer)
        called: List[str] = []
        if hasattr(module, "clear_device_cache"):
            patched = mock.patch.object(module, "clear_device_cache", lambda *_, **__: called.append("stock"))
        else:
            patched = mock.patch.object(torch.cuda, "empty_cache", lambda: called.append("stock"))
        for value in (None, "eval"):
            called.clear()
            with patched:
                training(torch_empty_cache_steps=1, cuda_cache_clear=value).train()
            self.assertGreaterEqual(len(called), MICRO_STEPS)

    @parameterized.expand([("two",), ("three",), ("keywords",)])
    def test_an_override_of_training_step_is_called_once_a_micro_step_c48(self, form):
        takes_three = "num_items_in_batch" in inspect.signature(Trainer.training_step).parameters
        calls: List[Any] = []

        class Two(Trainer):
            def training_step(self, model, inputs):
                calls.append(("two",))
                return super().training_step(model, inputs)

        class Three(Trainer):
            def training_step(self, model, inputs, num_items_in_batch=None):
                calls.append(("three", num_items_in_batch))
                rest = (num_items_in_batch,) if takes_three else ()
                return super().training_step(model, inputs, *rest)

        class Keywords(Trainer):
            def training_step(self, *args, **kwargs):
                calls.append(("keywords", len(args)))
                return super().training_step(*args, **kwargs)

        cls = {"two": Two, "three": Three, "keywords": Keywords}[form]
        if form == "two" and takes_three:
            self.skipTest("since transformers 4.46 the Trainer itself gives training_step three arguments")
        with device_called("cuda") as clears:
            training(cls=cls, cuda_cache_clear="train").train()
        self.assertEqual((len(calls), len(clears)), (MICRO_STEPS, MICRO_STEPS))
        if form == "keywords":
            self.assertEqual(calls[0][1], 3 if takes_three else 2)

    def test_evaluation_inside_training_follows_both_halves(self):
        with device_called("cuda") as clears:
            training(cuda_cache_clear="always", batch_eval_metrics=True, **with_evaluation_every_step()).train()
        self.assertEqual(len(clears), MICRO_STEPS + MICRO_STEPS // 2 * EVAL_BATCHES)


class Device(TestCase):
    @parameterized.expand([(kind, value) for kind in (*CLEARABLE, "hpu", "cpu") for value in ("always", "around_eval")])
    def test_the_cache_cleared_is_that_of_the_device_in_use_c43(self, kind, value):
        with device_called(kind) as clears:
            trainer = training(cuda_cache_clear=value, batch_eval_metrics=True)
            trainer.train()
            trainer.evaluate()
        in_evaluation, in_training = TABLE[value]
        expected = [kind] * (in_evaluation + in_training) if kind in CLEARABLE else []
        self.assertEqual(clears, expected)

    def test_a_backend_that_this_torch_lacks_is_no_error_c43(self):
        if hasattr(torch, "musa"):
            self.skipTest("this torch has the backend")
        trainer = make_trainer(Count(), cuda_cache_clear="always")
        with device_called("musa"), mock.patch.object(torch, "musa", None, create=True):
            self.assertIn("eval_accuracy", trainer.evaluate())

    def test_a_cpu_run_does_not_initialise_cuda(self):
        with mock.patch.object(torch.cuda, "_lazy_init", side_effect=AssertionError("CUDA was initialised")):
            trainer = make_trainer(Count(), cuda_cache_clear="always", batch_eval_metrics=True)
            trainer.evaluate()
        self.assertFalse(torch.cuda.is_initialized())

    def test_calls_of_other_libraries_are_not_muted_by_reverting_or_applying(self):
        before = torch.cuda.empty_cache
        shim.revert()
        shim.apply()
        self.assertIs(torch.cuda.empty_cache, before)

"""The contract of `batch_eval_metrics` in one process. The ids are those of the cases they stand for."""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from typing import Any, Dict, List
from unittest import TestCase

import numpy as np
import pytest
import torch
from parameterized import parameterized
from torch.utils.data import DataLoader
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
)

from tests.fixtures import (
    EVAL_BATCH,
    LOADERS,
    BoxCounts,
    Boxes,
    Count,
    CountWithoutReset,
    Dense,
    Detector,
    Evaluating,
    FailingOnce,
    InterruptedOnce,
    Keeping,
    Lin,
    Rows,
    TokenAccuracy,
    batches,
    detection_batch,
    has_legacy_loop,
    has_losses,
    including,
    keeping_the_best,
    loading,
    make_args,
    make_trainer,
    once,
    oracle,
    to_bfloat16,
    token_trainer,
    trainer_over,
    without_labels,
    without_timing,
)


class Watching(TrainerCallback):
    """Counts the logits that are alive, in each step of the callbacks and in each call as a metric."""

    def __init__(self) -> None:
        self.alive: List[int] = []
        self._logits: List[Any] = []

    def trainer_class(self) -> type:
        remember = self._logits.append

        class Watched(Trainer):
            def prediction_step(self, *args, **kwargs):
                loss, logits, labels = super().prediction_step(*args, **kwargs)
                remember(weakref.ref(logits))
                return loss, logits, labels

        return Watched

    def _count(self) -> None:
        self.alive.append(sum(logits() is not None for logits in self._logits))

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        self._count()

    def __call__(self, eval_pred: Any, compute_result: bool) -> Dict[str, Any]:
        self._count()
        return {}


def _forgetful(eval_pred: Any, compute_result: bool) -> Dict[str, Any]:
    return {}


def evaluated(trainer: Any) -> Dict[str, Any]:
    return without_timing(trainer.evaluate())


class LastBatch(TestCase):
    @parameterized.expand([(loader, n) for loader in LOADERS for n in (10, 8, 1)])
    def test_compute_result_is_true_on_the_last_batch_only_and_every_row_counts_c01_c04(self, loader, n):
        count = Count()
        trainer = trainer_over(loader, n, count, batch_eval_metrics=True)
        for _ in range(2):
            result = trainer.evaluate()
            self.assertEqual({key: result[f"eval_{key}"] for key in ("accuracy", "rows")}, oracle(Lin(), Rows(n)))
        self.assertEqual(count.flags, 2 * once(-(-n // EVAL_BATCH)))
        self.assertEqual(count.resets, 2)

    # 14 training rows leave a remainder of 2 at the end of the epoch, 12 leave none
    @parameterized.expand([(loader, rows) for loader in LOADERS for rows in (12, 14)])
    def test_every_evaluation_inside_training_covers_all_rows_c02(self, loader, training_rows):
        count, evaluating = Count(), Evaluating()
        trainer = trainer_over(
            loader,
            10,
            count,
            batch_eval_metrics=True,
            train_dataset=Rows(training_rows),
            num_train_epochs=1,
            learning_rate=0.0,
            callbacks=[evaluating],
        )
        evaluating.trainer = trainer
        trainer.train()
        self.assertEqual(count.flags, len(evaluating.results) * once(3))
        self.assertEqual(len(evaluating.results), -(-training_rows // EVAL_BATCH))
        for result in evaluating.results:
            self.assertEqual((result["eval_rows"], result["eval_accuracy"]), (10, oracle(Lin(), Rows(10))["accuracy"]))

    @parameterized.expand([(loader,) for loader in LOADERS])
    def test_metrics_of_rows_and_loss_equal_ordinary_mode_c30(self, loader):
        ordinary = evaluated(trainer_over(loader, 10, Count()))
        batched = evaluated(trainer_over(loader, 10, Count(), batch_eval_metrics=True))
        self.assertEqual(batched, ordinary)
        self.assertEqual(list(batched), list(ordinary))

    @parameterized.expand([(size,) for size in (1, 2, 3, 4, 7, 10)])
    def test_sums_are_exact_for_any_batch_size_c29(self, size):
        trainer = make_trainer(Count(), batch_eval_metrics=True, per_device_eval_batch_size=size)
        self.assertEqual(trainer.evaluate()["eval_accuracy"], oracle(Lin(), Rows(10))["accuracy"])

    def test_each_of_several_sets_is_finished_by_itself_c25(self):
        count = Count()
        trainer = make_trainer(count, eval_rows={"one": Rows(10), "two": Rows(5)}, batch_eval_metrics=True)
        result = trainer.evaluate()
        self.assertEqual(count.flags, once(3) + once(2))
        self.assertEqual((result["eval_one_rows"], result["eval_two_rows"]), (10, 5))

    def test_the_best_model_is_found_by_a_batched_metric_c25_c33(self):
        for cls in (Trainer, loading(lambda: batches(10))):
            trainer = make_trainer(Count(), cls=cls, batch_eval_metrics=True, **keeping_the_best())
            trainer.train()
            self.assertIsNotNone(trainer.state.best_metric)

    @pytest.mark.skipif(not has_legacy_loop(), reason="transformers 5 has no legacy prediction_loop")
    def test_the_legacy_loop_gives_the_same_c51(self):
        count = Count()
        trainer = make_trainer(count, batch_eval_metrics=True, use_legacy_prediction_loop=True)
        result = trainer.evaluate()
        # Stock's legacy loop cannot iterate over a prepared loader before transformers 4.47; its successor can.
        ordinary = make_trainer(Count()).evaluate()
        self.assertEqual(count.flags, once(3))
        self.assertEqual(without_timing(result), without_timing(ordinary))
        predicted = trainer.predict(Rows(10))
        self.assertEqual(count.flags, 2 * once(3))
        self.assertEqual(predicted.predictions.shape, (10, 3))
        self.assertEqual(predicted.metrics["test_rows"], 10)


class WhatTheMetricGets(TestCase):
    def test_tensors_of_the_batch_on_every_release_c17(self):
        count = Keeping()
        make_trainer(count, batch_eval_metrics=True).evaluate()
        rows = Rows(10)
        for seen, x, labels in zip(count.seen, rows.x.split(EVAL_BATCH), rows.labels.split(EVAL_BATCH)):
            self.assertIsInstance(seen.predictions, torch.Tensor)
            self.assertFalse(seen.predictions.requires_grad)
            self.assertTrue(torch.equal(seen.label_ids, labels))
            self.assertEqual(seen.predictions.shape, (len(x), 3))
            self.assertEqual(seen.predictions.device.type, "cpu")

    def test_detached_also_where_prediction_step_is_overridden_c17(self):
        class WithGradients(Trainer):
            def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
                outputs = model(**inputs)
                return outputs["loss"].detach(), outputs["logits"], inputs["labels"]

        count = Keeping()
        make_trainer(count, cls=WithGradients, batch_eval_metrics=True).evaluate()
        self.assertFalse(any(seen.predictions.requires_grad for seen in count.seen))

    def test_half_precision_arrives_as_it_is_c18(self):
        count = Keeping()
        make_trainer(count, batch_eval_metrics=True, bf16_full_eval=True, data_collator=to_bfloat16).evaluate()
        self.assertEqual({seen.predictions.dtype for seen in count.seen}, {torch.bfloat16})

    def test_nothing_is_padded_across_batches_c12(self):
        lengths = (3, 5, 2, 7, 4, 6, 1)
        metric = TokenAccuracy()
        result = token_trainer(lengths, metric, batch_eval_metrics=True).evaluate()
        ordinary = token_trainer(lengths, TokenAccuracy()).evaluate()
        self.assertEqual(without_timing(result), without_timing(ordinary))
        self.assertEqual(result["eval_tokens"], 28)
        self.assertEqual(metric.widths, [5, 7, 6, 1])

    def test_pictures_of_any_size_c11(self):
        pictures = [{"x": torch.randn(1, *size, 4), "labels": torch.randint(3, (1, *size))} for size in _SIZES]
        metric = TokenAccuracy()
        result = make_trainer(metric, cls=loading(lambda: pictures), model=Dense(), batch_eval_metrics=True).evaluate()
        self.assertEqual(result["eval_tokens"], sum(height * width for height, width in _SIZES))
        model = Dense()
        right = sum(int((model(p["x"])["logits"].argmax(-1) == p["labels"]).sum()) for p in pictures)
        self.assertEqual(result["eval_accuracy"], right / result["eval_tokens"])

    def test_ragged_labels_keep_every_box_c08_c09(self):
        for objects in (False, True):
            counts = [3, 4, 5, 6, 3, 4]
            metric = BoxCounts()
            trainer = make_trainer(
                metric,
                model=Detector(),
                eval_rows=Boxes(counts),
                data_collator=detection_batch,
                batch_eval_metrics=True,
                **_gather_object(objects),
            )
            gather_function = trainer.gather_function
            for _ in range(2):
                metric.boxes = []
                trainer.evaluate()
                self.assertEqual(metric.boxes, counts)
                self.assertIs(trainer.gather_function, gather_function)

    def test_preprocessing_runs_once_a_batch_and_keeps_its_structure_c21(self):
        calls = []

        def preprocess(logits, labels):
            calls.append(tuple(labels.shape))
            return logits.argmax(-1), {"sum": logits.sum(-1)}

        for method, argument in (("evaluate", None), ("predict", Rows(10))):
            calls.clear()
            seen = []

            def metric(eval_pred, compute_result, seen=seen):
                seen.append(eval_pred.predictions)
                return {}

            trainer = make_trainer(metric, batch_eval_metrics=True, preprocess_logits_for_metrics=preprocess)
            output = getattr(trainer, method)(*([argument] if argument else []))
            self.assertEqual(calls, [(4,), (4,), (2,)])
            self.assertTrue(all(isinstance(p, tuple) and list(p[1]) == ["sum"] for p in seen))
            if method == "predict":
                self.assertEqual(output.predictions[0].shape, (10,))

    @parameterized.expand([(("inputs",),), (("inputs", "loss"),), (("loss",),)])
    def test_inputs_and_losses_have_the_content_of_ordinary_mode_c19(self, what):
        if "loss" in what and not has_losses():
            self.skipTest("EvalPrediction has no losses before transformers 4.46")
        batched, ordinary = Keeping(), Keeping()
        for model_inputs, count in ((True, batched), (False, ordinary)):
            trainer = make_trainer(count, batch_eval_metrics=model_inputs, **including(*what))
            trainer.model.main_input_name = "x"
            trainer.evaluate()
        for name in ("inputs", "losses"):
            whole = getattr(ordinary.seen[0], name, None)
            if whole is None:
                self.assertTrue(all(getattr(seen, name, None) is None for seen in batched.seen))
                continue
            parts = [getattr(seen, name) for seen in batched.seen]
            self.assertTrue(all(isinstance(part, torch.Tensor) for part in parts))
            np.testing.assert_array_equal(torch.cat(parts).numpy(), whole)

    def test_losses_have_one_entry_a_row_for_a_loader_that_nobody_prepared(self):
        if not has_losses():
            self.skipTest("EvalPrediction has no losses before transformers 4.46")
        count = Keeping()
        make_trainer(count, cls=loading(lambda: batches(10)), batch_eval_metrics=True, **including("loss")).evaluate()
        self.assertEqual([len(seen.losses) for seen in count.seen], [4, 4, 2])

    def test_an_output_that_is_no_tensor_raises_nothing_of_ours_c14(self):
        class WithCache(Lin):
            def forward(self, x, labels=None):
                return {**super().forward(x, labels), "past": object()}

        rows = []

        def metric(eval_pred, compute_result):
            rows.append(len(eval_pred.label_ids))
            return {"rows": sum(rows)}

        trainer = make_trainer(metric, model=WithCache(), batch_eval_metrics=True)
        before = dict(vars(trainer.args))
        try:
            self.assertEqual(trainer.evaluate()["eval_rows"], 10)
        except AttributeError as error:  # the prediction_step of 4.39 and 4.40 cannot detach it, in any mode
            self.assertIn("detach", str(error))
        self.assertEqual(vars(trainer.args), before)
        self.assertNotIn("prediction_step", vars(trainer))


class WhatTheMetricReturns(TestCase):
    def test_values_are_converted_as_in_ordinary_mode_c32(self):
        values = {
            "scalar": np.float64(0.5),
            "zero_d": torch.tensor(2.0),
            "nested": {"int": np.int64(3)},
            "array": np.arange(2).tolist(),
            "eval_named": 1,
            "list": [np.float32(1.0)],
            "eval_loss": -1.0,
        }
        ordinary = evaluated(make_trainer(lambda eval_pred: dict(values)))
        batched = evaluated(make_trainer(lambda eval_pred, compute_result: dict(values), batch_eval_metrics=True))
        self.assertEqual(batched, ordinary)
        self.assertEqual(list(batched), list(ordinary))
        self.assertEqual([type(value) for value in batched.values()], [type(value) for value in ordinary.values()])

    def test_earlier_returns_never_appear(self):
        def metric(eval_pred, compute_result):
            return {"final": 1} if compute_result else {"partial": 1, "eval_loss": 0}

        result = make_trainer(metric, batch_eval_metrics=True).evaluate()
        self.assertNotIn("eval_partial", result)
        self.assertEqual(result["eval_final"], 1)

    @parameterized.expand([("nothing", None), ("a number", 0.5), ("a string", "x")])
    def test_earlier_returns_may_be_anything(self, _, early):
        def metric(eval_pred, compute_result):
            return {"final": 1} if compute_result else early

        self.assertEqual(make_trainer(metric, batch_eval_metrics=True).evaluate()["eval_final"], 1)

    def test_the_dict_of_the_metric_stays_as_it_was(self):
        mine = {"accuracy": 1.0}
        make_trainer(lambda eval_pred, compute_result: mine, batch_eval_metrics=True).evaluate()
        self.assertEqual(mine, {"accuracy": 1.0})

    def test_none_at_the_end_is_told(self):
        trainer = make_trainer(lambda eval_pred, compute_result: None, batch_eval_metrics=True)
        with pytest.warns(UserWarning, match="returned None for compute_result"):
            self.assertIn("eval_loss", trainer.evaluate())

    def test_something_else_than_a_dict_is_an_error(self):
        trainer = make_trainer(lambda eval_pred, compute_result: 0.5, batch_eval_metrics=True)
        with pytest.raises(TypeError, match=r"must return a dict of metrics.*found float"):
            trainer.evaluate()


class Silence(TestCase):
    """Where the result cannot be had, the user is told why and what to do; nothing is told where all is well."""

    def test_no_labels(self):
        with pytest.warns(UserWarning, match="no batch gave labels.*data collator"):
            result = make_trainer(Count(), batch_eval_metrics=True, data_collator=without_labels()).evaluate()
        self.assertNotIn("eval_accuracy", result)

    def test_no_logits(self):
        with pytest.warns(UserWarning, match="no batch gave logits.*prediction_loss_only"):
            result = make_trainer(Count(), batch_eval_metrics=True, prediction_loss_only=True).evaluate()
        self.assertIn("eval_loss", result)

    def test_no_labels_and_no_metrics(self):
        trainer = make_trainer(None, batch_eval_metrics=True, data_collator=without_labels())
        self.assertNotIn("eval_loss", trainer.evaluate())

    def test_no_logits_in_the_last_batch(self):
        class WithoutLastLogits(Trainer):
            def prediction_step(self, model, inputs, *args, **kwargs):
                loss, logits, labels = super().prediction_step(model, inputs, *args, **kwargs)
                return loss, logits if len(labels) == EVAL_BATCH else None, labels

        trainer = make_trainer(Count(), cls=WithoutLastLogits, batch_eval_metrics=True)
        with pytest.warns(UserWarning, match="the last batch gave no logits: there are no metrics"):
            self.assertNotIn("eval_accuracy", trainer.evaluate())

    def test_no_batch(self):
        with pytest.warns(UserWarning, match="gave no batch"):
            make_trainer(Count(), cls=loading(list), batch_eval_metrics=True).evaluate()

    @parameterized.expand([("the_last",), ("another",)])
    def test_a_batch_without_labels_is_told_and_the_others_count_c07(self, which):
        count = Count()
        # the collator is called for batches 0, 1, 2 of each evaluation
        skipped = {"the_last": {2}, "another": {1}}[which]
        trainer = make_trainer(count, batch_eval_metrics=True, data_collator=without_labels(skipped))
        with pytest.warns(UserWarning, match="1 of 3 batches gave no labels"):
            result = trainer.evaluate()
        self.assertEqual(result["eval_rows"], {"the_last": 8, "another": 6}[which])
        self.assertEqual(count.flags, once(2))
        trainer.data_collator = without_labels(set())
        self.assertEqual(trainer.evaluate()["eval_rows"], 10)

    def test_nothing_is_told_where_all_is_well_or_nothing_was_asked(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            make_trainer(Count(), batch_eval_metrics=True).evaluate()
            make_trainer(None, batch_eval_metrics=True).evaluate()
            unlabelled = make_trainer(Count(), batch_eval_metrics=True, data_collator=without_labels())
            self.assertEqual(unlabelled.predict(Rows(10)).predictions.shape, (10, 3))


class Interrupted(TestCase):
    def test_a_failing_metric_leaves_nothing_of_ours_c22(self):
        for metric, leaked in ((Count(), 0), (CountWithoutReset(), EVAL_BATCH)):
            failing = FailingOnce(metric, at=2)
            trainer = make_trainer(failing, batch_eval_metrics=True)
            before = dict(vars(trainer)), dict(vars(trainer.args)), dict(vars(trainer.callback_handler))
            with contextlib.suppress(ZeroDivisionError):
                trainer.evaluate()
            self.assertEqual(set(vars(trainer)) - set(before[0]), {"model_preparation_time"} & set(vars(trainer)))
            self.assertEqual(vars(trainer.args), before[1])
            self.assertNotIn("on_prediction_step", vars(trainer.callback_handler))
            self.assertEqual(trainer.evaluate()["eval_rows"], 10 + leaked)

    @parameterized.expand([("prepared", True), ("plain", False)])
    def test_an_interruption_in_the_data_leaves_nothing_c23(self, _, prepared):
        rows, count = InterruptedOnce(10, at=5), Count()
        cls = Trainer if prepared else loading(lambda: DataLoader(rows, batch_size=EVAL_BATCH))
        trainer = make_trainer(count, cls=cls, eval_rows=rows, batch_eval_metrics=True)
        with contextlib.suppress(KeyboardInterrupt):
            trainer.evaluate()
        self.assertNotIn("prediction_step", vars(trainer))
        count.flags.clear()
        self.assertEqual(trainer.evaluate()["eval_rows"], 10)
        self.assertEqual(count.flags, once(3))

    def test_an_interrupted_batch_is_freed_without_the_collector(self):
        class Interrupting(Watching):
            def on_prediction_step(self, *args, **kwargs):
                raise KeyboardInterrupt

        watching = Interrupting()
        trainer = make_trainer(_forgetful, cls=watching.trainer_class(), batch_eval_metrics=True, callbacks=[watching])
        gc.disable()
        try:
            with contextlib.suppress(KeyboardInterrupt):
                trainer.evaluate()
            watching._count()
        finally:
            gc.enable()
        self.assertEqual(watching.alive, [0])


class Nested(TestCase):
    @parameterized.expand([(True,), (False,)])
    def test_an_evaluation_from_a_callback_and_the_one_around_it_are_both_right_c24(self, inner_batched):
        results: List[Dict[str, Any]] = []

        class Inner(TrainerCallback):
            def on_prediction_step(self, *args, **kwargs):
                if trainer.compute_metrics is inner:
                    return
                own, trainer.compute_metrics = trainer.compute_metrics, inner
                trainer.args.batch_eval_metrics = inner_batched
                results.append(trainer.evaluate(Rows(6), metric_key_prefix="inner"))
                trainer.compute_metrics = own
                trainer.args.batch_eval_metrics = True

        outer, inner = Count(), Count()
        trainer = make_trainer(outer, batch_eval_metrics=True, callbacks=[Inner()])
        self.assertEqual(trainer.evaluate()["eval_rows"], 10)
        self.assertEqual(outer.flags, once(3))
        self.assertEqual(inner.flags, 3 * (once(2) if inner_batched else [True]))
        self.assertEqual([result["inner_rows"] for result in results], [6, 6, 6])

    def test_a_callback_sees_the_trainer_as_its_user_knows_it(self):
        seen: List[Any] = []

        class Looking(TrainerCallback):
            def on_prediction_step(self, args, *_, **__):
                _, logits, labels = trainer.prediction_step(trainer.model, batches(4)[0], False)
                seen.append((args.batch_eval_metrics, trainer.compute_metrics, logits.shape, len(labels)))

        count = Count()
        trainer = make_trainer(count, batch_eval_metrics=True, eval_accumulation_steps=1, callbacks=[Looking()])
        trainer.predict(Rows(10))
        self.assertEqual(seen, 3 * [(True, count, (4, 3), 4)])
        self.assertEqual(count.flags, once(3))

    def test_a_metric_that_a_callback_replaces_serves_from_the_next_evaluation_on(self):
        class Replacing(TrainerCallback):
            def on_prediction_step(self, *args, **kwargs):
                trainer.compute_metrics = second

        for method in ("evaluate", "predict"):
            first, second = Count(), Count()
            trainer = make_trainer(first, batch_eval_metrics=True, callbacks=[Replacing()])
            for _ in range(2):
                getattr(trainer, method)(*([Rows(10)] if method == "predict" else []))
            self.assertEqual((first.flags, second.flags), (once(3), once(3)))
            self.assertIs(trainer.compute_metrics, second)


class Predict(TestCase):
    @parameterized.expand([(None,), (1,), (2,)])
    def test_predictions_equal_ordinary_mode_to_the_bit_c27(self, steps):
        ordinary = make_trainer(Count(), eval_accumulation_steps=steps).predict(Rows(10))
        count = Count()
        trainer = make_trainer(count, batch_eval_metrics=True, eval_accumulation_steps=steps)
        batched = trainer.predict(Rows(10))
        np.testing.assert_array_equal(batched.predictions, ordinary.predictions)
        np.testing.assert_array_equal(batched.label_ids, ordinary.label_ids)
        self.assertEqual(without_timing(batched.metrics), without_timing(ordinary.metrics))
        self.assertEqual(count.flags, once(3))
        self.assertIs(trainer.compute_metrics, count)

    def test_predictions_inside_training_are_those_of_all_rows_for_a_loader_that_nobody_prepared_c02(self):
        class Predicting(TrainerCallback):
            def on_step_end(self, *args, **kwargs):
                outputs.append(trainer.predict(None))

        outputs: List[Any] = []
        # 14 rows leave a remainder of 2, by which the stock Trainer trims the batches of the other loader
        options = {"train_dataset": Rows(14), "max_steps": 4, "learning_rate": 0.0}
        trainer = make_trainer(
            Count(), cls=loading(lambda: batches(10)), batch_eval_metrics=True, callbacks=[Predicting()], **options
        )
        trainer.train()
        with torch.no_grad():
            expected = Lin()(Rows(10).x)["logits"].numpy()
        for output in outputs:
            self.assertEqual(output.metrics["test_rows"], 10)
            np.testing.assert_allclose(output.predictions, expected, rtol=1e-6)
            np.testing.assert_array_equal(output.label_ids, Rows(10).labels)
        self.assertEqual(len(outputs), 4)

    @parameterized.expand([("with_metric", _forgetful), ("without", None)])
    def test_accumulation_steps_are_honoured_c27(self, _, metric):
        watching = Watching()
        trainer = make_trainer(
            metric,
            cls=watching.trainer_class(),
            eval_rows=40,
            batch_eval_metrics=True,
            eval_accumulation_steps=1,
            callbacks=[watching],
        )
        trainer.predict(Rows(40))
        self.assertEqual(len(watching.alive), 10)
        self.assertLessEqual(max(watching.alive), 2)


class Memory(TestCase):
    @parameterized.expand([(40,), (400,)])
    def test_at_most_one_batch_of_logits_is_alive_when_a_step_begins_or_ends_c39(self, rows):
        watching = Watching()
        make_trainer(
            watching, cls=watching.trainer_class(), eval_rows=rows, batch_eval_metrics=True, callbacks=[watching]
        ).evaluate()
        self.assertEqual(len(watching.alive), 2 * rows // EVAL_BATCH)
        self.assertLessEqual(max(watching.alive), 1)


class Check(TestCase):
    @parameterized.expand([(True,), (False,)])
    def test_a_metric_without_compute_result_is_refused_when_the_trainer_is_made(self, by_keyword):
        def one_argument(eval_pred):
            return {}

        with pytest.raises(
            ValueError, match=r"compute_metrics\(eval_pred, compute_result\).*one_argument\(eval_pred\)"
        ):
            make_trainer(one_argument, batch_eval_metrics=True)

    def test_and_where_it_was_put_on_later(self):
        trainer = make_trainer(Count(), batch_eval_metrics=True)
        trainer.compute_metrics = lambda eval_pred: {}
        with pytest.raises(ValueError, match="give it a parameter compute_result"):
            trainer.evaluate()

    def test_without_the_option_it_is_welcome(self):
        self.assertEqual(make_trainer(lambda eval_pred: {"a": 1}).evaluate()["eval_a"], 1)


_SIZES = ((4, 4), (6, 4), (4, 8))


def _gather_object(wanted: bool) -> Dict[str, Any]:
    from transformers import TrainingArguments

    return {"eval_use_gather_object": wanted} if hasattr(TrainingArguments, "eval_use_gather_object") else {}


class Generation(TestCase):
    def test_generated_tokens_equal_a_loop_that_calls_generate_c38(self):
        torch.manual_seed(0)
        config = T5Config(
            vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
        )
        model = T5ForConditionalGeneration(config).eval()
        rows = [{"input_ids": torch.randint(2, 32, (5,)), "labels": torch.randint(2, 32, (4,))} for _ in range(10)]
        seen: List[Any] = []

        def metric(eval_pred, compute_result):
            seen.extend(eval_pred.predictions)
            return {"rows": len(seen)}

        trainer = make_trainer(
            metric,
            model=model,
            cls=Seq2SeqTrainer,
            args=make_args(Seq2SeqTrainingArguments, batch_eval_metrics=True, predict_with_generate=True),
            eval_rows=rows,
        )
        self.assertEqual(trainer.evaluate(max_length=7, num_beams=1)["eval_rows"], 10)
        for row, tokens in zip(rows, seen):
            expected = model.generate(row["input_ids"][None], max_length=7, num_beams=1)[0]
            self.assertEqual(tokens[: len(expected)].tolist(), expected.tolist())

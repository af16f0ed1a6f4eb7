"""With every option at its default: stock's results, and almost no added calls."""

from __future__ import annotations

from unittest import TestCase

import pytest
import torch
from parameterized import parameterized

import shim
from tests.calls import added_calls
from tests.fixtures import Count, Keeping, Rows, make_trainer, with_evaluation_every_step, without_timing

pytestmark = pytest.mark.stock


class Cost(TestCase):
    @parameterized.expand([(10,), (100,)])
    def test_an_evaluation_costs_at_most_five_calls_and_a_batch_none(self, rows):
        trainer = make_trainer(Count(), eval_rows=rows)
        loader = trainer.get_eval_dataloader()
        self.assertLessEqual(added_calls(lambda: trainer.evaluation_loop(loader, "Evaluation")), 5)

    def test_a_training_step_costs_at_most_three_calls(self):
        trainer = make_trainer(train_dataset=Rows(4))
        trainer.create_optimizer()
        trainer.current_gradient_accumulation_steps = 1
        rows = Rows(4)
        batch = {"x": rows.x, "labels": rows.labels}
        self.assertLessEqual(added_calls(lambda: trainer.training_step(trainer.model, dict(batch))), 3)


class SameAsStock(TestCase):
    @parameterized.expand([("evaluate",), ("predict",), ("accumulating",), ("train",)])
    def test_metrics_keys_and_calls_are_stocks(self, what):
        def run():
            count = Keeping()
            options = {"eval_accumulation_steps": 1} if what == "accumulating" else {}
            trainer = make_trainer(count, train_dataset=Rows(8), max_steps=2, **with_evaluation_every_step(), **options)
            if what == "train":
                trainer.train()
                return (
                    [without_timing(entry) for entry in trainer.state.log_history],
                    trainer.model.linear.weight,
                    count,
                )
            if what == "predict":
                output = trainer.predict(Rows(10))
                return without_timing(output.metrics), torch.as_tensor(output.predictions), count
            return without_timing(trainer.evaluate()), torch.zeros(0), count

        stock, stock_values, stock_count = run()
        with shim.applied():
            ours, our_values, our_count = run()
        self.assertEqual(ours, stock)
        self.assertTrue(torch.equal(our_values, stock_values))
        self.assertEqual(our_count.flags, stock_count.flags)
        self.assertEqual([type(s.predictions) for s in our_count.seen], [type(s.predictions) for s in stock_count.seen])

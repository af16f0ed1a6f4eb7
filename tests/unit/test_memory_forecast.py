"""What an evaluation is going to take is foretold rightly, and told before the memory is gone."""

from __future__ import annotations

import warnings
from typing import Any, Dict, List
from unittest import TestCase, mock

import pytest
from parameterized import parameterized
from transformers import Trainer, TrainerCallback

import shim
from shim import memory
from tests.fixtures import Count, Lin, Stream, device_faked, make_trainer, token_trainer, without_timing
from tests.memory import PLAIN_MALLOC, TELLS_ANONYMOUS
from tests.unit.test_import import on_releases, run_fresh

ROW = 3 * 4 + 8 + 4  # logits, label and loss


@on_releases("4.40.0", "5.0.0")
@pytest.mark.skipif(not TELLS_ANONYMOUS, reason="cannot tell resident memory from mapped files")
def test_the_estimate_is_within_a_tenth_of_what_is_measured():
    measured = run_fresh(
        """
        import json, torch
        import shim
        from tests.fixtures import Dense, Lin, make_trainer, token_trainer
        from tests.memory import anonymous, growth

        class Nested(Lin):
            def forward(self, x, labels=None):
                outputs = super().forward(x, labels)
                logits = outputs["logits"]
                return {**outputs, "hidden": (logits[:, :5000].double(), {"a": logits[:, :1000]})}

        class Wide(Dense):
            def forward(self, x, labels=None):
                outputs = super().forward(x, labels)
                return {**outputs, "logits": torch.nn.functional.pad(outputs["logits"], (0, 997))}

        def count(eval_pred):
            return {"rows": len(eval_pred.label_ids)}

        def dense(**options):
            return make_trainer(count, model=Lin(wide=19_997), eval_rows=2000, per_device_eval_batch_size=50, **options)

        def nested(**options):
            model = Nested(wide=9997)
            return make_trainer(count, model=model, eval_rows=2000, per_device_eval_batch_size=50, **options)

        def tokens(**options):
            lengths = torch.randint(5, 60, (600,), generator=torch.Generator().manual_seed(0)).tolist()
            trainer = token_trainer(lengths, count, **options)
            trainer.model = trainer.model_wrapped = Wide()
            return trainer

        found = {}
        for trainer_with in (dense, nested, tokens):
            for options in ({}, {"eval_accumulation_steps": 1}, {"eval_accumulation_steps": 5}):
                trainer = trainer_with(**options)
                estimate = shim.estimate_eval_memory(trainer).strategies["as it is"].host / 2**20
                found[f"{trainer_with.__name__} {options}"] = [estimate, growth(trainer.evaluate, anonymous)]
        print(json.dumps(found))
        """,
        PLAIN_MALLOC,
    )
    assert len(measured) == 9
    for scenario, (estimate, grown) in measured.items():
        assert grown > 100, scenario  # MiB: what is measured is not noise
        assert estimate == pytest.approx(grown, rel=0.1), scenario


class Estimate(TestCase):
    def test_the_record(self):
        estimate = shim.estimate_eval_memory(make_trainer(Count(), eval_rows=1000))
        self.assertEqual((estimate.rows, estimate.bytes_per_row, estimate.device), (1000, ROW, "cpu"))
        # what is there, a batch, and the old logits while the last batch is joined to them
        stock = 1000 * ROW + 4 * ROW + 1000 * 12 * 249 // 250
        self.assertEqual(estimate.strategies["as it is"], memory.Held(0, stock))
        self.assertEqual(estimate.strategies["batch_eval_metrics=True"], memory.Held(0, 2 * 4 * ROW))
        self.assertEqual(estimate.strategies["spool"].disk, 1000 * ROW)

    def test_as_it_is_follows_the_arguments(self):
        for option, value in (("batch_eval_metrics", True), ("eval_accumulation_steps", 1)):
            trainer = make_trainer(Count(), eval_rows=1000, **{option: value})
            strategies = shim.estimate_eval_memory(trainer).strategies
            self.assertEqual(strategies["as it is"], strategies[f"{option}={value}"])

    def test_the_table(self):
        text = str(shim.estimate_eval_memory(make_trainer(Count(), model=Lin(wide=5000), eval_rows=1000)))
        self.assertEqual(text.splitlines()[0], "1,000 rows, 19.6 KiB each")
        self.assertRegex(text, r"to set +RAM +disk\nas it is +38\.2 MiB +0 B\n")
        self.assertRegex(text, r"\nspool +156\.4 KiB +19\.1 MiB$")

    def test_on_an_accelerator_ram_is_told_apart(self):
        with device_faked("cuda"):
            estimate = shim.estimate_eval_memory(make_trainer(Count(), eval_rows=1000))
        as_it_is, accumulated = estimate.strategies["as it is"], estimate.strategies["eval_accumulation_steps=1"]
        self.assertGreater(as_it_is.device, as_it_is.host)
        self.assertEqual(as_it_is.host, 1000 * ROW)
        self.assertEqual((accumulated.device, accumulated.host), (2 * 4 * ROW, as_it_is.device))
        self.assertRegex(str(estimate), r"to set +cuda +RAM +disk\n")

    def test_another_set_and_its_longest_row(self):
        trainer = token_trainer([2, 3], Count(), batch_eval_metrics=True)
        longer = token_trainer([2, 3, 9, 4], Count()).eval_dataset
        estimate = shim.estimate_eval_memory(trainer, longer)
        self.assertEqual((estimate.rows, estimate.bytes_per_row), (4, 9 * (3 * 4 + 8) + 4))

    @parameterized.expand([("with the shim", True), ("without", False)])
    def test_the_trainer_is_left_as_it_was(self, _, applied):
        steps: List[Any] = []

        class Counting(TrainerCallback):
            def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
                steps.append(args)

        if not applied:
            shim.revert()
        count = Count()
        trainer = make_trainer(count, callbacks=[Counting()])
        expected = without_timing(trainer.evaluate())
        count.flags.clear()
        steps.clear()
        before = dict(vars(trainer))
        shim.estimate_eval_memory(trainer)
        self.assertEqual((count.flags, steps), ([], []))
        self.assertEqual({name for name in before if vars(trainer)[name] is not before[name]}, set())
        self.assertEqual(without_timing(trainer.evaluate()), expected)
        self.assertEqual(count.flags, [True])

    def test_a_set_without_a_length_is_refused_with_the_remedy(self):
        with self.assertRaisesRegex(ValueError, r"found \w+: give dataset="):
            shim.estimate_eval_memory(make_trainer(Count(), eval_rows=Stream(10)))


def told(work: Any, host: int = 0, device: int = -1, **environment: str) -> List[str]:
    """The forecasts, where so many bytes are free."""
    with (
        mock.patch.object(memory, "_free_host", lambda: host),
        mock.patch.object(memory, "_free_on", lambda _: device),
        mock.patch.dict("os.environ", environment),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        work()
    return [str(warning.message) for warning in caught if memory.WARNING_SETTING in str(warning.message)]


class Warned(TestCase):
    @parameterized.expand([("plain", {}), ("with a cache clear", {"cuda_cache_clear": "never"})])
    def test_once_a_trainer_with_what_is_needed_what_is_there_and_what_helps(self, _, options):
        count = Count()
        trainer = make_trainer(count, eval_rows=1000, **options)
        (message,) = told(trainer.evaluate, host=2048)
        self.assertIn("all 1,000 rows, 24 B each: that needs 35.2 KiB of RAM, where 2.0 KiB are free.", message)
        for remedy in ("batch_eval_metrics=True", "shim.metrics.spool", "preprocess_logits_for_metrics"):
            self.assertIn(remedy, message)
        self.assertNotIn("eval_accumulation_steps", message)  # on a CPU it is RAM as well
        self.assertEqual(told(trainer.evaluate), [])
        self.assertEqual(count.flags, [True, True])
        self.assertEqual(len(told(make_trainer(Count()).evaluate)), 1)

    def test_of_a_device_and_that_ram_has_room(self):
        with device_faked("cuda"):
            trainer = make_trainer(Count(), eval_rows=1000, model=Lin(wide=100))
            (message,) = told(trainer.evaluate, host=10**9, device=1000)
        self.assertIn(" on cuda, where 1000 B are free", message)
        self.assertNotIn("of RAM, where", message)
        self.assertIn("eval_accumulation_steps moves them to RAM", message)

    @parameterized.expand(
        [
            ("there is room", {}, {"host": 10**9}),
            ("it is not known", {}, {"host": -1}),
            ("it is turned off", {}, {memory.WARNING_SETTING: "0"}),
            ("metrics are batched", {"batch_eval_metrics": True}, {}),
            ("only the loss is kept", {"prediction_loss_only": True}, {}),
            ("the set has no length", {"eval_rows": Stream(10)}, {}),
        ]
    )
    def test_not_where(self, _, options: Dict[str, Any], free: Dict[str, Any]):
        trainer = make_trainer(Count(), **options)
        self.assertEqual(told(trainer.evaluate, **free), [])

    def test_not_without_metrics_nor_in_predict(self):
        self.assertEqual(told(make_trainer().evaluate), [])
        trainer = make_trainer(Count())
        self.assertEqual(told(lambda: trainer.predict(trainer.eval_dataset)), [])

    def test_a_forecast_that_fails_is_never_an_error(self):
        trainer = make_trainer(Count())
        with mock.patch.object(memory, "_estimate", side_effect=ZeroDivisionError):
            self.assertEqual(told(trainer.evaluate), [])

    def test_a_trainer_that_cannot_be_hashed_is_told_once_as_well(self):
        class Equal(Trainer):
            def __eq__(self, other: object) -> bool:
                return True

        trainer = make_trainer(Count(), cls=Equal)
        self.assertEqual([len(told(trainer.evaluate)) for _ in range(2)], [1, 0])

    def test_memory_that_is_free_is_found_here(self):
        self.assertNotEqual(memory._free_host(), 0)
        self.assertGreaterEqual(memory._free_host(), -1)

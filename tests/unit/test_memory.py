"""Resident memory while wide logits are evaluated, in a fresh process: stock's grows with the rows, ours does not."""

from __future__ import annotations

from tests.unit.test_import import on_releases, run_fresh


@on_releases("4.40.0", "4.57.0", "5.0.0")
def test_a_batched_evaluation_holds_a_twentieth_of_stocks_and_no_more_for_four_times_the_rows():
    grown = run_fresh(
        """
        import json
        import shim
        from tests.fixtures import CountWithoutReset, Lin, make_trainer
        from tests.memory import growth

        ROWS, WIDTH = 3000, 20_000
        shim.apply()

        def grown_by(rows, metric, **options):
            trainer = make_trainer(
                metric, model=Lin(wide=WIDTH - 3), eval_rows=rows, per_device_eval_batch_size=25, **options
            )
            return growth(trainer.evaluate)

        def one_shot(eval_pred):
            return {"rows": len(eval_pred.predictions)}

        grown_by(100, one_shot)
        batched = {"batch_eval_metrics": True}
        print(json.dumps({
            "first": grown_by(ROWS, CountWithoutReset(), **batched),
            "four times the rows": grown_by(4 * ROWS, CountWithoutReset(), **batched),
            "stock": grown_by(ROWS, one_shot),
        }))
        """
    )
    assert grown["stock"] > 200  # MiB: 3,000 rows of 20,000 float32 are 229
    assert max(grown["first"], grown["four times the rows"]) <= grown["stock"] / 20, grown

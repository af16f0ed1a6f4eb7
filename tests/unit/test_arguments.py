"""The fields of `TrainingArguments`: in every form in which arguments are made, kept and sent. Cases C46 and C47."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import io
import json
import pickle
import subprocess
import sys
import tempfile
import textwrap
import warnings
from pathlib import Path
from unittest import TestCase

import pytest
import torch
from parameterized import parameterized
from transformers import HfArgumentParser, Seq2SeqTrainingArguments, TrainingArguments

import shim
from tests.fixtures import Count, make_args, make_trainer

FIELDS = ("batch_eval_metrics", "cuda_cache_clear", "cuda_cache_clear_steps")
CHOSEN = {"batch_eval_metrics": True, "cuda_cache_clear": "eval", "cuda_cache_clear_steps": 3}


@dataclasses.dataclass
class DeclaredBefore(TrainingArguments):
    """Declared before `apply()`, for conftest applies the shim for each test."""

    mine: str = "mine"


class NotADataclass(TrainingArguments):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.extra = 1


@dataclasses.dataclass
class WithOwnInit(TrainingArguments):
    mine: str = "mine"

    def __init__(self, output_dir, **kwargs):
        super().__init__(output_dir, **kwargs)


@dataclasses.dataclass
class WithOwnField(TrainingArguments):
    """Brought its own option of the same name along."""

    cuda_cache_clear: str = "never"


with shim.applied():

    @dataclasses.dataclass
    class DeclaredAfter(TrainingArguments):
        mine: str = "mine"


CLASSES = [TrainingArguments, Seq2SeqTrainingArguments, DeclaredBefore, DeclaredAfter, NotADataclass, WithOwnInit]
PARSED = [TrainingArguments, Seq2SeqTrainingArguments, DeclaredBefore, DeclaredAfter]


def chosen(args):
    return {name: getattr(args, name) for name in FIELDS}


class Forms(TestCase):
    @parameterized.expand([(cls.__name__, cls) for cls in CLASSES])
    def test_values_survive_every_copy(self, _, cls):
        args = make_args(cls, **CHOSEN)
        through_file = io.BytesIO()
        torch.save(args, through_file)
        through_file.seek(0)
        copies = {
            "itself": args,
            "pickle": pickle.loads(pickle.dumps(args)),
            "torch.save": torch.load(through_file, weights_only=False),
            "copy": copy.copy(args),
            "deepcopy": copy.deepcopy(args),
        }
        if cls is not WithOwnInit and cls is not NotADataclass:
            copies["replace"] = dataclasses.replace(args, output_dir=tempfile.mkdtemp())
        for form, made in copies.items():
            self.assertEqual(chosen(made), CHOSEN, form)
            self.assertIs(type(made), cls)
        self.assertEqual({name: args.to_dict()[name] for name in FIELDS}, CHOSEN)
        self.assertEqual(json.loads(args.to_json_string())["cuda_cache_clear"], "eval")

    @parameterized.expand([(cls.__name__, cls) for cls in CLASSES])
    def test_defaults(self, _, cls):
        self.assertEqual(
            chosen(make_args(cls)), {"batch_eval_metrics": False, "cuda_cache_clear": None, "cuda_cache_clear_steps": 1}
        )

    @parameterized.expand([(cls.__name__, cls) for cls in PARSED])
    def test_the_parser_reads_flags_dict_json_and_yaml_alike(self, _, cls):
        directory = Path(tempfile.mkdtemp())
        plain = {"output_dir": str(directory / "out"), "use_cpu": True, **CHOSEN}
        (directory / "args.json").write_text(json.dumps(plain))
        (directory / "args.yaml").write_text("\n".join(f"{key}: {json.dumps(value)}" for key, value in plain.items()))
        flags = [part for key, value in plain.items() for part in (f"--{key}", str(value))]
        parser = HfArgumentParser(cls)
        for form, (parsed,) in {
            "flags": parser.parse_args_into_dataclasses(flags),
            "dict": parser.parse_dict(plain),
            "json": parser.parse_json_file(str(directory / "args.json")),
            "yaml": parser.parse_yaml_file(str(directory / "args.yaml")),
        }.items():
            self.assertEqual(chosen(parsed), CHOSEN, form)
        (bare,) = parser.parse_args_into_dataclasses(["--output_dir", "x", "--use_cpu", "--batch_eval_metrics"])
        self.assertEqual(chosen(bare), {**CHOSEN, "cuda_cache_clear": None, "cuda_cache_clear_steps": 1})

    @parameterized.expand([("True", True), ("false", False), ("none", None), ("always", "always")])
    def test_a_command_line_spells_out_what_code_says(self, word, value):
        parser = HfArgumentParser(TrainingArguments)
        (parsed,) = parser.parse_args_into_dataclasses(["--output_dir", "x", "--use_cpu", "--cuda_cache_clear", word])
        self.assertIs(parsed.cuda_cache_clear, value) if value in (True, False, None) else self.assertEqual(
            parsed.cuda_cache_clear, value
        )

    def test_help_of_the_parser_can_be_printed(self):
        self.assertIn("--cuda_cache_clear", HfArgumentParser(TrainingArguments).format_help())

    def test_positions_of_old_fields_do_not_move(self):
        with_shim = [list(inspect.signature(cls).parameters) for cls in (*PARSED[:3], DeclaredAfter)]
        shim.revert()
        try:
            without = [list(inspect.signature(cls).parameters) for cls in PARSED[:3]]
        finally:
            shim.apply()
        for ours, stock in zip(with_shim, without):
            self.assertEqual(ours[: len(stock)], stock)
        if sys.version_info >= (3, 10):
            self.assertEqual([n for n in with_shim[3] if n not in FIELDS], [n for n in with_shim[2] if n not in FIELDS])
        kinds = {p.name: p.kind for p in inspect.signature(TrainingArguments).parameters.values()}
        self.assertIs(kinds["cuda_cache_clear"], inspect.Parameter.KEYWORD_ONLY)

    def test_arguments_that_differ_are_not_equal(self):
        args = make_args(output_dir="x", logging_dir="x") if hasattr(TrainingArguments, "logging_dir") else make_args()
        same = copy.copy(args)
        self.assertEqual(args, same)
        same.cuda_cache_clear = "eval"
        self.assertNotEqual(args, same)

    def test_a_subclass_keeps_its_own_option_of_the_same_name(self):
        self.assertEqual(make_args(WithOwnField).cuda_cache_clear, "never")
        self.assertEqual(make_args(WithOwnField, cuda_cache_clear="eval").cuda_cache_clear, "eval")

    def test_an_unknown_argument_is_still_refused(self):
        with pytest.raises(TypeError, match="cuda_cache_clearing"):
            make_args(cuda_cache_clearing="eval")


class AroundApply(TestCase):
    def test_arguments_made_before_apply_read_defaults_after(self):
        shim.revert()
        try:
            old, pickled = make_args(), pickle.dumps(make_args())
        finally:
            shim.apply()
        for args in (old, pickle.loads(pickled), copy.copy(old)):
            self.assertEqual(args.cuda_cache_clear_steps, 1)
            self.assertIs(args.cuda_cache_clear, None)
            self.assertIn("cuda_cache_clear", args.to_dict())
            self.assertIn("eval_accuracy", make_trainer(Count(), args=args).evaluate())

    def test_files_travel_between_processes_with_and_without_the_shim(self):
        directory = Path(tempfile.mkdtemp())
        (directory / "ours").write_bytes(pickle.dumps(make_args(cuda_cache_clear="eval")))
        without_shim = textwrap.dedent(
            """
            import pickle, sys
            from pathlib import Path
            from transformers import TrainingArguments

            directory = Path(sys.argv[1])
            args = pickle.loads((directory / "ours").read_bytes())
            assert type(args) is TrainingArguments and "cuda_cache_clear" not in args.to_dict()
            stock = TrainingArguments(str(directory / "out"), use_cpu=True)
            (directory / "stock").write_bytes(pickle.dumps(stock))
            """
        )
        command = [sys.executable, "-W", "ignore", "-c", without_shim, str(directory)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        args = pickle.loads((directory / "stock").read_bytes())
        self.assertIs(args.to_dict()["cuda_cache_clear"], None)

    def test_a_subclass_declared_meanwhile_works_after_revert_and_after_another_apply(self):
        @dataclasses.dataclass
        class Meanwhile(TrainingArguments):
            mine: str = "mine"

        shim.revert()
        try:
            args = make_args(Meanwhile)
            self.assertNotIn("cuda_cache_clear", args.to_dict())
            HfArgumentParser(Meanwhile)
        finally:
            shim.apply()
        self.assertEqual(chosen(make_args(Meanwhile, **CHOSEN)), CHOSEN)
        self.assertEqual(make_args(Meanwhile, **CHOSEN).to_dict()["cuda_cache_clear"], "eval")


class Validation(TestCase):
    @parameterized.expand(
        [(repr(value), value) for value in ("sometimes", "Eval", "", 1, 0, 2.5, [], ("eval",), ["never"])]
    )
    def test_a_wrong_value_names_the_allowed_ones(self, _, value):
        for cls in PARSED:
            with pytest.raises(ValueError, match="'never', 'around_eval', 'eval', 'train', 'always'") as caught:
                make_args(cls, cuda_cache_clear=value)
            self.assertIn(repr(value), str(caught.value))

    @parameterized.expand(
        [(repr(value), value) for value in (None, False, "never", "around_eval", "eval", "train", True, "always")]
    )
    def test_each_allowed_value_is_kept_as_it_was_given(self, _, value):
        kept = make_args(cuda_cache_clear=value).cuda_cache_clear
        self.assertEqual((type(kept), kept), (type(value), value))

    @parameterized.expand([(repr(value), value) for value in (0, -1, True, 1.0, "2", None)])
    def test_steps_are_a_whole_number(self, _, value):
        with pytest.raises(ValueError, match="cuda_cache_clear_steps must be a whole number of steps, 1 or more"):
            make_args(cuda_cache_clear="eval", cuda_cache_clear_steps=value)

    def test_batch_eval_metrics_is_a_bool(self):
        with pytest.raises(ValueError, match="batch_eval_metrics must be True or False, found 'yes'"):
            make_args(batch_eval_metrics="yes")

    @parameterized.expand([("never",), (False,)])
    def test_never_contradicts_torch_empty_cache_steps(self, value):
        if not hasattr(TrainingArguments, "torch_empty_cache_steps"):
            self.skipTest("torch_empty_cache_steps came with transformers 4.43")
        with pytest.raises(ValueError, match="torch_empty_cache_steps=2 asks to empty it in training"):
            make_args(cuda_cache_clear=value, torch_empty_cache_steps=2)
        self.assertEqual(make_args(cuda_cache_clear="eval", torch_empty_cache_steps=2).torch_empty_cache_steps, 2)

    @parameterized.expand([(None,), ("around_eval",), ("never",)])
    def test_steps_that_count_nothing_are_told(self, value):
        with pytest.warns(UserWarning, match="cuda_cache_clear_steps=5 has no effect"):
            make_args(cuda_cache_clear=value, cuda_cache_clear_steps=5)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            make_args(cuda_cache_clear="train", cuda_cache_clear_steps=5)

    def test_a_value_put_on_later_is_checked_when_a_trainer_is_made_and_when_it_works(self):
        args = make_args()
        trainer = make_trainer(Count(), args=args, train_dataset=None)
        args.cuda_cache_clear = "sometimes"
        for work in (
            lambda: make_trainer(args=args),
            trainer.evaluate,
            lambda: trainer.training_step(trainer.model, {}),
        ):
            with pytest.raises(ValueError, match="'sometimes'"):
                work()


def test_the_help_text_of_the_fields_is_plain():
    for name in FIELDS:
        text = TrainingArguments.__dataclass_fields__[name].metadata["help"]
        assert text == textwrap.dedent(text)
        assert "%" not in text  # argparse would format it

"""`python -m shim`: programs run as Python runs them, mistakes are one line, and what is printed is what there is."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any, Dict, List
from unittest import TestCase, mock

import pytest
import transformers
from parameterized import parameterized

import shim
from patches.series import SeriesError, installed_release, known_series, series_for
from shim import __main__ as command_line
from shim import reporting
from tests.fixtures import has_batch_eval_metrics, make_trainer
from tests.unit.test_import import on_releases

ROOT = Path(__file__).parents[2]


def python(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


PROGRAMS: Dict[str, str] = {
    "what it finds": """
        import sys, os
        print(__name__, __file__, __package__, __spec__ and __spec__.name, type(__loader__).__name__, __doc__)
        print(sys.argv, sys.path[0], sys.modules["__main__"].__dict__ is globals(), sorted(globals()))
    """,
    "an exit code": "import sys; sys.exit(3)",
    "a message at the end": "raise SystemExit('no such model')",
    "an error": """
        def train():
            raise ValueError("no rows")

        train()
    """,
    "an error with a cause": """
        try:
            1 / 0
        except ZeroDivisionError as error:
            raise RuntimeError("in vain") from error
    """,
    "an error of a library": "import json; json.loads('{')",
    "a wrong line": "print('never'); x = = 1",
    "an interruption": """
        import os, signal, time

        signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in what a shell runs in the background
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(9)
    """,
    "a signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM); import time; time.sleep(9)",
    "a hook of its own": "import sys; sys.excepthook = lambda *error: print('mine', error[0]); 1 / 0",
    "what is left to do at the end": "import atexit; atexit.register(lambda: print(__name__, Thing())); Thing = list",
    "objects that are pickled": """
        import pickle

        class Row:
            pass

        print(type(pickle.loads(pickle.dumps(Row()))) is Row)
    """,
    "other processes": """
        import multiprocessing

        def double(number):
            return 2 * number

        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(double, [1, 2]))
    """,
    "a neighbour": "import neighbour; print(neighbour.__name__)",
}


class AsPythonItself(TestCase):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path):
        self.folder = tmp_path
        for name in ("scripts", "package"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "neighbour.py").touch()
        (tmp_path / "package" / "__init__.py").touch()

    def assert_same(self, words: List[str]) -> None:
        alone = python(*words, cwd=self.folder)
        under_shim = python("-m", "shim", "run", *words, cwd=self.folder)
        self.assertEqual(under_shim.stdout, alone.stdout)
        self.assertEqual(under_shim.stderr, alone.stderr)
        self.assertEqual(under_shim.returncode, alone.returncode)

    @parameterized.expand([(name,) for name in PROGRAMS])
    def test_a_script(self, name):
        (self.folder / "scripts" / "program.py").write_text(textwrap.dedent(PROGRAMS[name]))
        self.assert_same(["scripts/program.py", "--rows", "3", "--", "-m", "--help", "", "a b"])

    @parameterized.expand(
        [(name,) for name in PROGRAMS if name not in ("a wrong line", "a neighbour", "an interruption")]
    )
    def test_a_module(self, name):
        (self.folder / "package" / "program.py").write_text(textwrap.dedent(PROGRAMS[name]))
        alone = python("-m", "package.program", "--rows", "3", cwd=self.folder)
        under_shim = python("-m", "shim", "run", "-m", "package.program", "--rows", "3", cwd=self.folder)
        self.assertEqual(under_shim.stdout, alone.stdout)
        self.assertEqual(under_shim.returncode, alone.returncode)
        # Python shows the frames of runpy, which are of no use to anybody
        self.assertEqual(without_runpy(under_shim.stderr), without_runpy(alone.stderr))

    def test_a_package(self):
        (self.folder / "package" / "__main__.py").write_text("from . import neighbour; print(__package__, __name__)")
        self.assert_same(["-m", "package"])

    def test_an_interruption_ends_it_by_the_signal(self):
        (self.folder / "program.py").write_text(textwrap.dedent(PROGRAMS["an interruption"]))
        self.assertEqual(python("-m", "shim", "run", "program.py", cwd=self.folder).returncode, -signal.SIGINT)

    def test_a_program_without_transformers_does_not_load_it(self):
        (self.folder / "program.py").write_text(
            "import sys; print('torch' in sys.modules, 'transformers' in sys.modules)"
        )
        self.assertEqual(python("-m", "shim", "run", "program.py", cwd=self.folder).stdout, "False False\n")


def without_runpy(stderr: str) -> str:
    lines = stderr.splitlines()
    return "\n".join(
        line for line, before in zip(lines, ["", *lines]) if "runpy" not in line and "runpy.py" not in before
    )


MISTAKES = {
    "no command": ([], "COMMAND"),
    "an unknown command": (["walk"], "invalid choice: 'walk'"),
    "no script": (["run"], "TARGET"),
    "a missing file": (["run", "missing.py"], "there is no file missing.py"),
    "a folder": (["run", "."], "is a folder"),
    "a missing module": (["run", "-m", "missing.module"], "there is no module missing.module"),
    "a package that is no program": (["run", "-m", "json"], "the package json has no __main__"),
    "no folder to spool to": (["run", "--spool-directory", "missing", "setup.py"], "there is no folder missing"),
    "a wrong flag": (["run", "--spool", "x.py"], "--spool"),
    "a wrong flag of status": (["status", "--xml"], "unrecognized arguments: --xml"),
    "an unknown release": (["diff", "--for", "4.50.0"], "no patches for transformers 4.50.0"),
    "no release": (["diff", "--for", "newest"], "Invalid version: 'newest'"),
}


class Mistakes(TestCase):
    @pytest.fixture(autouse=True)
    def capture(self, capsys):
        self.capsys = capsys

    @parameterized.expand([(name, *of) for name, of in MISTAKES.items()])
    def test_one_line_and_exit_code_2(self, _, words, message):
        with self.assertRaises(SystemExit) as left:
            command_line.main(words)
        printed = self.capsys.readouterr()
        self.assertEqual(left.exception.code, 2)
        self.assertEqual((printed.out, printed.err.count("\n")), ("", 1))
        self.assertIn(message, printed.err)

    def test_the_help_is_a_screenful(self):
        with self.assertRaises(SystemExit) as left:
            command_line.main(["--help"])
        self.assertEqual(left.exception.code, 0)
        printed = self.capsys.readouterr().out.splitlines()
        self.assertLessEqual(len(printed), 24)
        self.assertLessEqual(max(map(len, printed)), 100)

    def test_an_unsupported_transformers_ends_the_program_where_it_is_imported(self):
        folder = Path(tempfile.mkdtemp(prefix="shim-test-"))
        (folder / "transformers").mkdir()
        (folder / "transformers" / "__init__.py").write_text("__version__ = '4.30.0'")
        (folder / "transformers" / "training_args.py").touch()
        (folder / "program.py").write_text("print('before'); import transformers.training_args; print('after')")
        done = python("-m", "shim", "run", "program.py", cwd=folder)
        self.assertEqual((done.stdout, done.returncode), ("before\n", 2))
        self.assertRegex(done.stderr, r"^shim: error: .* found 4.30.0: install transformers .*\n$")

    @pytest.mark.stock
    def test_an_unsupported_transformers_is_told_by_status(self):
        with mock.patch("transformers.__version__", "4.30.0"):
            for words in (["status"], ["status", "--json"]):
                with self.assertRaises(SystemExit) as left:
                    command_line.main(words)
                self.assertEqual(left.exception.code, 2)
                self.assertIn("expected transformers >= 4.39.0, but found 4.30.0", self.capsys.readouterr().out)


@pytest.fixture
def lines(capsys):
    def printed(*words: str) -> List[str]:
        command_line.main(list(words))
        return capsys.readouterr().out.splitlines()

    return printed


class TestDiff:
    def test_it_prints_the_series_as_it_is(self, capsys):
        for series in known_series():
            command_line.main(["diff", "--for", series.first])
            assert capsys.readouterr().out == "".join(patch.read_text() for patch in series.patches())

    def test_by_default_that_of_the_installed_release(self, capsys):
        try:
            series = series_for(installed_release())
        except SeriesError:
            with pytest.raises(SystemExit):
                command_line.main(["diff"])
            return
        command_line.main(["diff"])
        assert capsys.readouterr().out == "".join(patch.read_text() for patch in series.patches())

    def test_list_names_every_series_or_the_one_that_is_asked_for(self, lines):
        listed = lines("diff", "--list")
        assert [line for line in listed if not line.startswith(" ")] == list(map(str, known_series()))
        named = [patch.name for series in known_series() for patch in series.patches()]
        assert [line.strip() for line in listed if line.startswith(" ")] == named
        assert lines("diff", "--list", "--for", "4.40.1")[0] == "transformers-4.40 (4.40.0 to 4.40.2)"

    def test_an_installed_wheel_has_the_patches_in_the_package(self, tmp_path):
        skipped = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "shim", tmp_path / "shim", ignore=skipped)
        shutil.copytree(ROOT / "patches", tmp_path / "shim" / "patches", ignore=skipped)
        assert '\npatches = "shim/patches"\n' in (ROOT / "pyproject.toml").read_text()
        done = python("-m", "shim", "diff", "--for", "4.39.0", cwd=tmp_path, PYTHONPATH=str(tmp_path))
        assert done.stdout == "".join(patch.read_text() for patch in known_series()[0].patches())

    def test_git_am_takes_it_from_a_pipe(self, patched_tree, tmp_path, capsys):
        command_line.main(["diff"])
        mails = capsys.readouterr().out
        repository = tmp_path / "again"
        subprocess.run(["git", "clone", "-q", str(patched_tree.parent), str(repository)], check=True)
        subprocess.run(["git", "checkout", "-q", "pristine"], cwd=repository, check=True)
        identity = ["-c", "user.name=x", "-c", "user.email=x@localhost", "-c", "commit.gpgSign=false"]
        subprocess.run(["git", *identity, "am", "-q"], input=mails, text=True, cwd=repository, check=True)
        difference = ["git", "diff", "--stat", "origin/HEAD"]
        assert not subprocess.run(difference, cwd=repository, capture_output=True, check=True).stdout


@pytest.mark.stock
class TestStatus:
    def test_json_is_the_record(self, capsys):
        command_line.main(["status", "--json"])
        assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(shim.status()._asdict()))

    def test_versions_and_what_the_release_has_itself(self):
        status = shim.status()
        assert (status.transformers, status.tested, status.problem) == (transformers.__version__, True, None)
        assert status.accelerate
        assert status.torch
        expected = "yes" if has_batch_eval_metrics() else "no"
        assert status.options["batch_eval_metrics"]["native"] == expected
        with shim.applied():
            assert shim.status().options == status.options

    def test_places_are_stock_or_ours(self):
        before = shim.status().patches
        assert set(before.values()) == {"stock"}
        with shim.applied():
            assert dict.fromkeys(before, "ours") == shim.status().patches

    def test_who_has_wrapped_a_place_is_named(self, monkeypatch):
        stock = transformers.Trainer.training_step
        monkeypatch.setattr(transformers.Trainer, "training_step", lambda *args, **kwargs: stock(*args, **kwargs))
        assert shim.status().patches["Trainer.training_step"] == f"stock, wrapped by {__name__}"
        assert not shim.status().applied

    def test_subclasses_that_by_pass_the_options_are_named(self):
        class Replacing(transformers.Trainer):
            def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
                return self.compute_loss(model, inputs)

        class PassingOn(transformers.Trainer):
            def training_step(self, *args: Any) -> Any:
                return super().training_step(*args)

        class AsOf(Replacing):
            def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
                return transformers.Trainer.evaluation_loop(self, *args, **kwargs)

        named = [method for method in shim.status().bypassing if __name__ in method]
        assert len(named) == 1
        assert named[0].endswith("Replacing.training_step")
        assert PassingOn
        assert AsOf

    def test_it_reads_well(self):
        text = str(shim.status())
        assert text.splitlines()[0].startswith(
            f"shim not applied, transformers {transformers.__version__}, accelerate "
        )
        assert "batch_eval_metrics\n  in transformers itself  " in text
        assert "\nTrainer.training_step " in text
        assert max(map(len, text.split("\n\nwithout super()")[0].splitlines())) <= 120

    @on_releases("4.40.0", "5.0.0")
    def test_without_the_trainer_it_imports_nothing_more(self):
        code = "import sys, shim; print(shim.status()); print('transformers.trainer' in sys.modules)"
        done = python("-c", code, cwd=ROOT)
        assert done.stdout.splitlines()[-1] == "False"
        assert len(done.stdout.splitlines()) == 2


def test_the_trainer_is_unaffected_by_status():
    metrics = make_trainer().evaluate()
    reporting.status()
    assert make_trainer().evaluate().keys() == metrics.keys()

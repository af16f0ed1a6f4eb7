"""Run by test_orders.py: goes through every order of the steps of a program's life, each in a process of its own.

Where an order branches, the process forks: what has been done up to there is done, as in a fresh process, and nothing
else. Prints each order that was gone through to its end.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import tempfile
import traceback
import warnings
from typing import Any, Callable, Dict, List, Tuple

# step -> the steps that it has to come after
STEPS: Dict[str, Tuple[str, ...]] = {
    "import transformers": (),
    "import shim": (),
    "define a subclass": ("import transformers",),
    "make arguments": ("import transformers",),
    "another library wraps": ("import transformers",),
    "apply": ("import shim",),
    "apply again": ("apply",),
    "revert": ("apply again",),
    "revert again": ("revert",),
}


class Life:
    """What a program has done so far, and what has to be true then."""

    def __init__(self) -> None:
        self.done: List[str] = []
        self.subclass: Any = None
        self.args: Any = None
        self.wrapped: Any = None
        self.stock: Any = None

    def do(self, step: str) -> None:
        getattr(self, step.replace(" ", "_"))()
        self.done.append(step)
        self.check()

    def import_transformers(self) -> None:
        importlib.import_module("transformers.trainer")
        if "apply" not in self.done:
            self.stock = vars(self.trainer)["evaluation_loop"]

    def import_shim(self) -> None:
        importlib.import_module("shim")

    def define_a_subclass(self) -> None:
        self.subclass = type("Mine", (self.trainer,), {})

    def make_arguments(self) -> None:
        self.args = self.arguments(self.folder(), use_cpu=True)

    def another_library_wraps(self) -> None:
        current = vars(self.trainer)["evaluation_loop"]

        @functools.wraps(current)
        def theirs(*args: Any, **kwargs: Any) -> Any:
            return current(*args, **kwargs)

        self.wrapped, self.trainer.evaluation_loop = (theirs, self.applied), theirs

    def apply(self) -> None:
        self.shim.apply()
        if self.stock is None:  # it has imported transformers
            self.stock = vars(self.trainer)["evaluation_loop"].__wrapped__

    apply_again = apply

    def revert(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it has left the wrapper of the other library alone
            self.shim.revert()

    revert_again = revert

    @property
    def shim(self) -> Any:
        return sys.modules["shim"]

    @property
    def trainer(self) -> Any:
        return sys.modules["transformers.trainer"].Trainer

    @property
    def arguments(self) -> Any:
        return sys.modules["transformers.training_args"].TrainingArguments

    @property
    def applied(self) -> bool:
        return "apply" in self.done and "revert" not in self.done

    def folder(self) -> str:
        return os.path.join(tempfile.gettempdir(), "never-written")

    def check(self) -> None:
        if "import shim" in self.done:
            assert self.shim.status().applied == self.applied
        if "transformers.trainer" not in sys.modules:
            return
        assert ("cuda_cache_clear" in self.arguments.__dataclass_fields__) == self.applied
        assert hasattr(self.arguments, "cuda_cache_clear") == self.applied
        if self.args is not None and self.applied:
            assert self.args.cuda_cache_clear is None
            assert self.args.to_dict()["cuda_cache_clear"] is None
        if self.subclass is not None:
            assert self.subclass.evaluation_loop is self.trainer.evaluation_loop
        if self.wrapped is not None:
            theirs, was_applied = self.wrapped
            # Theirs stays in place, unless ours has been put around it since.
            around = self.applied and not was_applied
            assert (vars(self.trainer)["evaluation_loop"] is theirs) != around
        elif "revert" in self.done:
            assert vars(self.trainer)["evaluation_loop"] is self.stock

    def end(self) -> None:
        """Evaluate with a subclass, whose metrics are computed once now that all is reverted; and applied once more."""
        from tests.fixtures import Count, make_trainer, once

        count = Count()
        make_trainer(count, cls=self.subclass).evaluate()
        assert count.flags == [True]
        count.flags.clear()
        with self.shim.applied():
            make_trainer(count, cls=self.subclass, batch_eval_metrics=True).evaluate()
        assert count.flags == once(3)


def next_steps(done: List[str]) -> List[str]:
    return [step for step, after in STEPS.items() if step not in done and set(after) <= set(done)]


def explore(life: Life, finish: Callable[[Life], None]) -> bool:
    """Go through every order that begins as this life has; whether all went well. Each branch is a process."""
    while True:
        *others, last = next_steps(life.done) or [None]
        if last is None:
            finish(life)
            return True
        for step in others:
            if not forked(life, step, finish):
                return False
        life.do(last)


def forked(life: Life, step: str, finish: Callable[[Life], None]) -> bool:
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    status = 1
    try:
        life.do(step)
        status = int(not explore(life, finish))
    except BaseException:
        print(f"after {', '.join(life.done)}, at {step}", file=sys.stderr)
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(status)


def finish(life: Life) -> None:
    # The functional check takes longer than the orders: it is done for those that differ in what can matter to it.
    if life.done.index("make arguments") == len(life.done) - 1:
        life.end()
    print(" > ".join(life.done))
    sys.stdout.flush()


if __name__ == "__main__":
    import numpy  # noqa: F401  # heavy, and nothing of it is what the orders are about
    import torch  # noqa: F401

    sys.exit(0 if explore(Life(), finish) else 1)

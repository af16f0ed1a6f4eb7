"""Run in a process of its own: what the configuration classes of the installed libraries make of the options, as JSON.

    python -m tests.ecosystem.configurations before|after

The classes are declared, which is when their library is imported, before or after `shim.apply()`.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import pickle
import sys
import tempfile
from typing import Any, Callable, Dict, Iterator, Tuple

import shim

MODULES = (
    "trl",
    "trl.experimental.cpo",
    "trl.experimental.orpo",
    "trl.experimental.online_dpo",
    "sentence_transformers",
    "sentence_transformers.cross_encoder",
    "sentence_transformers.sparse_encoder",
)
CHOSEN = {"batch_eval_metrics": True, "cuda_cache_clear": "eval", "cuda_cache_clear_steps": 3}
FLAGS = ["--batch_eval_metrics", "--cuda_cache_clear", "eval", "--cuda_cache_clear_steps", "3"]


def classes() -> Dict[str, type]:
    from transformers import TrainingArguments

    found: Dict[str, type] = {}
    for module in filter(None, map(imported, MODULES)):
        for name in dir(module):
            cls = attribute(module, name) if name.endswith(("Config", "TrainingArguments")) else None
            if isinstance(cls, type) and issubclass(cls, TrainingArguments) and cls is not TrainingArguments:
                found[name] = cls
    return found


def imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:  # not in this release of the library
        return None


def attribute(module: Any, name: str) -> Any:
    try:
        return getattr(module, name)
    except (AttributeError, RuntimeError):  # lazy modules list names that cannot be imported
        return None


def plain() -> Dict[str, Any]:
    return {"output_dir": tempfile.mkdtemp(), "use_cpu": True, "bf16": False}


def chosen(source: Dict[str, Any]) -> Dict[str, Any]:
    return {name: source[name] for name in CHOSEN}


def forms(cls: Any) -> Iterator[Tuple[str, Callable[[], Any]]]:
    """Name and maker of each form that `vars` of the arguments can go through and come back."""
    args = cls(**plain(), **CHOSEN)
    yield "itself", lambda: args
    yield "pickle", lambda: pickle.loads(pickle.dumps(args))
    yield "deepcopy", lambda: copy.deepcopy(args)
    yield "to_dict", lambda: cls(**plain(), **chosen(args.to_dict()))
    yield "to_json_string", lambda: cls(**plain(), **chosen(json.loads(args.to_json_string())))
    yield "replace", lambda: dataclasses.replace(args, output_dir=tempfile.mkdtemp())
    from transformers import HfArgumentParser

    own = attribute(importlib.import_module("trl"), "TrlParser")
    for parser in filter(None, (HfArgumentParser, own)):
        yield parser.__name__, lambda parser=parser: parsed(parser, cls)


def parsed(parser: Any, cls: Any, flags: Any = FLAGS) -> Any:
    given = ["--output_dir", tempfile.mkdtemp(), "--use_cpu", "--bf16", "False", *flags]
    return parser(cls).parse_args_into_dataclasses(given)[0]


def chosen_of(args: Any) -> Dict[str, Any]:
    return {name: getattr(args, name) for name in CHOSEN}


def outcome(make: Callable[[], Any]) -> str:
    try:
        args = make()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "kept" if chosen_of(args) == CHOSEN else f"found {chosen_of(args)}"


def outcome_without_the_options(cls: Any, form: str) -> str:
    """What stock makes of the forms that a class may not be able to take."""
    from transformers import HfArgumentParser

    try:
        if form == "replace":
            dataclasses.replace(cls(**plain()), output_dir=tempfile.mkdtemp())
        else:
            parsed(HfArgumentParser, cls, flags=[])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "kept"


if __name__ == "__main__":
    if sys.argv[1] == "after":
        shim.apply()
    declared = classes()
    made = {name: cls(**plain()) for name, cls in declared.items()}
    shim.apply()
    defaults = {name: chosen_of(pickle.loads(pickle.dumps(args))) for name, args in made.items()}
    found = {name: {form: outcome(make) for form, make in forms(cls)} for name, cls in declared.items()}
    shim.revert()
    stock = {
        name: {form: outcome_without_the_options(declared[name], form) for form in of if of[form] != "kept"}
        for name, of in found.items()
    }
    print(json.dumps({"shim": found, "stock": stock, "defaults": defaults}))

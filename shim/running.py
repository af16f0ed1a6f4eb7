"""Run a script or a module as `__main__`, with the shim applied: `python -m shim run`."""

from __future__ import annotations

import builtins
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import io
import os
import sys
from types import CodeType, FrameType, ModuleType, TracebackType
from typing import Any, Callable, List, Optional, Sequence

from shim import compat, patching


class CannotRunError(RuntimeError):
    """The script or module is not there, or cannot be compiled into a program. The message is one line."""


def run(target: str, arguments: List[str], is_module: bool, prepare: Callable[[], None]) -> None:
    """Run a program as Python itself would: sys.argv, sys.path, `__main__`, tracebacks and exit codes are the same.

    Args:
        target: the path of a script, or the name of a module.
        arguments: what the program finds in `sys.argv[1:]`.
        is_module: which of the two `target` is.
        prepare: called when the program has imported the Trainer, or the arguments, of transformers. Not before: the
            program may set environment variables first that these read.

    Raises:
        CannotRunError: there is no such program.
    """
    spec = _spec_of_module(target) if is_module else _spec_of_script(target)
    loader = spec.loader
    if not isinstance(loader, importlib.abc.InspectLoader):
        raise CannotRunError(f"{target} cannot be run: it is no Python source or byte code.")
    main = ModuleType("__main__")
    main.__dict__.update(
        __builtins__=builtins,
        __file__=spec.origin,
        __cached__=None,
        __loader__=loader,
        __package__=spec.parent if is_module else None,
        __spec__=spec if is_module else None,
    )
    if "__annotations__" in vars(sys.modules["__main__"]):  # Python below 3.14
        main.__annotations__ = {}
    sys.argv[:] = [spec.origin if is_module and spec.origin else target, *arguments]
    sys.modules["__main__"] = main
    sys.excepthook = _without_our_frames(sys.excepthook)
    if _AfterImport.awaited[0] in sys.modules:  # a .pth file may have imported it
        prepare()
    else:
        sys.meta_path.insert(0, _AfterImport(prepare))
    exec(_code(loader, spec, is_module), main.__dict__)


def _spec_of_script(path: str) -> importlib.machinery.ModuleSpec:
    if os.path.isdir(path):
        raise CannotRunError(f"{path} is a folder: name a script in it.")
    if not os.path.isfile(path):
        raise CannotRunError(f"there is no file {path} (in {os.getcwd()}).")
    if not _is_safe_path():
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    absolute = os.path.abspath(path)
    loader = importlib.machinery.SourceFileLoader("__main__", absolute)
    return importlib.machinery.ModuleSpec("__main__", loader, origin=absolute)


def _spec_of_module(name: str) -> importlib.machinery.ModuleSpec:
    for candidate in (name, f"{name}.__main__"):
        try:
            spec = importlib.util.find_spec(candidate)
        except (ImportError, ValueError) as error:
            raise CannotRunError(f"there is no module {candidate}: {error}.") from error
        if spec is None:
            break
        if spec.submodule_search_locations is None:
            return spec
    else:
        raise CannotRunError(f"{name}.__main__ is a package: it cannot be run.")
    if candidate != name:
        raise CannotRunError(f"the package {name} has no __main__: name a module in it.")
    raise CannotRunError(f"there is no module {name} (sys.path begins with {sys.path[0] or os.getcwd()}).")


def _code(loader: Any, spec: importlib.machinery.ModuleSpec, is_module: bool) -> CodeType:
    if is_module:
        code: Optional[CodeType] = loader.get_code(spec.name)
        if code is None:
            raise CannotRunError(f"{spec.name} has no code to run.")
        return code
    assert spec.origin is not None
    with io.open_code(spec.origin) as script:
        return compile(script.read(), spec.origin, "exec", dont_inherit=True)


def _is_safe_path() -> bool:
    return bool(getattr(sys.flags, "safe_path", False))  # Python 3.11 and later: -P


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function once, when one of these modules has been imported and the Trainer is not half imported."""

    awaited = ("transformers.training_args", "transformers.trainer")

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def find_spec(
        self, name: str, path: Optional[Sequence[str]], target: Optional[ModuleType] = None
    ) -> Optional[importlib.machinery.ModuleSpec]:
        if name not in self.awaited:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            self._follow(spec.loader)
        return spec

    def _follow(self, loader: Any) -> None:
        exec_module = loader.exec_module

        def and_then(module: ModuleType) -> None:
            exec_module(module)
            trainer = sys.modules.get("transformers.trainer")
            is_half_imported = trainer is not None and trainer is not module and _is_being_imported(trainer)
            if self in sys.meta_path and not is_half_imported:
                sys.meta_path.remove(self)
                self._call()

        loader.exec_module = and_then


def _is_being_imported(module: ModuleType) -> bool:
    return bool(getattr(module.__spec__, "_initializing", False))


def _without_our_frames(hook: Callable[..., Any]) -> Callable[..., Any]:
    """`hook`, which prints tracebacks, for ones that begin in the program."""

    def excepthook(kind: type, error: BaseException, traceback: Optional[TracebackType]) -> None:
        rest = traceback
        while rest is not None and _is_before_the_program(rest.tb_frame):
            rest = rest.tb_next
        if rest is None and not isinstance(error, SyntaxError):
            rest = traceback  # it is not the program's
        hook(kind, error.with_traceback(rest), rest)

    return excepthook


def _is_before_the_program(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") in ("runpy", __name__) or (
        frame.f_globals.get("__spec__") is not None and frame.f_globals["__spec__"].name == "shim.__main__"
    )


def apply_or_leave() -> None:
    """`shim.apply()`, and where transformers is not supported the end of the program: one line, and exit code 2."""
    try:
        patching.apply()
    except compat.UnsupportedVersionError as error:
        print(f"shim: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def spool_one_argument_metrics(directory: Optional[str]) -> None:
    """Let every Trainer that is made with a `compute_metrics` of one argument spool, and evaluate batch by batch.

    Args:
        directory: as for `shim.metrics.spool`.
    """
    from transformers.trainer import Trainer

    patching.Patch(Trainer, "__init__", functools.partial(_make_spooling_init, directory)).install()


def _make_spooling_init(directory: Optional[str], original: Callable[..., None], patch: Any) -> Callable[..., None]:
    names = list(inspect.signature(original).parameters)

    @functools.wraps(original)
    def __init__(self: Any, *positional: Any, **keywords: Any) -> None:
        from shim.metrics import spool

        given = {**dict(zip(names[1:], positional)), **keywords}
        compute_metrics = given.get("compute_metrics")
        if compute_metrics is None or "compute_result" in inspect.signature(compute_metrics).parameters:
            return original(self, *positional, **keywords)
        concatenate = getattr(given.get("args"), "eval_do_concat_batches", True)
        original(self, **{**given, "compute_metrics": spool(compute_metrics, directory, concatenate=concatenate)})
        self.args.batch_eval_metrics = True

    return __init__

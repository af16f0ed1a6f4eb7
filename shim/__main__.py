"""The command line: `python -m shim run | status | diff`."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any, List, NoReturn, Optional, Tuple

from packaging.version import InvalidVersion

import shim

_EXAMPLES = """\
examples:
  python -m shim run train.py --batch_eval_metrics --cuda_cache_clear eval
  python -m shim run --spool-metrics -m my_project.train
  torchrun --nproc_per_node 8 -m shim run train.py
  accelerate launch -m shim run train.py
  python -m shim status --json
  python -m shim diff | git -C path/to/transformers am
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, where argparse would add the usage."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m shim",
        description="batch_eval_metrics and cuda_cache_clear for transformers.Trainer, without editing a project.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="apply the shim and run a script or a module, as Python would")
    run.add_argument("-m", dest="is_module", action="store_true", help="TARGET is the name of a module")
    run.add_argument(
        "--spool-metrics",
        action="store_true",
        help="keep the logits on disk for every compute_metrics of one argument, and evaluate batch by batch",
    )
    run.add_argument("--spool-directory", metavar="DIR", help="where they are kept; implies --spool-metrics")
    run.add_argument("target", metavar="TARGET", help="a script; what follows are its own arguments")
    status = commands.add_parser("status", help="what is installed, what it lacks, and what is patched")
    status.add_argument("--json", action="store_true", help="for tools")
    diff = commands.add_parser("diff", help="the same as patches for transformers itself, ready for git am")
    diff.add_argument("--for", dest="release", metavar="VERSION", help="of transformers; default: the installed one")
    diff.add_argument("--list", action="store_true", help="only name the series and their patches")
    return parser


def _split(words: List[str]) -> Tuple[List[str], List[str]]:
    """What is for `run`, and what is for the program that it runs, to the letter."""
    if words[:1] != ["run"]:
        return words, []
    for index in range(1, len(words)):
        if not words[index].startswith("-") and words[index - 1] != "--spool-directory":
            return words[: index + 1], words[index + 1 :]
    return words, []


def _run(options: Any, arguments: List[str]) -> None:
    from shim import running

    spools = options.spool_metrics or options.spool_directory is not None
    if options.spool_directory is not None and not os.path.isdir(options.spool_directory):
        _fail(f"there is no folder {options.spool_directory} to spool to.")

    def prepare() -> None:
        running.apply_or_leave()
        if spools:
            running.spool_one_argument_metrics(options.spool_directory)

    try:
        running.run(options.target, arguments, options.is_module, prepare)
    except running.CannotRunError as error:
        _fail(str(error))


def _status(options: Any) -> None:
    with contextlib.suppress(ImportError):  # told by the status
        importlib.import_module("transformers.trainer")
    status = shim.status()
    print(json.dumps(status._asdict(), indent=2) if options.json else status)
    if status.problem is not None:
        sys.exit(2)


def _diff(options: Any) -> None:
    tool = _series_tool()
    if options.list:
        for series in [_series(tool, options.release)] if options.release else tool.known_series():
            print(series, *(f"  {patch.name}" for patch in series.patches()), sep="\n")
        return
    for patch in _series(tool, options.release).patches():
        sys.stdout.write(patch.read_text(encoding="utf-8"))


def _series(tool: Any, release: Optional[str]) -> Any:
    try:
        return tool.series_for(release or tool.installed_release())
    except importlib.metadata.PackageNotFoundError:
        _fail("transformers is not installed: name a release with --for.")
    except (tool.SeriesError, InvalidVersion) as error:
        _fail(str(error))


def _series_tool() -> Any:
    """patches/series.py: inside the package where that is a wheel's, beside it in a checkout."""
    package = Path(__file__).parent
    path = next(path for path in (package / "patches", package.parent / "patches") if path.is_dir()) / "series.py"
    spec = importlib.util.spec_from_file_location("shim._series", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _fail(message: str) -> NoReturn:
    print(f"shim: error: {message}", file=sys.stderr)
    sys.exit(2)


def main(words: Optional[List[str]] = None) -> None:
    """Run the command line; a mistake is one line on stderr, and exit code 2."""
    own, arguments = _split(sys.argv[1:] if words is None else words)
    options = _parser().parse_args(own)
    if options.command == "run":
        _run(options, arguments)
        return
    try:
        {"status": _status, "diff": _diff}[options.command](options)
        sys.stdout.flush()
    except BrokenPipeError:  # as `| head` leaves it; Python would complain once more when it flushes at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()

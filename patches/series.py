"""The upstream patches: which series belongs to which release, how it is applied, and how it is written.

`python -m patches.series --help` is the command line; README.md in this folder says when to use what.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from packaging.version import Version

FOLDER = Path(__file__).parent
PACKAGE = "src/transformers"
_PRISTINE = "pristine"
# What makes an export depend on the commits alone, and not on who makes it with which configuration
_FORMAT_PATCH = [
    "format-patch",
    "--zero-commit",
    "--no-signature",
    "--no-stat",
    "--no-numbered",
    "--full-index",
    "--quiet",
]
_ISOLATED = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull, "LC_ALL": "C"}
_COMMITTER = ["-c", "user.name=patches", "-c", "user.email=patches@localhost", "-c", "commit.gpgSign=false"]


class SeriesError(RuntimeError):
    """A series is missing, or cannot be applied or written. The message says what to do."""


@dataclass(frozen=True)
class Series:
    """One folder of patches.

    Args:
        name: the folder's name.
        first, last: the releases of transformers at the ends of the range that it applies to.
        sha256: for each of the two, the hash of every file that the series changes, as the wheel has it.
    """

    name: str
    first: str
    last: str
    sha256: Dict[str, Dict[str, str]]

    def __str__(self) -> str:
        return f"{self.name} ({self.first} to {self.last})" if self.first != self.last else f"{self.name} ({self.last})"

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    def patches(self) -> List[Path]:
        """The patches in the order in which they apply."""
        return [self.folder / name for name in (self.folder / "series").read_text().splitlines()]

    def covers(self, release: str) -> bool:
        return Version(self.first) <= Version(release) <= Version(self.last)

    def touched(self) -> List[str]:
        """The files of the wheel that the series changes, with their paths in upstream's repository."""
        return list(self.sha256[self.last])


@functools.cache
def known_series() -> Tuple[Series, ...]:
    """Every series, the oldest first, as targets.json has them: ranges, and the hashes at both ends of each."""
    targets = json.loads((FOLDER / "targets.json").read_text())
    return tuple(Series(name, **target) for name, target in targets.items())


def series_for(release: str) -> Series:
    """The series that applies to a release of transformers.

    Raises:
        SeriesError: there is none; the message lists those that exist.
    """
    for series in known_series():
        if series.covers(release):
            return series
    raise SeriesError(
        f"There are no patches for transformers {release}. Found series: {', '.join(map(str, known_series()))}. "
        "Take a release in one of these ranges, or add a series as patches/README.md says."
    )


def installed_release() -> str:
    return importlib.metadata.version("transformers")


def installed_package() -> Path:
    """Folder of the installed transformers, which is not imported."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        raise SeriesError("transformers is not installed: install the release that the patches are to be applied to.")
    return Path(spec.origin).parent


def check_out(series: Series, directory: Path, package: Optional[Path] = None) -> Path:
    """Make a git repository of the sources of a wheel, with the series applied to them, one commit a patch.

    Only the files that the series changes are copied and committed; the others are links into the package, so that
    the patched transformers can be imported.

    Args:
        series: what to apply.
        directory: the repository to make; it must not exist, or be empty.
        package: the folder of a transformers package; the installed one by default.

    Returns:
        The folder to put on `sys.path`.

    Raises:
        SeriesError: the folder is in use, or a patch does not apply (the message names patch, file and hunk).
    """
    package = package or installed_package()
    if directory.exists() and any(directory.iterdir()):
        raise SeriesError(f"{directory} is not empty: name a folder that does not exist yet.")
    target = directory / PACKAGE
    target.mkdir(parents=True)
    missing = [path for path in series.touched() if not _in_wheel(path, package).is_file()]
    if missing:
        raise SeriesError(f"{series} changes {', '.join(missing)}, which {package} does not have.")
    for entry in package.iterdir():
        if f"{PACKAGE}/{entry.name}" in series.touched():
            (target / entry.name).write_bytes(entry.read_bytes())
        elif entry.name != "__pycache__":
            (target / entry.name).symlink_to(entry, target_is_directory=entry.is_dir())
    _git(directory, "init", "--quiet")
    _git(directory, "add", *series.touched())
    _git(directory, "commit", "--quiet", "--message", f"Sources of {package}")
    _git(directory, "tag", _PRISTINE)
    _apply(series, directory)
    return target.parent


def _in_wheel(path: str, package: Path) -> Path:
    return package / Path(path).relative_to(PACKAGE)


def _apply(series: Series, repository: Path) -> None:
    for patch in series.patches():
        # No three-way merge and no option that would let a patch apply to something else than it was made for.
        done = _run_git(repository, "am", "--quiet", str(patch))
        if done.returncode:
            raise SeriesError(
                f"{patch.relative_to(FOLDER.parent)} does not apply. {_conflict(patch.read_text(), done.stderr)} "
                "Nothing after this patch was applied; refresh the series as patches/README.md says."
            )


def _conflict(patch: str, stderr: str) -> str:
    """Which hunk of which file `git am` has refused."""
    refused = re.search(r"^error: patch failed: (.+):(\d+)$", stderr, re.M)
    if refused is None:
        return f"git says: {' '.join(stderr.split())}."
    name, line = refused.groups()
    of_file = re.search(rf"^\+\+\+ b/{re.escape(name)}\n(.*?)(?=^diff --git |\Z)", patch, re.S | re.M)
    hunk = re.search(rf"^@@ -{line},.*", of_file.group(1), re.M) if of_file else None
    return f"{name}, hunk {hunk.group(0) if hunk else f'at line {line}'}: its context was not found."


def export(repository: Path, folder: Path) -> List[str]:
    """Write the commits since the pristine sources as a series.

    Args:
        repository: what `check_out` has made, perhaps with changed commits.
        folder: where the patches and the file `series` go; patches that are there are replaced.

    Returns:
        The patches' names, in order.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.patch"):
        old.unlink()
    _git(repository, *_FORMAT_PATCH, "--output-directory", str(folder.resolve()), _PRISTINE)
    names = sorted(patch.name for patch in folder.glob("*.patch"))
    (folder / "series").write_text("".join(f"{name}\n" for name in names))
    return names


def hashes(paths: List[str], package: Optional[Path] = None) -> Dict[str, str]:
    """sha256 of files of a transformers package; the installed one by default."""
    package = package or installed_package()
    return {path: hashlib.sha256(_in_wheel(path, package).read_bytes()).hexdigest() for path in paths}


def _git(repository: Path, *arguments: str) -> None:
    done = _run_git(repository, *arguments)
    if done.returncode:
        raise SeriesError(f"git {' '.join(arguments)} failed in {repository}: {done.stderr.strip()}")


def _run_git(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            ["git", *_COMMITTER, *arguments],
            cwd=repository,
            env={**os.environ, **_ISOLATED},
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError as error:
        raise SeriesError("The patches are applied with git, which is not installed.") from error


def _named(name: str) -> Series:
    for series in known_series():
        if series.name == name:
            return series
    raise SeriesError(f"There is no series {name!r}. Found: {', '.join(map(str, known_series()))}.")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m patches.series", description="The patches for transformers.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("list", help="every series and the releases that it applies to")
    command = commands.add_parser("checkout", help="git repository of the installed sources with their series applied")
    command.add_argument("directory", type=Path, metavar="DIRECTORY")
    command.add_argument("--series", metavar="NAME", help="apply this one, whatever the installed release is")
    command = commands.add_parser("export", help="write the commits of such a repository as a series")
    command.add_argument("directory", type=Path, metavar="DIRECTORY")
    command.add_argument("name", metavar="NAME", help="name of the series, such as transformers-5.24")
    command = commands.add_parser("hashes", help="the installed sources' hashes, as targets.json has them")
    command.add_argument("--series", metavar="NAME", help="the files that this one touches")
    return parser


def _run(options: Any) -> str:
    if options.command == "list":
        return "\n".join(map(str, known_series()))
    if options.command == "export":
        return "\n".join(export(options.directory, FOLDER / options.name))
    series = _named(options.series) if options.series else series_for(installed_release())
    if options.command == "checkout":
        return f"{series} applied: put {check_out(series, options.directory)} on PYTHONPATH to use it"
    digests = {installed_release(): hashes(series.touched())}
    return json.dumps(digests, indent=2)


def main(arguments: Optional[List[str]] = None) -> int:
    """Run the command line; a problem is one line on stderr, and 2."""
    try:
        print(_run(_parser().parse_args(arguments)))
    except SeriesError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

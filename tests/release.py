"""Build the wheel and the sdist, and use both as a stranger does: in an environment and a folder that know no checkout.

    tox run -e release                the wheel, the install command of the README, and the quick tests from the sdist
    tox run -e release -- tests       with the whole test suite from the sdist

The distributions are left in build/dist.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any, List

from tests.sweep import PYTHON, lanes, requirements_for

ROOT = Path(__file__).parents[1]
BUILT = ROOT / "build" / "dist"
RELEASE = "4.57.6"  # of transformers: one with a series of patches
CHECKOUT = "path/to/this/checkout"


def run(*command: Any, cwd: Path, **environment: str) -> str:
    """What a command prints; ends this program where it fails."""
    words = [str(word) for word in command]
    print("+", " ".join(words), flush=True)
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(words, cwd=cwd, env={**outside, **environment}, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout[-6000:]}{done.stderr[-6000:]}\nexit code {done.returncode} of {' '.join(words)}")
    return done.stdout


def require(holds: bool, problem: str) -> None:
    if not holds:
        sys.exit(problem)


def built() -> List[Path]:
    """The sdist, and the wheel made from it."""
    shutil.rmtree(BUILT, ignore_errors=True)
    run(sys.executable, "-m", "build", "--installer", "uv", "--outdir", BUILT, ROOT, cwd=ROOT)
    (sdist,), (wheel,) = BUILT.glob("*.tar.gz"), BUILT.glob("*.whl")
    run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel, cwd=ROOT)
    return [sdist, wheel]


def check_contents(sdist: Path, wheel: Path) -> None:
    """Every tracked file is in the sdist; the package, its patches and nothing else are in the wheel."""
    tracked = run("git", "ls-files", cwd=ROOT).split("\n")[:-1] if (ROOT / ".git").exists() else []
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    require(set(tracked) <= packed, f"The sdist lacks {sorted(set(tracked) - packed)}.")
    names = zipfile.ZipFile(wheel).namelist()
    require("shim/py.typed" in names, "The wheel has no shim/py.typed: its types would be unknown to type checkers.")
    patches = {f"shim/{path.relative_to(ROOT)}" for path in (ROOT / "patches").rglob("*") if path.suffix == ".patch"}
    require(patches <= set(names), f"The wheel lacks {sorted(patches - set(names))}.")
    strangers = [name for name in names if not re.match(r"shim/|transformers_trainer_shim-[\d.]+\.dist-info/", name)]
    require(not strangers, f"The wheel has {strangers}, which would be installed beside the shim.")


def environment(folder: Path, *requirements: Any) -> Path:
    """Python of a new environment, with pip."""
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    run("uv", "venv", "--quiet", "--seed", "--python", PYTHON, folder, cwd=folder.parent)
    run("uv", "pip", "install", "--quiet", "--python", python, *requirements, cwd=folder.parent)
    return python


def check_wheel(wheel: Path, python: Path, folder: Path) -> None:
    run("uv", "pip", "install", "--quiet", "--python", python, wheel, cwd=folder)
    status = json.loads(run(python, "-m", "shim", "status", "--json", cwd=folder))
    require(status["transformers"] == RELEASE and status["tested"], f"python -m shim status says {status}.")
    require(RELEASE in run(python, "-m", "shim", "status", cwd=folder), "python -m shim status says nothing of it.")
    diff = run(python, "-m", "shim", "diff", cwd=folder)
    for options in ([], ["--for", "4.39.3"], ["--list"]):
        here = run(sys.executable, "-m", "shim", "diff", *(options or ["--for", RELEASE]), cwd=ROOT)
        there = run(python, "-m", "shim", "diff", *options, cwd=folder)
        require(there == here, f"python -m shim diff {' '.join(options)} is not that of the checkout.")
    require(diff.count("\nSubject: ") > 1, "python -m shim diff printed no series of patches.")
    (folder / "typed.py").write_text("import shim\n\nshim.apply(strict='yes')\n")
    run("uv", "pip", "install", "--quiet", "--python", python, "mypy", cwd=folder)
    checked = subprocess.run(
        [python, "-m", "mypy", "typed.py"], cwd=folder, capture_output=True, text=True, check=False
    )
    require('expected "bool"' in checked.stdout, f"mypy sees no types of the installed shim: {checked.stdout}")


def check_install_command(python: Path, folder: Path) -> None:
    """The command of the README, in a project that has transformers: it changes no version."""
    (command,) = re.findall(rf"^(pip install {CHECKOUT})$", (ROOT / "README.md").read_text(), re.M)
    run("uv", "pip", "uninstall", "--quiet", "--python", python, "transformers-trainer-shim", cwd=folder)
    before = run(python, "-m", "pip", "freeze", cwd=folder).splitlines()
    for what in (ROOT, f"{ROOT}[torchmetrics]"):
        run(python, "-m", *command.replace(CHECKOUT, str(what)).split(), cwd=folder)
    after = run(python, "-m", "pip", "freeze", cwd=folder).splitlines()
    require(set(before) <= set(after), f"Installing the shim has changed {sorted(set(before) - set(after))}.")
    run(python, "-c", "import shim, shim.metrics; shim.apply()", cwd=folder)


def check_sdist(sdist: Path, python: Path, folder: Path, tests: List[str]) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    unpacked = folder / sdist.name[: -len(".tar.gz")]
    options = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    print(run(python, "-m", "pytest", *tests, "-p", "no:warnings", cwd=unpacked, **options).strip().splitlines()[-1])


def main(tests: List[str]) -> None:
    sdist, wheel = built()
    check_contents(sdist, wheel)
    beside = requirements_for(RELEASE, lanes((ROOT / "tox.ini").read_text()))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = environment(folder / "clean", *(name for name in beside if re.match("(transformers|torch)[=>]", name)))
        check_wheel(wheel, python, folder)
        check_install_command(python, folder)
        check_sdist(sdist, environment(folder / "tests", *beside), folder, tests)
    print(f"{sdist.name} and {wheel.name} are ready in {BUILT.relative_to(ROOT)}.")


if __name__ == "__main__":
    require(sys.version_info >= (3, 11), "tests/release.py needs Python 3.11: tarfile's filters came with 3.11.4.")
    main(sys.argv[1:])

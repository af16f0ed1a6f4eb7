"""Lint of patches/: what is on disk agrees with itself, and with the form in which a maintainer gets it."""

from __future__ import annotations

import email
import re
from datetime import date
from email.message import Message
from pathlib import Path
from typing import Dict, List, Tuple

import pytest
from packaging.version import Version

from patches import series as patches
from patches.series import FOLDER, PACKAGE, Series, SeriesError, known_series, series_for

SERIES = [pytest.param(series, id=series.name) for series in known_series()]
PATCHES = [
    pytest.param(patch, id=f"{series.name}/{patch.name[:4]}") for series in known_series() for patch in series.patches()
]
DEP3 = ("Description", "Origin", "Bug", "Forwarded", "Applied-Upstream", "Last-Update")
NEW_FILE = "/dev/null"


def parts(patch: Path) -> Tuple[Message, str, str]:
    """Its mail headers, commit message and diff."""
    mail = email.message_from_string(patch.read_text())
    message, diff = re.split(r"^(?=diff --git )", mail.get_payload(), maxsplit=1, flags=re.M)
    return mail, message, diff


def fields(message: str) -> Dict[str, List[str]]:
    """The DEP-3 fields, which are the last paragraph of the commit message."""
    found: Dict[str, List[str]] = {}
    for line in message.rstrip().split("\n\n")[-1].splitlines():
        name, _, value = line.partition(": ")
        found.setdefault(name, []).append(value)
    return found


def touched(diff: str) -> List[Tuple[str, str]]:
    """(old name, new name) of each file in a diff; the old name of a new file is /dev/null."""
    return re.findall(r"^--- (?:a/)?(\S+)\n\+\+\+ (?:b/)?(\S+)$", diff, re.M)


def added_lines(diff: str) -> List[str]:
    return re.findall(r"^\+(?!\+\+ )(.*)$", diff, re.M)


def test_every_folder_has_a_target_and_every_target_a_folder():
    assert {series.name for series in known_series()} == {folder.name for folder in FOLDER.glob("transformers-*")}


@pytest.mark.parametrize("series", SERIES)
def test_the_file_series_names_the_patches_of_the_folder_in_order(series):
    names = [patch.name for patch in series.patches()]
    assert names == sorted(patch.name for patch in series.folder.glob("*.patch"))
    assert [int(name[:4]) for name in names] == list(range(1, len(names) + 1))
    assert {path.name for path in series.folder.iterdir()} == {*names, "series"}


@pytest.mark.parametrize("series", SERIES)
def test_the_range_of_a_series_is_one_minor_release_and_has_the_hashes_of_its_ends(series):
    first, last = Version(series.first), Version(series.last)
    assert first <= last
    assert first.release[:2] == last.release[:2]
    assert series.name == f"transformers-{first.major}.{first.minor}"
    assert list(series.sha256) == list(dict.fromkeys([series.first, series.last]))
    for hashes in series.sha256.values():
        assert list(hashes) == series.touched()
        assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in hashes.values())


@pytest.mark.parametrize("series", SERIES)
def test_the_hashes_are_those_of_the_files_that_the_series_changes(series):
    changed = {new for patch in series.patches() for old, new in touched(parts(patch)[2]) if old != NEW_FILE}
    assert changed == set(series.touched())


@pytest.mark.parametrize("patch", PATCHES)
def test_a_patch_changes_files_of_the_wheel_or_adds_a_test(patch):
    for old, new in touched(parts(patch)[2]):
        assert old in (new, NEW_FILE)
        assert new.startswith("tests/" if old == NEW_FILE else f"{PACKAGE}/")


@pytest.mark.parametrize("patch", PATCHES)
def test_the_headers_are_complete(patch):
    mail, message, _ = parts(patch)
    assert mail["From"]
    assert mail["Date"]
    subject = re.sub(r"^\[PATCH\] |\n", "", mail["Subject"])
    assert 10 < len(subject) <= 64
    assert not subject.endswith(".")
    found = fields(message)
    assert tuple(found) == DEP3
    assert all(value.strip() for values in found.values() for value in values)
    assert all(re.match(r"https://github\.com/huggingface/\w+/(issues|pull)/\d+$", url) for url in found["Bug"])
    assert re.match(r"no$|https://", found["Forwarded"][0])
    assert date.fromisoformat(found["Last-Update"][0]) <= date.today()


@pytest.mark.parametrize("patch", PATCHES)
def test_the_message_tells_the_problem_the_change_and_how_it_was_tested(patch):
    _, message, _ = parts(patch)
    *paragraphs, _ = message.strip().split("\n\n")
    assert len(paragraphs) >= 2
    assert paragraphs[-1].startswith("Tested")
    assert all(len(line) <= 72 for paragraph in paragraphs for line in paragraph.splitlines())


@pytest.mark.parametrize("patch", PATCHES)
def test_added_lines_have_no_trailing_blanks_and_the_width_of_upstream(patch):
    for line in added_lines(parts(patch)[2]):
        assert line == line.rstrip()
        assert "\t" not in line
        assert len(line) <= 119


class TestErrors:
    def test_a_release_without_a_series_is_told_which_there_are(self):
        with pytest.raises(SeriesError, match=r"no patches for transformers 4\.42\.4.*4\.39\.0 to 4\.39\.3.*5\.24"):
            series_for("4.42.4")

    def test_every_release_of_a_range_has_its_series(self):
        assert series_for("4.39.2").name == series_for("4.39.0").name == "transformers-4.39"
        assert series_for("5.24.0").name == "transformers-5.24"

    def test_the_command_line_answers_in_one_line_and_with_2(self, capsys, monkeypatch):
        monkeypatch.setattr(patches, "installed_release", lambda: "4.38.2")
        assert patches.main(["checkout", "somewhere"]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("error: There are no patches for transformers 4.38.2.")
        assert err.count("\n") == 1
        assert patches.main(["hashes", "--series", "transformers-1.0"]) == 2
        assert "There is no series 'transformers-1.0'. Found: transformers-4.39" in capsys.readouterr().err

    def test_a_series_that_no_longer_applies_names_patch_file_and_hunk(self, tmp_path, monkeypatch):
        monkeypatch.setattr(patches, "FOLDER", tmp_path)
        series, package = a_series(tmp_path)
        (package / "trainer.py").write_text("nothing\nof\nthis\n")
        with pytest.raises(
            SeriesError,
            match=r"transformers-9\.9/0001-Change-two\.patch does not apply\. "
            r"src/transformers/trainer\.py, hunk @@ -1,3 \+1,3 @@: its context was not found",
        ):
            patches.check_out(series, tmp_path / "again", package)

    def test_a_file_that_is_gone_is_named(self, tmp_path, monkeypatch):
        monkeypatch.setattr(patches, "FOLDER", tmp_path)
        series, package = a_series(tmp_path)
        (package / "trainer.py").unlink()
        with pytest.raises(SeriesError, match=r"changes src/transformers/trainer\.py, which .* does not have"):
            patches.check_out(series, tmp_path / "again", package)

    def test_a_folder_in_use_is_left_alone(self, tmp_path, monkeypatch):
        monkeypatch.setattr(patches, "FOLDER", tmp_path)
        series, package = a_series(tmp_path)
        with pytest.raises(SeriesError, match="is not empty: name a folder that does not exist yet"):
            patches.check_out(series, tmp_path / "repository", package)

    def test_a_machine_without_git_is_told(self, tmp_path, monkeypatch):
        monkeypatch.setattr(patches, "FOLDER", tmp_path)
        series, package = a_series(tmp_path)
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(SeriesError, match="applied with git, which is not installed"):
            patches.check_out(series, tmp_path / "again", package)


def a_series(folder: Path) -> Tuple[Series, Path]:
    """A series of one patch, and the package that it was made for."""
    package = folder / "package"
    package.mkdir()
    (package / "trainer.py").write_text("one\ntwo\nthree\n")
    series = Series("transformers-9.9", "9.9.0", "9.9.0", {"9.9.0": {f"{PACKAGE}/trainer.py": ""}})
    series.folder.mkdir()
    (series.folder / "series").write_text("")
    repository = folder / "repository"
    patches.check_out(series, repository, package)
    (repository / PACKAGE / "trainer.py").write_text("one\nTWO\nthree\n")
    patches._git(repository, "commit", "--all", "--quiet", "--message", "Change two")
    assert patches.export(repository, series.folder) == ["0001-Change-two.patch"]
    return series, package

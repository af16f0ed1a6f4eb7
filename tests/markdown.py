"""What is made in a page that is otherwise written by hand."""

from __future__ import annotations

END = "<!-- end of what is made -->"


def with_made(text: str, begin: str, made: str) -> str:
    """`text` with what stands between the mark `begin` and the next `END` replaced.

    Raises:
        ValueError: the marks are not there.
    """
    before, mark, rest = text.partition(begin)
    _, end, after = rest.partition(END)
    if not (mark and end):
        raise ValueError(f"expected the marks {begin!r} and {END!r}, found {'only the first' if mark else 'neither'}")
    return f"{before}{begin}\n\n{made}\n\n{END}{after}"

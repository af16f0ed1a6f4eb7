"""An attribute of one object that stands in for the real one while a function of upstream's runs."""

from __future__ import annotations

from typing import Any

_ABSENT: Any = object()


class Shadow:
    """Shadow `owner.name` by an instance attribute and later put back exactly what was there.

    Args:
        owner: the object whose attribute is shadowed; its class is left alone.
        name: the attribute's name.
        value: what stands in for it.

    `take_off` gives back only what is still ours: an attribute that somebody else has replaced since stays theirs.
    """

    __slots__ = ("_name", "_namespace", "_saved", "_value")

    def __init__(self, owner: Any, name: str, value: Any) -> None:
        self._namespace = vars(owner)
        self._name = name
        self._value = value
        self._saved = _ABSENT

    def put_on(self) -> None:
        self._saved = self._namespace.get(self._name, _ABSENT)
        self._namespace[self._name] = self._value

    def take_off(self) -> None:
        if self._namespace.get(self._name, _ABSENT) is not self._value:
            return
        if self._saved is _ABSENT:
            del self._namespace[self._name]
        else:
            self._namespace[self._name] = self._saved

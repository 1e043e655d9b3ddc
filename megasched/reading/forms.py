"""Compares parsed data with a form, which says how they must look and is written like an example of them.

A form is a type or a union of types; ``[form]``, a list of such; ``{str: form}``, an object of any keys; or
``{"key": form, "other?": form}``, an object with these keys at least, those with ``?`` if they are there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import UnionType
from typing import Any

from megasched.reading.files import printable

DEEPEST = 100  # of nested lists and objects; what recurses over them has some frames a level
_WORDS = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}
_WORDS[type(None)] = "null"


def misfit(value: Any, form: Any, where: str = "") -> str:
    """Says where data first have another form, what is there and what is due; empty where they fit."""
    match form:
        case list():
            if not isinstance(value, list):
                return _differs(value, list, where)
            parts = ((item, form[0], f"{where}[{index}]") for index, item in enumerate(value))
        case dict():
            if not isinstance(value, dict):
                return _differs(value, dict, where)
            parts = _of_object(value, form, where)
        case _:
            return "" if _is(value, form) else _differs(value, form, where)
    return next((found for part in parts if (found := misfit(*part))), "")


def misfit_of_field(value: dict[str, Any], key: str, form: Any) -> str:
    """Says what ``misfit`` does of one field, whatever its name: one that ends with ``?`` must be there, too."""
    return misfit(value.get(key, _MISSING), form, joined("", key))


def _of_object(value: dict[str, Any], form: dict[Any, Any], where: str) -> Iterator[tuple[Any, Any, str]]:
    for key, inner in form.items():
        if key is str:
            yield from ((item, inner, joined(where, name)) for name, item in value.items())
        elif key.removesuffix("?") in value:
            name = key.removesuffix("?")
            yield value[name], inner, joined(where, name)
        elif not key.endswith("?"):
            yield _MISSING, inner, joined(where, key)


def joined(where: str, name: str) -> str:
    """Names the place of a field in the object at ``where``."""
    shown = printable(name[:80])
    return f"{where}.{shown}" if where else shown


class _Missing:
    def __repr__(self) -> str:
        return "missing"


_MISSING = _Missing()


def _is(value: Any, form: Any) -> bool:
    if isinstance(form, UnionType):
        return any(_is(value, one) for one in form.__args__)
    if form is object:
        return value is not _MISSING
    if form is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is form


def _differs(value: Any, form: Any, where: str) -> str:
    forms = form.__args__ if isinstance(form, UnionType) else (form,)
    wanted = " or ".join(_WORDS.get(one, "a value") for one in forms)
    found = repr(value) if not isinstance(value, list | dict) else _WORDS[type(value)]
    return f"{where or 'the whole'} is {found:.60}, {wanted} is due"


def unsound(value: Any) -> str:
    """Says what no form lets through: nested too deep, or text that has no bytes in UTF-8."""
    level, depth = [("", value)], 0
    while level:
        depth += 1
        below: list[tuple[str, Any]] = []
        for where, item in level:
            children = (
                ((joined(where, str(name)), inner, name) for name, inner in item.items())
                if isinstance(item, dict)
                else ((f"{where}[{index}]", inner, "") for index, inner in enumerate(item))
                if isinstance(item, list)
                else [(where, item, "")]
            )
            for place, inner, name in children:
                if isinstance(inner, dict | list):
                    below.append((place, inner))
                for text in (name, inner):
                    if isinstance(text, str) and (why := _no_utf8(text)):
                        return f"{place or 'the whole'}: {why}"
        if below and depth >= DEEPEST:
            return f"{below[0][0]:.80}: nested more than {DEEPEST} levels deep"
        level = below
    return ""


def unsound_text(text: str) -> str:
    """Says why text can be no argument and no variable of a program; empty if it can."""
    return f"{text!r:.60} has a NUL in it" if "\0" in text else _no_utf8(text)


def _no_utf8(text: str) -> str:
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        return f"{text!r:.60} has half a surrogate pair in it, which is no text in UTF-8"
    return ""

"""What every configuration shares: the wording of a refusal, and the dictionary form."""

from __future__ import annotations

import dataclasses
import difflib
import sys
from typing import Any, ClassVar, Self

import numpy as np

LARGEST = sys.float_info.max


class Checked:
    """Base of the configurations. `_nested` names the fields that are configurations themselves."""

    _nested: ClassVar[dict[str, type[Checked]]] = {}

    def __new__(cls, *_: Any, **fields: Any) -> Self:
        """Refuse a field that there is not, with the near one and those that there are: a dataclass names neither."""
        known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        for name in fields:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                raise TypeError(f"{cls.__name__} has no field {name!r}{hint}; its fields are {', '.join(known)}")
        return super().__new__(cls)

    def _unwrap(self) -> None:
        """NumPy's scalars become Python's, which JSON, hashes and comparisons of what was read from a file know."""
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            object.__setattr__(self, field.name, _python(getattr(self, field.name)))

    def _fail(self, field: str, expected: str, exception: type[Exception] = ValueError) -> None:
        came = getattr(self, field)
        raise exception(f"{type(self).__name__}.{field} must be {expected}; got {came!r}")

    def _integer(self, field: str, least: int, *, optional: bool = False) -> None:
        value = getattr(self, field)
        if optional and value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int):
            self._fail(field, f"an integer of at least {least}" + (" or None" if optional else ""), TypeError)
        if value < least:
            self._fail(field, f"an integer of at least {least}" + (" or None" if optional else ""))

    def _number(
        self,
        field: str,
        *,
        above: float | None = None,
        least: float | None = None,
        below: float | None = None,
        most: float | None = None,
        optional: bool = False,
    ) -> None:
        value = getattr(self, field)
        if optional and value is None:
            return
        bounds = [
            f"{word} {bound:g}"
            for word, bound in (("above", above), ("at least", least), ("below", below), ("at most", most))
            if bound is not None
        ]
        expected = " ".join(["a finite number", " and ".join(bounds)]).strip() + (" or None" if optional else "")
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._fail(field, expected, TypeError)
        if not -LARGEST <= value <= LARGEST:  # NaN too, and integers past every float
            self._fail(field, expected)
        outside = (
            (above is not None and not value > above)
            or (least is not None and not value >= least)
            or (below is not None and not value < below)
            or (most is not None and not value <= most)
        )
        if outside:
            self._fail(field, expected)

    def _flag(self, field: str, *, optional: bool = False) -> None:
        value = getattr(self, field)
        if not isinstance(value, bool) and not (optional and value is None):
            self._fail(field, "True, False or None" if optional else "True or False", TypeError)

    def _choice(self, field: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, field)
        if not isinstance(value, str) or value not in choices:
            near = difflib.get_close_matches(value, choices, n=1) if isinstance(value, str) else []
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            self._fail(field, "one of " + ", ".join(map(repr, choices)) + hint)

    def _window(self, field: str, value: object) -> None:
        if value is None:
            return
        pair = value if isinstance(value, tuple) else ()
        if len(pair) != 2 or any(
            side is not None and (isinstance(side, bool) or not isinstance(side, int)) for side in pair
        ):
            self._fail(field, "None or (left, right), each a non-negative integer or None for unbounded", TypeError)
        if any(side is not None and side < 0 for side in pair):
            self._fail(field, "None or (left, right), each a non-negative integer or None for unbounded")

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON types (tuples become lists); `from_dict` gives an equal object back."""
        return {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}  # type: ignore[arg-type]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Build from what `to_dict` gave. A field that this class does not have is an error, never ignored."""
        if not isinstance(values, dict):
            raise TypeError(f"{cls.__name__}.from_dict expects a dict; got {type(values).__name__}")
        known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(
                f"{cls.__name__} has no field {', '.join(map(repr, unknown))}; its fields are {', '.join(known)}"
            )
        fields = {name: _tuples(value) for name, value in values.items()}
        for name, nested in cls._nested.items():
            if isinstance(fields.get(name), dict):
                fields[name] = nested.from_dict(fields[name])
        return cls(**fields)

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, checked again."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]


def _python(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_python(item) for item in value)
    if isinstance(value, dict):
        return {key: _python(item) for key, item in value.items()}
    return value.item() if isinstance(value, np.generic) else value


def _plain(value: Any) -> Any:
    if isinstance(value, Checked):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list | tuple) else value


def positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= LARGEST


def fraction(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1

"""Check of a template's path, such as `.order.id`, against the annotation of its parameter."""

from __future__ import annotations

import dataclasses
from inspect import isabstract
from types import UnionType
from typing import Any, cast, get_origin

from idemgate.core.validation import type_hints

__all__ = ["find_missing_step"]

Path = tuple[tuple[bool, str | int], ...]


def find_missing_step(hint: Any, path: Path) -> str | None:
    """Return what is missing in a path, as text for an error; None if the annotations do not rule the path out.

    Only types whose fields are declared can rule a path out: TypedDict, dataclasses, models of pydantic, named tuples,
    and classes without an instance `__dict__`, such as `Delivery` and `str`.

    Args:
        hint: The annotation of the parameter.
        path: The steps as (is a member, key or attribute).
    """
    for is_member, step in path:
        hint = get_origin(hint) or hint
        if not isinstance(hint, type) or hint is UnionType:
            return None
        is_typed_dict = hasattr(hint, "__required_keys__")
        if is_member:
            names = type_hints(hint) if is_typed_dict else {}
            if names and step not in names:
                return f"{hint.__name__} has no member [{step}]"
        else:
            declared = {} if is_typed_dict else _declared_attributes(hint)
            if declared is None:
                return None
            names = declared
            if step not in names and not hasattr(dict if is_typed_dict else hint, str(step)):
                return f"{hint.__name__} has no attribute .{step}"
        hint = names.get(str(step))
    return None


def _declared_attributes(kind: type) -> dict[str, Any] | None:
    """Return the declared attributes and their annotations; None if instances may have others."""
    if (fields := getattr(kind, "model_fields", None)) is not None:  # a model of pydantic
        allows_more = getattr(kind, "model_config", {}).get("extra") == "allow"
        return None if allows_more else {name: field.annotation for name, field in fields.items()}
    if hasattr(kind, "__getattr__") or isabstract(kind):
        return None
    if dataclasses.is_dataclass(kind):
        return dict.fromkeys(field.name for field in dataclasses.fields(kind)) | type_hints(kind)
    # Without an instance __dict__ every attribute is one of the class.
    has_dict = cast(Any, kind).__dictoffset__ != 0
    return type_hints(kind) if not has_dict and kind is not object else None

"""JSON has no NaN and no infinity; a figure that isn't known must still be reported."""

from __future__ import annotations

import dataclasses
import math
from typing import Any


def as_json(value: Any) -> Any:
    """``value`` with dataclasses as objects, tuples as lists, and null for what is not finite."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return as_json(dataclasses.asdict(value))
    match value:
        case float():
            return value if math.isfinite(value) else None
        case list() | tuple():
            return [as_json(each) for each in value]
        case dict():
            return {key: as_json(each) for key, each in value.items()}
    return value

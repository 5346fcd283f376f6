"""A store that is no more than what a ring asks of one."""

from __future__ import annotations


class DictStore:
    """The three methods, over a dictionary of this process."""

    def __init__(self, **values: bytes) -> None:
        self.values = dict(values)

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

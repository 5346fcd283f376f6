"""``python -m ring_reduce`` is ``ring-reduce``."""

from __future__ import annotations

from ring_reduce.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

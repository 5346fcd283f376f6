"""A timeline of the ring: what every lane of every rank did when, as a file for Perfetto. See docs/profiling.md.

On each rank::

    with Recorder(ring) as recorder:
        ring.all_reduce(x)
    recorder.trace

and, with the traces of all ranks in one place, ``write(path, traces)`` and ``summarize(traces)``.
"""

from __future__ import annotations

from .chrome import chrome_trace, write
from .recorder import Event, LaneEvents, RankTrace, Recorder, Span, Track
from .summary import RankSummary, held_up_by, summarize

__all__ = [
    "Event",
    "LaneEvents",
    "RankSummary",
    "RankTrace",
    "Recorder",
    "Span",
    "Track",
    "chrome_trace",
    "held_up_by",
    "summarize",
    "write",
]

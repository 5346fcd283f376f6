"""What a rank tells of an episode, and where: files, which outlive a rank that is killed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ring_reduce.probe import DirectoryStore

_END = "end"  # a file in the folder of a run

WORD_S = 600.0  # longer than the judge waits for any rank


@dataclass
class Outcome:
    """One rank's episode. Times are of CLOCK_MONOTONIC, which all processes of a host share."""

    rank: int
    calls: int = 0  # those that this rank counts: where it is the first member
    nbytes: int = 0  # of the tensors of these
    digests: list[int] = field(default_factory=list)  # of the checked calls, 0 where there is none to compare
    problems: list[str] = field(default_factory=list)
    error: str = ""  # the class of what ended the calls
    text: str = ""
    heard_at: float = 0.0  # when the last of the calls in flight had failed
    # Of the victim: when it struck. Of others: when they began to make the calls that had to fail.
    fault_at: float = 0.0


def folder_of(folder: str, episode: int) -> Path:
    """Where ranks and judge leave word of an episode."""
    return Path(folder) / str(episode)


def store_of(folder: str, episode: int) -> DirectoryStore:
    """The same as a store, in which the rings of the episode meet too."""
    return DirectoryStore(folder_of(folder, episode), timeout=WORD_S)


def say_here(store: DirectoryStore, rank: int) -> None:
    """A rank begins an episode."""
    store.set(f"here {rank}", b"")


def is_at(folder: str, episode: int, rank: int) -> bool:
    """Whether a rank has begun an episode."""
    return store_of(folder, episode).check([f"here {rank}"])


def end(folder: str) -> None:
    """No rank is to go on."""
    (Path(folder) / _END).touch()


def has_ended(folder: str) -> bool:
    """Whether :func:`end` was called."""
    return (Path(folder) / _END).exists()


def tell(store: DirectoryStore, outcome: Outcome) -> None:
    """For the judge."""
    store.set(f"outcome {outcome.rank}", json.dumps(asdict(outcome)))


def told(store: DirectoryStore, rank: int) -> Outcome | None:
    """What a rank told; None so far."""
    key = f"outcome {rank}"
    return Outcome(**json.loads(store.get(key))) if store.check([key]) else None

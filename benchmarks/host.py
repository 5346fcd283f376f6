"""The figures' machine: its processor and versions, not its name."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

from ring_reduce.machine import granted_cores

KB, MB = 1 << 10, 1 << 20


def machine() -> dict[str, Any]:
    """What a figure must be read with."""
    import torch

    cores = granted_cores()
    return {
        "processor": processor_name(),
        "cores": int(cores) if cores == int(cores) else round(cores, 2),
        "last_level_cache_bytes": last_level_cache_bytes(),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        **({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}),
    }


def processor_name() -> str:
    """The processor's model, or at least its architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def last_level_cache_bytes(default: int = 32 * MB) -> int:
    """The size of core 0's largest cache, or ``default`` where the system doesn't tell (some containers)."""
    units = {"K": KB, "M": MB, "G": KB * MB}
    found = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        if text[:-1].isdigit() and text[-1] in units:
            found.append(int(text[:-1]) * units[text[-1]])
    return max(found, default=default)

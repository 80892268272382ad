"""Resident memory of this process: now, and at its most since a mark."""

import re
import sys
from pathlib import Path

import psutil

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # man 5 proc_pid_clear_refs


def resident_bytes() -> int:
    """Return the bytes of memory that this process holds now."""
    return int(psutil.Process().memory_info().rss)


def reset_peak() -> bool:
    """Begin to count the peak anew; False where the system has no way to."""
    try:
        CLEAR.write_text(RESET_PEAK)
    except OSError:
        return False
    return True


def peak_bytes() -> int:
    """Return the most bytes that were resident, since `reset_peak` or else since the start.

    Not ru_maxrss where there is anything else: on Linux a process inherits that from its parent.
    """
    if STATUS.exists() and (found := re.search(r"VmHWM:\s+(\d+) kB", STATUS.read_text())):
        return int(found[1]) * 1024
    on_windows = getattr(psutil.Process().memory_info(), "peak_wset", None)
    if on_windows is not None:
        return int(on_windows)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

"""Numbers of parameters and bytes in few characters."""

from __future__ import annotations

# Of a value in the arithmetic that training runs in.
BYTES_16_BITS = 2


def format_count(count: int) -> str:
    """``8.03 B``, ``124.4 M``, ``61,440``."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if count >= size:
            value = count / size
            return f"{value:.2f} {unit}" if value < 10 else f"{value:.1f} {unit}"
    return f"{count:,}"


def format_bytes(count: float) -> str:
    """``1.50 GiB``, ``12.0 MiB``, ``512 B``."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            value = count / size
            return f"{value:.2f} {unit}" if value < 10 else f"{value:.1f} {unit}"
    return f"{count:.0f} B"

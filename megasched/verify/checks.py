"""One thing that was compared, and what it had to be within."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Check:
    """One thing that was compared.

    Attributes:
        name: what.
        error: the largest, relative; None where it is not a matter of size.
        tolerance: that it had to be within.
        worst: where it was largest.
        equal: whether it is within the tolerance, or no further from float64 than rounding explains.
    """

    name: str
    error: float | None
    tolerance: float
    worst: str = ""
    equal: bool = True

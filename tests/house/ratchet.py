"""What is against the house's rules today (``ratchet.json``): a list that may only shrink.

    python -m tests.house.ratchet

takes off it what was mended, and refuses to add.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.house import survey

FILE = Path(__file__).with_name("ratchet.json")


def recorded() -> dict[str, Any]:
    """Rule -> what is against it; and ``lines``, the most that the product may have."""
    return json.loads(FILE.read_text())


def main() -> int:
    """Writes the file anew; the exit status."""
    before, now = recorded(), {rule: look() for rule, look in survey.SURVEYS.items()}
    new = [f"{rule}: {what}" for rule, found in now.items() for what in found if what not in before[rule]]
    for line in new:
        print(f"not on the list, and may not be: {line}", file=sys.stderr)
    kept = {rule: [what for what in found if what in before[rule]] for rule, found in now.items()}
    kept["lines"] = min(before["lines"], survey.lines())
    FILE.write_text(json.dumps(kept, indent=1) + "\n")
    return 1 if new else 0


if __name__ == "__main__":
    sys.exit(main())

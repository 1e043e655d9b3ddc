"""Prints the version of transformers, which private names it lacks, and which the product uses by its exports."""

import json
from importlib.metadata import version

from megasched.transformers_names import missing_names
from tests.house.private_names import rows_of, uses


def main() -> None:
    missing = [name.name for name in missing_names()]
    unlisted = {name: sites for name, sites in uses().items() if not rows_of(name)}
    print(json.dumps({"version": version("transformers"), "missing": missing, "unlisted": unlisted}))


if __name__ == "__main__":
    main()

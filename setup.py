"""Package megasched; its top-level folders are installed as sub-packages (DESIGN: one house, no stray names)."""

from setuptools import find_packages, setup

# Top-level folder -> where it is installed. No package named `patches` lands in anyone's site-packages.
MAPPED = {
    "megasched.model_adapters": "model_adapters",
    "megasched.patches": "patches",
    "megasched.launch": "launch",
}
# Files beside the packages, which commands find from there: `quickstart` trains under one of these schedules.
DATA = {"megasched.examples.schedules": "examples/schedules"}


def packages() -> list[str]:
    found = ["megasched", *(f"megasched.{name}" for name in find_packages("megasched"))]
    for package, folder in MAPPED.items():
        found += [package, *(f"{package}.{name}" for name in find_packages(folder))]
    return [*found, *DATA]


setup(packages=packages(), package_dir={"megasched": "megasched", **MAPPED, **DATA})

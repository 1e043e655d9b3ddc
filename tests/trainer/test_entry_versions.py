"""Which Megatron and which script ``python -m megasched script.py`` finds, and which versions it takes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from megasched.errors import ConfigError
from megasched.trainer import entry
from megasched.transformers_names import PrivateName
from megasched.versions import TESTED, judge
from tests.trainer.test_entry import environment


def checkout(folder: Path, *packages: str, version: str = "0.19.1") -> None:
    for package in packages:
        (folder / "megatron" / package).mkdir(parents=True)
        (folder / "megatron" / package / "__init__.py").touch()
    package_info = folder / "megatron" / "core" / "package_info.py"
    if package_info.parent.is_dir():
        package_info.write_text(f"__shortversion__ = {version!r}")


def found_beside(folder: Path) -> subprocess.CompletedProcess:
    """``find_megatron`` in a process of its own, as for a script in ``folder``."""
    code = (
        "import sys; from pathlib import Path; from megasched.trainer import entry; "
        "entry.put_first(Path(sys.argv[1])); print(entry.find_megatron())"
    )
    return subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, env=environment()
    )


def test_the_checkout_beside_the_script_wins(tmp_path: Path) -> None:
    checkout(tmp_path, "core", "training")
    done = found_beside(tmp_path)
    assert f"folder=PosixPath('{tmp_path / 'megatron'}'), version='0.19.1'" in done.stdout


def test_without_a_checkout_the_installed_one_is_used(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None
    assert spec.origin is not None
    assert f"folder={Path(spec.origin).parents[1]!r}" in found_beside(tmp_path).stdout


def checked(megatron: str, *flags: str) -> None:
    folder = Path("/checkout/megatron")
    entry.check_versions(entry.Megatron(folder, megatron), allow_unverified="--allow-unverified" in flags)


@pytest.mark.parametrize("version", ["0.19.2", "0.20.0", "0.20.0rc1"])
def test_tested_versions_pass_in_silence(version: str, capfd: pytest.CaptureFixture[str]) -> None:
    checked(version)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("flags", [(), ("--allow-unverified",)])
def test_an_older_megatron_is_refused(flags: tuple[str, ...]) -> None:
    message = r"0.18.2 is older than .*>=0.19,<0.21\): check out that version .* /checkout, or .*checkout$"
    with pytest.raises(ConfigError, match=message):
        checked("0.18.2", *flags)


def test_a_newer_megatron_has_a_door(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"0.21.0 is newer than .*, or go on with it by --allow-unverified"):
        checked("0.21.0")
    checked("0.21.0", "--allow-unverified")
    assert "warning: megatron-core 0.21.0 is newer than what megasched was tested" in capfd.readouterr().err


@pytest.mark.parametrize(("package", "newer"), [("torch", "2.16.0"), ("transformers", "5.25.0")])
def test_so_have_other_packages(package: str, newer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = entry.metadata.version
    monkeypatch.setattr(entry.metadata, "version", lambda name: newer if name == package else real(name))
    message = rf"{package} {newer} is newer .*pip install '{package}>=.*--allow-unverified"
    with pytest.raises(ConfigError, match=message):
        checked("0.19.2")
    with warnings.catch_warnings():
        checked("0.19.2", "--allow-unverified")
        warnings.simplefilter("error", UserWarning)
        checked("0.19.2", "--allow-unverified")


def test_a_newer_transformers_that_has_moved_a_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = entry.metadata.version
    monkeypatch.setattr(entry.metadata, "version", lambda name: "5.25.0" if name == "transformers" else real(name))
    monkeypatch.setattr(
        entry, "missing_names", lambda: [PrivateName("transformers.masking_utils:gone", "is", False)]
    )
    with pytest.raises(
        ConfigError, match=r"5.25.0 has moved what megasched uses: transformers.masking_utils:gone$"
    ):
        checked("0.19.2", "--allow-unverified")


def test_a_build_of_ones_own_counts_as_its_release() -> None:
    tested = TESTED["torch"]
    assert judge("2.11.0a0+0123456.nv26.03", tested) == "tested"
    assert [judge(found, tested) for found in ("2.10.1", "2.11.0", "2.15.2+cu130", "2.16.0.dev20261101")] == [
        "older",
        "tested",
        "tested",
        "newer",
    ]


def test_half_a_checkout_is_refused(tmp_path: Path) -> None:
    checkout(tmp_path, "core")
    assert "two Megatrons are mixed" in found_beside(tmp_path).stderr


def test_a_package_that_hides_megatron_is_named(tmp_path: Path) -> None:
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "__init__.py").touch()
    done = found_beside(tmp_path)
    assert f"megatron.core can't be imported (`megatron` is found in: {tmp_path / 'megatron'})" in done.stderr


def test_the_working_directory_makes_room_for_the_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [os.getcwd(), "/lib"])
    entry.put_first(tmp_path)
    assert sys.path == [str(tmp_path), "/lib"]
    entry.put_first(Path("/other"))
    assert sys.path == ["/other", str(tmp_path), "/lib"]


def test_a_bundled_script_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path, bundled = entry.find_script("pretrain_gpt.py")
    assert bundled
    assert path.parent.name == "launch"
    # The user's own comes first, and a path is never taken for a name.
    (tmp_path / "pretrain_gpt.py").touch()
    assert entry.find_script("pretrain_gpt.py") == (tmp_path / "pretrain_gpt.py", False)
    with pytest.raises(ConfigError, match="no such script"):
        entry.find_script("else/pretrain_gpt.py")

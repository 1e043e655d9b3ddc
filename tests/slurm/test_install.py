"""What is installed, once, and what is said where that can't be."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tests.slurm import install
from tests.slurm.install import UnavailableError

# In place of apt-get: writes what it was asked, and then has installed `slurmd`.
APT = """\
#!/bin/bash
echo "${@: -3} | policy: $(ls {policy} 2>&1)" >> {log}
{rest}
"""


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Path:
    """A folder that stands for the machine: no slurmd, no policy on daemons."""
    monkeypatch.setattr(install, "PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(install, "PACKAGES", {"slurmd-of-the-test": "slurmd", "bash": "bash"})
    monkeypatch.setattr(install, "POLICY", tmp_path / "policy-rc.d")
    return tmp_path


def fake_apt(machine: Path, rest: str) -> None:
    text = APT.replace("{policy}", str(install.POLICY)).replace("{log}", str(machine / "log"))
    program(machine / "apt-get", text.replace("{rest}", rest.replace("{machine}", str(machine))))


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


INSTALLS = "if [ $# -gt 7 ]; then sleep 0.3; cp /bin/true {machine}/slurmd-of-the-test; fi"


def test_only_what_is_missing_is_installed_and_nothing_started(machine):
    fake_apt(machine, INSTALLS)
    assert install.missing() == ["slurmd"]
    install.provide_programs()
    assert install.missing() == []
    update, packages = (machine / "log").read_text().splitlines()
    assert update == f"-o Acquire::Retries=2 update | policy: {install.POLICY}"
    assert packages == f"--yes --no-install-recommends slurmd | policy: {install.POLICY}"
    assert not install.POLICY.exists()
    install.provide_programs()
    assert len((machine / "log").read_text().splitlines()) == 2


def test_two_at_once_install_once(machine):
    fake_apt(machine, INSTALLS)
    threads = [threading.Thread(target=install.provide_programs) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len((machine / "log").read_text().splitlines()) == 2
    assert install.missing() == []


def test_policy_of_the_machine_stays(machine):
    program(install.POLICY, "theirs\n")
    with install.no_daemons(install.POLICY):
        assert install.POLICY.read_text() == "theirs\n"
    assert install.POLICY.read_text() == "theirs\n"
    install.POLICY.unlink()
    with install.no_daemons(install.POLICY):
        assert install.POLICY.read_text() == "#!/bin/sh\nexit 101\n"
        assert os.access(install.POLICY, os.X_OK)
    assert not install.POLICY.exists()
    fake_apt(machine, "exit 100")
    with pytest.raises(UnavailableError):
        install.provide_programs()
    assert not install.POLICY.exists()


def test_reasons(machine, monkeypatch):
    monkeypatch.setattr(install, "PATH", str(machine))
    with pytest.raises(UnavailableError, match=r"need slurmd \(Debian's names\), and there is no apt-get"):
        install.install(["slurmd"])
    monkeypatch.setattr(install, "PATH", f"{machine}:/usr/bin:/bin")
    fake_apt(machine, "echo 'Could not resolve deb.debian.org' >&2; exit 100")
    with pytest.raises(UnavailableError, match="apt-get update: Could not resolve"):
        install.provide_programs()
    fake_apt(machine, "")
    with pytest.raises(UnavailableError, match="need slurmd: installed by apt-get, and still not on"):
        install.provide_programs()
    program(machine / "unshare", "#!/bin/sh\necho 'unshare failed: Operation not permitted' >&2; exit 1\n")
    with pytest.raises(
        UnavailableError, match=r"refused \(unshare failed: Operation not permitted\): in a container"
    ):
        install.try_namespaces()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UnavailableError, match="need root"):
        install.provide()

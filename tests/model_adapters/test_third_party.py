"""Adapters of installed packages: what goes wrong with them is told with the package's name and version."""

from importlib.metadata import Distribution, EntryPoint

import pytest

from megasched.definition.build import build_definition
from megasched.errors import ConfigError
from megasched.model_adapters import registry
from megasched.model_adapters.registry import (
    Adapter,
    adapter_origin,
    find_adapter,
    has_roles,
    load_adapter,
    own_adapters,
    roles_of,
)
from tests import tiny

FIRST = Adapter(model_types=("mine", "ours"), roles={"*": "norm"})
SECOND = [Adapter(model_types=("theirs",), roles={}), Adapter(model_types=("ours",), roles={})]
NO_ADAPTER = {"model_types": ("mine",)}


class Package(Distribution):
    """As much of an installed package as errors name."""

    def __init__(self, name, version):
        self.text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"

    def read_text(self, filename):
        return self.text if filename == "METADATA" else None

    def locate_file(self, path):
        return path


def entry(name, value, package=None, version="1.0"):
    point = EntryPoint(name, value, registry.GROUP)
    if package is not None:
        vars(point).update(dist=Package(package, version))
    return point


@pytest.fixture
def installed(monkeypatch):
    """Installed packages' entry points, instead of the real ones."""

    def install(*points):
        monkeypatch.setattr(registry, "entry_points", lambda group: points if group == registry.GROUP else ())
        registry._installed.cache_clear()

    yield install
    registry._installed.cache_clear()


def refusal():
    with pytest.raises(ConfigError) as raised:
        find_adapter("mine")
    return str(raised.value)


def test_a_model_type_taken_twice_names_both_packages(installed):
    installed(
        entry("a", f"{__name__}:FIRST", "acme-models", "1.2.0"), entry("b", f"{__name__}:SECOND", "other", "0.3")
    )
    assert refusal() == (
        f"two adapters for model type 'ours': a = {__name__}:FIRST of acme-models 1.2.0 and "
        f"b = {__name__}:SECOND of other 0.3; uninstall one of the two packages, or take the model type out of one"
    )


def test_an_adapter_that_can_not_be_imported_names_its_package(installed):
    installed(entry("broken", "acme_models.nowhere:ADAPTER", "acme-models", "1.2.0"))
    assert refusal() == (
        "the adapter broken = acme_models.nowhere:ADAPTER of acme-models 1.2.0 can't be imported: "
        "ModuleNotFoundError: No module named 'acme_models'; repair or uninstall that package"
    )


def test_an_entry_point_without_the_name_it_gives(installed):
    installed(entry("gone", f"{__name__}:GONE", "acme-models"))
    assert refusal().startswith(
        f"the adapter gone = {__name__}:GONE of acme-models 1.0 can't be imported: AttributeError: "
    )


def test_an_entry_point_that_is_no_adapter(installed):
    installed(entry("odd", f"{__name__}:NO_ADAPTER"))
    assert refusal() == (
        f"the adapter odd = {__name__}:NO_ADAPTER of a package without metadata is a dict; an entry point of the "
        "group megasched.model_adapters names an Adapter, or a list of them"
    )


def test_where_an_adapter_comes_from(installed):
    installed(entry("a", f"{__name__}:SECOND", "other", "0.3"))
    assert adapter_origin("theirs") == f"a = {__name__}:SECOND of other 0.3"
    assert adapter_origin("mine") == ""


def test_our_own_adapters_are_those_of_megasched():
    assert adapter_origin("gpt2") == "gpt2 = megasched.model_adapters.families.gpt2:ADAPTER of megasched 0.1.0"


THEIRS = Adapter(model_types=("gpt2",), roles={})


def test_roles_of_our_own_are_not_overruled(installed):
    installed(entry("theirs", f"{__name__}:THEIRS", "acme-models", "1.2.0"))
    assert refusal() == (
        "two adapters for model type 'gpt2': gpt2 = megasched.model_adapters.families.gpt2:ADAPTER of megasched "
        f"0.1.0 and theirs = {__name__}:THEIRS of acme-models 1.2.0; uninstall one of the two packages, or take "
        "the model type out of one"
    )


def test_entry_points_of_an_older_installation_of_ours_are_passed_over(installed):
    installed(entry("gpt2", "megasched.model_adapters.gone:ADAPTER", "megasched", "0.1.0"))
    assert find_adapter("gpt2") is own_adapters()["gpt2"]


IMPORT = "from megasched.model_adapters.registry import Adapter\n"


def refusal_of(file, text):
    file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_adapter(str(file), "mine")
    return str(raised.value)


def test_the_adapter_of_a_file(tmp_path):
    file = tmp_path / "mine.py"
    mine = Adapter(model_types=("mine",), roles={"a": "norm"})
    file.write_text(IMPORT + 'ADAPTER = Adapter(model_types=("mine",), roles={"a": "norm"})\n')
    assert load_adapter(str(file), "mine") == mine
    file.write_text(
        IMPORT + 'A = Adapter(("mine",), {"a": "norm"})\nADAPTER = [Adapter(("ours",), {"b": "norm"}), A]\n'
    )
    assert load_adapter(str(file), "mine") == mine


def test_what_is_wrong_with_a_file_is_told_with_its_line(tmp_path):
    file = tmp_path / "mine.py"
    with pytest.raises(ConfigError, match=rf"^--adapter {file}: No such file or directory; expected an adapter"):
        load_adapter(str(file), "mine")
    assert refusal_of(file, "ADAPTER = 3\n") == (
        f"--adapter {file}: it has no ADAPTER = Adapter(...) at module level"
    )
    assert refusal_of(file, "\ndef f():\n    1 / 0\n\nf()\n") == (
        f"--adapter {file}:3: the adapter file fails: ZeroDivisionError: division by zero"
    )
    assert refusal_of(file, "a = 1\nb =\n") == (
        f"--adapter {file}:2: the adapter file has a syntax error: invalid syntax"
    )
    assert refusal_of(file, IMPORT + 'ADAPTER = Adapter(("ours", "theirs"))\n') == (
        f"--adapter {file}: it is for model type ours, theirs, and this model is of 'mine'"
    )


def test_an_adapter_that_is_given_stands_before_the_installed_one(tmp_path):
    model = build_definition(tiny.config("gpt2"))
    given = Adapter(("gpt2",), roles={"lm_head": "head"})
    assert has_roles("gpt2", given)
    assert set(roles_of(model, given).role) == {"lm_head"}
    assert len(roles_of(model).role) > 5

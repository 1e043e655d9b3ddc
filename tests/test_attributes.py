"""The helper behind every patch: sets, rebinds copies, and puts everything back."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from megasched.attributes import call_after, in_one_walk, resolve, set_attribute, set_attributes, undo_all
from megasched.errors import ConfigError


class Base:
    def greet(self):
        return "base"


class Derived(Base):
    pass


def original():
    return "original"


def replacement():
    return "replacement"


@pytest.fixture
def house(monkeypatch):
    """Package `house`: its `rooms` copied a function of its `stock`; so did a stranger."""
    modules = {name: ModuleType(name) for name in ("house", "house.stock", "house.rooms", "stranger")}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
        module.function = original
    modules["house.stock"].Derived = Derived
    return SimpleNamespace(
        stock=modules["house.stock"], rooms=modules["house.rooms"], stranger=modules["stranger"]
    )


def test_only_the_target_changes_without_rebind(house):
    undo = set_attribute("house.stock:function", replacement)
    assert house.stock.function is replacement
    assert house.rooms.function is original
    undo()
    assert house.stock.function is original


def test_copies_in_the_named_packages_are_rebound_and_come_back(house, monkeypatch):
    undo = set_attribute("house.stock:function", replacement, rebind=("house",))
    assert house.rooms.function is replacement
    assert house.stranger.function is original
    late = ModuleType("house.late")
    late.function = house.stock.function
    monkeypatch.setitem(sys.modules, "house.late", late)
    undo()
    assert [house.stock.function, house.rooms.function, late.function] == [original] * 3


def test_an_inherited_method_is_inherited_again_after_undo(house):
    undo = set_attribute("house.stock:Derived.greet", lambda self: "patched")
    assert Derived().greet() == "patched"
    assert Base().greet() == "base"
    undo()
    assert "greet" not in vars(Derived)
    assert Derived().greet() == "base"


def test_undo_all_goes_backwards():
    order = []
    undo_all([lambda: order.append("first made"), lambda: order.append("last made")])
    assert order == ["last made", "first made"]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no_such_module:name", "can't import no_such_module"),
        ("house.stock:nothing", "house.stock:nothing: no such attribute"),
        ("house.stock:Missing.method", "house.stock has no Missing"),
    ],
)
def test_a_target_that_is_not_there_is_named(house, target, message):
    with pytest.raises(ConfigError, match=message):
        resolve(target)


def test_what_comes_after_a_function_comes_after_its_error_too(house):
    called = []

    def stock():
        called.append("function")
        if len(called) > 2:
            raise ValueError("the second call")
        return "result"

    house.stock.function = house.rooms.function = stock
    undo = call_after("house.stock:function", lambda: called.append("end"), rebind=("house",))
    assert house.rooms.function() == "result"
    with pytest.raises(ValueError, match="the second call"):
        house.stock.function()
    assert called == ["function", "end"] * 2
    undo()
    assert house.stock.function is house.rooms.function is stock


def test_attributes_that_get_one_value_come_back_each_as_it_was(house, monkeypatch):
    def other():
        return "other"

    house.stock.other = house.rooms.other = other
    undo = set_attributes(
        {"house.stock:function": replacement, "house.stock:other": replacement}, rebind=("house",)
    )
    assert [house.stock.other, house.rooms.function, house.rooms.other] == [replacement] * 3
    late = ModuleType("house.late")
    late.other = house.stock.other
    monkeypatch.setitem(sys.modules, "house.late", late)
    undo()
    assert [house.stock.function, house.rooms.function] == [original] * 2
    assert [house.stock.other, house.rooms.other, late.other] == [other] * 3


def test_nothing_is_changed_where_one_target_does_not_exist(house):
    with pytest.raises(ConfigError, match="no such attribute"):
        set_attributes({"house.stock:function": replacement, "house.stock:gone": replacement})
    assert house.stock.function is original


def another():
    return "another"


def test_changes_of_one_walk_reach_copies_at_its_end(house):
    with in_one_walk():
        undo_first = set_attribute("house.stock:function", replacement, rebind=("house",))
        undo_second = set_attribute("house.stock:function", another, rebind=("house",))
        assert (house.stock.function, house.rooms.function) == (another, original)
    assert [house.stock.function, house.rooms.function] == [another] * 2
    assert house.stranger.function is original
    with in_one_walk():
        undo_second()
        with in_one_walk():
            undo_first()
        assert house.rooms.function is another
    assert [house.stock.function, house.rooms.function] == [original] * 2


def test_what_is_set_and_undone_in_one_walk_leaves_copies_as_they_were(house):
    with in_one_walk():
        set_attribute("house.stock:function", replacement, rebind=("house",))()
    assert [house.stock.function, house.rooms.function] == [original] * 2


def test_a_copy_that_is_set_itself_is_changed_before(house):
    with in_one_walk():
        set_attribute("house.stock:function", replacement, rebind=("house",))
        undo = set_attribute("house.rooms:function", another)
        assert (house.stock.function, house.rooms.function) == (replacement, another)
    undo()
    assert house.rooms.function is replacement


def test_copies_are_changed_where_the_body_of_a_walk_fails(house):
    def change():
        with in_one_walk():
            set_attribute("house.stock:function", replacement, rebind=("house",))
            set_attribute("house.stock:nothing", replacement)

    with pytest.raises(ConfigError):
        change()
    assert house.rooms.function is replacement


def test_one_walk_gives_each_copy_what_has_its_name(house):
    def other():
        return "other"

    house.stock.other = house.rooms.other = other
    both = {"house.stock:function": replacement, "house.stock:other": replacement}
    undo = set_attributes(both, rebind=("house",))
    with in_one_walk():
        undo()
        set_attribute("house.stock:other", another, rebind=("house",))
    assert [house.rooms.function, house.rooms.other] == [original, another]

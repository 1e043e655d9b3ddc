"""What calls leave behind: printed, saved, loaded, compared, replayed."""

import json

import pytest
import torch
from torch import nn

import megasched
from megasched import ConfigError, ParallelDims, Record, ScheduleError


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x):
        return self.down(self.up(x))


def note(module, args):
    return None


def double(old):
    return 2 * old["weight"]


class Maker:
    @staticmethod
    def make(old):
        return nn.Linear(old.in_features, old.out_features)


def new_schedule(model=None):
    return megasched.create_schedule(model or Model(), ParallelDims())


def fill(sch):
    sch["up"].shard("weight", axis=0, components=[4, 4])
    sch["down"].shard("weight", axis=1)
    sch["up"].hook("fw_pre", note)
    sch["up"].annotate("weight", "sizes", (1, [2, None], {"a": 0.5}))
    sch["down"].replace(Maker.make, weights={"weight": double}, drop=("bias",))
    sch.replace_all(nn.ReLU, Maker.make)
    sch["up"].checkpoint()
    return sch


def test_a_record_says_who_where_with_what_and_from_which_line():
    sch = new_schedule()
    sch["up"].shard("weight", axis=0)
    line = test_a_record_says_who_where_with_what_and_from_which_line.__code__.co_firstlineno + 2
    assert sch.records == [Record("shard", "up", {"param": "weight", "axis": 0})]
    assert sch.records[0].source == f"{__file__}:{line}"


def test_the_line_is_the_innermost_outside_the_library():
    sch = new_schedule()

    def helper(node):
        node.fork_rng()

    helper(sch["up"])
    sch["*"].checkpoint()
    first = helper.__code__.co_firstlineno + 1
    assert [r.source for r in sch.records] == [f"{__file__}:{first}"] + [f"{__file__}:{first + 3}"] * 2


def test_a_file_beside_the_library_that_shares_its_name_is_the_users(tmp_path):
    from pathlib import Path

    beside = str(Path(megasched.__file__).parent) + "_schedules/mine.py"
    scope = {}
    exec(compile("def ask(node):\n    node.checkpoint()", beside, "exec"), scope)
    sch = new_schedule()
    scope["ask"](sch)
    assert sch.records[0].source == f"{beside}:2"


def test_the_default_schedule_is_who_asked():
    from megasched.language.roles import Roles
    from megasched.model_adapters import default_schedule

    sch = megasched.create_schedule(Model(), ParallelDims(), Roles({"up": "mlp.up", "down": "mlp.down"}))
    default_schedule.schedule(sch, sch.layout)
    assert {r.source.rpartition(":")[0] for r in sch.records} == {default_schedule.__file__}


def test_printed():
    assert list(map(str, fill(new_schedule()).records)) == [
        "up: shard(param='weight', axis=0, components=(4, 4))",
        "down: shard(param='weight', axis=1)",
        "up: hook(mode='fw_pre', fn=note)",
        "up: annotate(param='weight', key='sizes', value=(1, [2, None], {'a': 0.5}))",
        "down: replace(factory=Maker.make, weights={'weight': " + repr(double) + "}, drop=('bias',))",
        "<model>: replace_all(what=ReLU, factory=Maker.make, weights={}, drop=())",
        "up: checkpoint()",
    ]


def test_saved_and_loaded_records_are_equal_and_keep_their_lines(tmp_path):
    records = fill(new_schedule()).records
    megasched.save_records(records, tmp_path / "schedule.json")
    loaded = megasched.load_records(tmp_path / "schedule.json")
    assert loaded == records
    assert [r.source for r in loaded] == [r.source for r in records]
    assert loaded[4].arguments["weights"]["weight"] is double
    assert [p.name for p in tmp_path.iterdir()] == ["schedule.json"]
    assert all(
        set(row) == {"primitive", "path", "arguments", "source"}
        for row in json.loads((tmp_path / "schedule.json").read_text())
    )


def test_equality_is_of_what_is_asked_not_of_where():
    one, two = new_schedule(), new_schedule()
    one["up"].shard("weight", axis=0)
    two["up"].shard("weight", axis=0)
    assert one.records[0].source != two.records[0].source
    assert one.records == two.records
    two["up"].checkpoint()
    assert one.records != two.records


def test_replayed_on_another_model_of_the_same_paths(tmp_path):
    sch = fill(new_schedule())
    megasched.save_records(sch.records, tmp_path / "schedule.json")
    other = new_schedule()
    megasched.replay(megasched.load_records(tmp_path / "schedule.json"), other)
    assert other.records == sch.records
    assert [r.source for r in other.records] == [r.source for r in sch.records]


def test_replayed_where_a_path_is_missing():
    sch = new_schedule()
    sch["down"].shard("weight", axis=1)
    with pytest.raises(ScheduleError, match="no module 'down'"):
        megasched.replay(sch.records, new_schedule(nn.Sequential(nn.Linear(2, 2))))


@pytest.mark.parametrize(
    "value",
    [lambda old: old, nn.Linear(2, 2), torch.float32, {1: 2}, torch.zeros(2), Maker().make.__call__],
    ids=["lambda", "module", "dtype", "integer keys", "tensor", "bound method"],
)
def test_what_could_not_be_loaded_again_is_not_saved(tmp_path, value):
    sch = new_schedule()
    sch["up"].annotate("weight", "key", value)
    with pytest.raises(ConfigError, match=r"can't save .*up: annotate.* at .*test_records\.py:\d+: only plain"):
        megasched.save_records(sch.records, tmp_path / "schedule.json")
    assert not list(tmp_path.iterdir())


def test_a_function_of_a_schedule_file_is_not_saved(tmp_path):
    from megasched.language.schedule_file import apply_schedule, find_schedule

    file = tmp_path / "mine.py"
    file.write_text("def note(module, args): pass\ndef schedule(sch, layout): sch['up'].hook('fw_pre', note)\n")
    sch = apply_schedule(new_schedule(), find_schedule(str(file)))
    with pytest.raises(ConfigError, match=r"at .*mine\.py:2: only plain data"):
        megasched.save_records(sch.records, tmp_path / "schedule.json")


def test_a_saved_function_that_is_gone_is_named(tmp_path):
    sch = new_schedule()
    sch["up"].hook("fw_pre", note)
    megasched.save_records(sch.records, tmp_path / "schedule.json")
    text = (tmp_path / "schedule.json").read_text()
    for gone in ("test_records:gone", "no_such_module:note"):
        (tmp_path / "schedule.json").write_text(text.replace(f"{__name__}:note", gone))
        with pytest.raises(ConfigError, match=f"uses {gone}, which can't be imported"):
            megasched.load_records(tmp_path / "schedule.json")

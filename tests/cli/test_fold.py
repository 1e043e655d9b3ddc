"""Folding layers that are treated alike."""

from dataclasses import replace

import pytest

from megasched.cli.show.fold import fold
from megasched.cli.show.modules import Asked, ModuleReport
from megasched.plan.decisions import fold_indices


def model(layers):
    """Reports of a model whose layers are given as (notes of the layer, notes of its MLP)."""
    reports = [ModuleReport("", "Model", "Model"), ModuleReport("h", "ModuleList", "ModuleList")]
    for index, (layer, mlp) in enumerate(layers):
        asked = (Asked("shard", "shard()", f"file:{index % 2}"),)
        reports.append(ModuleReport(f"h.{index}", "Layer", "Layer", notes=layer))
        reports.append(ModuleReport(f"h.{index}.attn", "Attention", "Attention"))
        reports.append(ModuleReport(f"h.{index}.mlp", "MLP", "MLP", notes=mlp, asked=asked))
    return reports


def folds(layers):
    return fold(model(layers)).children[0].children


def test_equal_layers_are_one():
    (only,) = folds([((), ())] * 4)
    assert (only.name, only.members) == ("0-3", 4)
    assert [child.name for child in only.children] == ["attn", "mlp"]
    assert [report.path for report in only.children[1].reports] == [f"h.{i}.mlp" for i in range(4)]
    assert only.children[1].sources == ["file:0", "file:1"]


def test_a_difference_inside_parts_them():
    found = folds([((), ()), ((), ()), ((), ("recomputed",)), ((), ())])
    assert [(node.name, node.members) for node in found] == [("0-1,3", 3), ("2", 1)]
    assert [child.like for child in found[0].children] == ["", ""]
    assert [child.like for child in found[1].children] == ["0-1,3", ""]


def test_layers_of_other_stages_are_folded_by_themselves():
    reports = [replace(r, stages=(int(r.path[2]) // 2,) if r.path[2:] else (0, 1)) for r in model([((), ())] * 4)]
    first, second = fold(reports, by_stage=True).children[0].children
    assert [(node.name, node.members, node.like) for node in (first, second)] == [
        ("0-1", 2, ""),
        ("2-3", 2, "0-1"),
    ]
    assert [child.like for child in second.children] == ["0-1", "0-1"]
    (whole,) = fold(reports).children[0].children
    assert (whole.name, whole.like) == ("0-3", "")


def test_a_cut_parts_nothing():
    reports = model([((), ())] * 2)
    cut = Asked("cut_pipeline_stage", "cut_pipeline_stage()", "file:9")
    reports[2] = ModuleReport("h.0", "Layer", "Layer", asked=(cut,))
    (only,) = fold(reports).children[0].children
    assert only.name == "0-1"
    assert only.sources == []


def test_lists_in_lists_count_their_own_members():
    reports = [ModuleReport("", "Model", "Model"), ModuleReport("h", "ModuleList", "ModuleList")]
    for layer in range(3):
        reports.append(ModuleReport(f"h.{layer}", "Layer", "Layer"))
        reports.append(ModuleReport(f"h.{layer}.experts", "ModuleList", "ModuleList"))
        reports += [ModuleReport(f"h.{layer}.experts.{i}", "MLP", "MLP") for i in range(8)]
    (layers,) = fold(reports).children[0].children
    (experts,) = layers.children[0].children
    assert (layers.members, experts.members, len(experts.reports)) == (3, 8, 24)


@pytest.mark.parametrize(
    ("indices", "label"),
    [
        ([5], "5"),
        ([0, 1, 2, 3], "0-3"),
        ([0, 3, 7], "0,3,7"),
        ([0, 1, 4, 5], "0-1,4-5"),
        (list(range(0, 32, 2)), "0,2,…,30"),
    ],
)
def test_labels(indices, label):
    assert fold_indices(indices) == label

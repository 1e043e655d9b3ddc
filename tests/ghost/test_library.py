"""Ghost CUDA itself: what torch's CUDA build sees of it, and what ranks hand over."""

import json

import pytest

from tests.ghost import process


@pytest.fixture(scope="module")
def found():
    said = process.run(["-m", "tests.ghost.library_case"], ranks=1, GHOST_DEVICES="3")
    return json.loads(said.splitlines()[-1])


def test_gpus_are_seen(found):
    assert found["name"] == "GHOST H100 (computes nothing)"
    assert found["devices"] == 3


def test_kernels_and_products_are_counted_by_name(found):
    """A forward has one product, its backward two; cuBLAS takes matrices transposed."""
    products = {name: count for name, count in found["kernels"].items() if name.startswith("gemm")}
    name = "gemm:SgemmStridedBatched"
    assert products == {f"{name} 64x64x32": 1, f"{name} 64x32x64": 1, f"{name} 32x64x64": 1}
    named = [name for name in found["kernels"] if "at::native::reduce_kernel" in name]
    assert len(named) == 1


def test_what_comes_from_the_host_is_read_back(found):
    assert found["back"] == [1, 2, 3]
    assert [event for event in found["moved"] if event.startswith("copy")] == [
        "copy:H2D pageable 24",
        "copy:D2H pageable 24",
    ]


def test_what_would_be_computed_is_zeros(found):
    """Even where a tensor from the host has stood before."""
    assert found["computed"] == [False] * 3


def test_the_host_waits_where_it_reads(found):
    assert [event for event in found["copied"] if event.startswith(("copy", "sync"))] == [
        "copy:D2H pinned 4",
        "sync:cudaStreamSynchronize",
    ]


def test_what_is_not_covered_fails(found):
    assert "CUFFT" in found["refused"]


def test_memory_is_counted_and_ends(found):
    assert found["held"] == 0
    assert "Tried to allocate 1024.00 GiB" in found["too much"]


def test_ranks_hand_over_what_they_know():
    said = process.run(["-m", "tests.ghost.ranks_case"], ranks=2)
    ranks = sorted(
        (json.loads(line) for line in said.splitlines() if line.startswith("{")), key=lambda r: r["rank"]
    )
    for one in ranks:
        rank = one.pop("rank")
        assert one == {
            "summed": [3, 10],
            "largest": 1.0,
            "gathered": [1, 0, 2, 10],
            "told": 1,
            "objects": [{"rank": 0}, {"rank": 1}],
            "large": [True, True],
            "exchanged": [rank, 10 + rank],
            "part": [3, 10][rank],
            "neighbour": 101 - rank,
        }


def test_whole_numbers_are_computed_on_the_host():
    """So are those that definitions count in floating point: 6 tokens choose 2 of 4 experts."""
    said = process.run(["-m", "tests.ghost.integers_case"], **process.INTEGERS)
    assert json.loads(said.splitlines()[-1]) == {
        "positions": [0, 2, 6, 12],
        "chosen": [[0, 1], [1, 2], [2, 3], [3, 0], [0, 1], [1, 2]],
        "counted": [3, 4, 3, 2],
        "by marks": [3, 4, 3, 2],
        "by marks in place": [3, 4, 3, 2],
    }

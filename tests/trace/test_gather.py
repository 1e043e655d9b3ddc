"""From parts to one file, and from the clocks of ranks to one clock."""

from __future__ import annotations

import pytest

from megasched.trace.chrome_trace import RankCoordinates, read_trace
from megasched.trace.clocks import offset
from megasched.trace.gather import RankSpans, gather, part_path, write_part
from megasched.trace.timeline import Span


def part(rank, ahead, start, jitter=0.0, host=None):
    """Of a rank whose clock is ahead by so much; one forward of 1 s."""
    barriers = [ahead + 10.0, ahead + 11.0 + jitter, ahead + 12.0]
    span = Span(rank, "forward", 0, 0, ahead + start, ahead + start + 1)
    return RankSpans(rank, RankCoordinates(rank, 0, 0), host or f"host{rank}", barriers, {3: [span]})


def test_clocks_that_differ_by_hours_are_aligned(tmp_path):
    file = tmp_path / "trace.json"
    for one in (part(0, 500.0, 13.0), part(1, 90_000.0, 14.5, jitter=2e-3)):
        write_part(file, one)
    assert gather(file, 2) == []
    trace = read_trace(file)
    assert [(s.rank, s.start, s.end) for s in trace.iterations[3]] == [
        (0, 0.0, 1.0),
        (1, pytest.approx(1.5), pytest.approx(2.5)),
    ]
    assert trace.clock_error == pytest.approx(1e-3)
    assert list(tmp_path.iterdir()) == [file]


def test_ranks_of_one_machine_have_one_clock(tmp_path):
    file = tmp_path / "trace.json"
    write_part(file, part(0, 500.0, 13.0, host="a"))
    write_part(file, part(1, 500.0, 13.5, jitter=0.7, host="a"))  # it was kept from leaving a barrier in time
    gather(file, 2)
    trace = read_trace(file)
    assert [s.start for s in trace.iterations[3]] == [0.0, pytest.approx(0.5)]
    assert trace.clock_error == 0.0


def test_offset_is_the_median_and_its_error_half_the_range():
    ahead, error = offset([5.0, 6.0, 7.3], [1.0, 2.0, 3.0])
    assert ahead == pytest.approx(4.0)
    assert error == pytest.approx(0.15)


def test_ranks_that_write_nothing_are_named_in_time(tmp_path):
    file = tmp_path / "trace.json"
    write_part(file, part(1, 0.0, 13.0))
    assert gather(file, 3, seconds=0.01) == [0, 2]
    assert list(read_trace(file).places) == [1]


def test_where_the_file_can_not_be_written_the_parts_stay(tmp_path):
    file = tmp_path / "trace.json"
    file.mkdir()
    write_part(file, part(0, 0.0, 13.0))
    with pytest.raises(OSError, match="directory"):
        gather(file, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.json", part_path(file, 0).name]

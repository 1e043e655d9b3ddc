"""Calibration of links: planted seconds give the planted link, and ranks of gloo measure one."""

import dataclasses

import pytest
import torch

from megasched.errors import ConfigError
from megasched.planner.hardware.calibrate_links import (
    World,
    exchanged,
    fit_link,
    link_groups,
    measure_links,
    read_world,
    slowest,
)
from megasched.planner.hardware.hardware import Group, Link, load_hardware
from megasched.planner.measure.work import CountWork
from tests.planner.test_calibrate import CPU, SIZES, replay, wall_clock

H100 = load_hardware("h100-80gb")
TRUTH = dataclasses.replace(H100, node=Link(450.0, 0.625, 7.25), network=Link(50.0, 0.9, 33.5))
# A rank's bytes.
LARGE, TINY = 64 << 20, 1 << 10


def seconds(hardware, part, ranks, span):
    return hardware.send_seconds(exchanged(part, ranks), {"calibrated": Group(ranks, span)})[0]


def timed(hardware, part, ranks, span):
    return exchanged(part, ranks), seconds(hardware, part, ranks, span)


@pytest.mark.parametrize(("name", "span"), [("node", 8), ("network", 16)])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_planted_seconds_give_the_planted_link(name, span, ranks):
    large, tiny = (timed(TRUTH, part, ranks, span) for part in (LARGE, TINY))
    assert fit_link(H100, name, ranks, large, tiny) == getattr(TRUTH, name)


def test_what_is_exchanged_takes_as_long_as_both_operations():
    """A rank sends the parts of all others but its own, twice: (n - 1) parts a message."""
    sent = 2 * 3 * LARGE
    assert seconds(TRUTH, LARGE, 4, 8) == pytest.approx(2 * TRUTH.node.seconds(sent / 2))


def test_noise_makes_no_latency_below_nothing():
    (large, long), (tiny, _) = (timed(TRUTH, part, 2, 8) for part in (LARGE, TINY))
    found = fit_link(H100, "node", 2, (large, long), (tiny, 0.0))
    assert found.latency_us == 0.1


@pytest.mark.parametrize("name", ["node", "network"])
def test_faster_than_the_peak_is_an_error_that_teaches(name):
    (large, _), tiny = (timed(TRUTH, part, 2, 8) for part in (LARGE, TINY))
    peak = getattr(H100, name).gbytes_per_s
    with pytest.raises(ConfigError, match=rf"efficiency of \[{name}\] came out as .*gbytes_per_s = {peak}"):
        fit_link(H100, name, 2, (large, tiny[1]), tiny)


@pytest.mark.parametrize(
    ("size", "local", "wanted"),
    [
        (1, 1, {}),
        (4, 4, {"node": [[0, 1, 2, 3]]}),
        (3, 1, {"network": [[0, 1, 2]]}),
        (4, 2, {"node": [[0, 1], [2, 3]], "network": [[0, 2], [1, 3]]}),
    ],
)
def test_groups_of_links(size, local, wanted):
    assert link_groups(World(0, size, 0, local)) == wanted


def test_what_torchrun_says():
    assert read_world({}) == World()
    said = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert read_world(said) == World(5, 8, 1, 4)
    with pytest.raises(ConfigError, match="5 ranks, 4 of them on this node: start as many on each node"):
        read_world(said | {"WORLD_SIZE": "5"})


# ---- on ranks -----------------------------------------------------------------------------------------


def _world(local_size):
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return World(rank, size, rank % local_size, local_size)


def _measure(local_size):
    steps = []
    timer = slowest(wall_clock, CPU)
    found = measure_links(H100, _world(local_size), CPU, timer, SIZES, steps.append)
    return steps, found


def _measure_planted(times):
    return measure_links(H100, _world(2), CPU, replay(times), SIZES)


def _count():
    works = []

    def count(run):
        with CountWork() as counter:
            run()
        works.append(counter.work)
        return 1.0 / len(works)  # the tiny message is the second

    measure_links(H100, _world(2), CPU, count, SIZES)
    return [sorted((one.operation, one.bytes) for one in work.sent.elements()) for work in works]


def _slowest():
    rank = torch.distributed.get_rank()
    return slowest(lambda run: 1.0 + rank, CPU)(lambda: None)


@pytest.mark.parametrize(("local_size", "name"), [(2, "node"), (1, "network")])
def test_two_ranks_measure_their_link(ranks, local_size, name):
    first, second = ranks.run(2, _measure, local_size)
    assert first == second
    steps, found = first
    assert (steps, set(found)) == ([name], {name})
    assert found[name].gbytes_per_s == getattr(H100, name).gbytes_per_s
    assert 0 < found[name].efficiency < 1
    assert found[name].latency_us > 0


def test_planted_seconds_on_ranks(ranks):
    times = [seconds(TRUTH, part, 2, 8) for part in SIZES.message]
    assert ranks.run(2, _measure_planted, times) == [{"node": TRUTH.node}] * 2


def test_what_is_timed_is_what_a_plan_counts(ranks):
    """The same bytes of the same operations, by the counter of plans."""
    wanted = [[(name, 2 * part) for name in ("allgather_base", "reduce_scatter_base")] for part in SIZES.message]
    for work, part in zip(wanted, SIZES.message, strict=True):
        assert sorted((one.operation, one.bytes) for one in exchanged(part, 2).sent.elements()) == work
    counted = ranks.run(2, _count)[0]
    assert [[size for _, size in work] for work in counted] == [[size for _, size in work] for work in wanted]


def test_all_ranks_have_the_seconds_of_the_slowest(ranks):
    assert ranks.run(2, _slowest) == [2.0, 2.0]

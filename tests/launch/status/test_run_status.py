"""How a run is doing: by a real run that was requeued once, and by made-up lines."""

import shutil
import subprocess
import sys
from datetime import datetime, timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megasched.errors import ConfigError
from megasched.launch.run_folder import RunFolder
from megasched.launch.status.run_status import RunReader
from megasched.launch.status.training_log import Checkpoint, RankTimes
from tests.launch.status.runs import FIRST, LAST_LINE, REAL, SECOND, look, until

# ---- the real run -----------------------------------------------------------------------------------


def test_a_run_that_was_requeued():
    found = RunReader(str(REAL)).look()
    assert (found.state, found.why, found.ended) == ("finished", "", True)
    assert (found.iteration, found.last, found.time) == (60, 60, LAST_LINE)
    assert (found.loss, found.grad_norm) == (3.293008, 0.641)
    assert (found.validation_iteration, found.validation) == (60, 3.284825)
    assert (found.gpus, found.restarts, found.skipped, found.nan) == (4, 1, 0, 0)
    # The mean of the 20 lines after the first, the second without the first's share: 2 x 324.0 - 376.1.
    ms = [271.9, 328.1, 284.4, 286.5, 259.8, 255.4, 280.9, 304.8, 328.8, 322.8]
    ms += [270.9, 271.4, 262.6, 287.4, 271.6, 281.7, 276.7, 301.4, 279.5, 202.1]
    assert found.seconds == pytest.approx(sum(ms) / 20 / 1000)
    assert found.samples_per_second == pytest.approx(4 / found.seconds)
    assert found.tokens_per_second == pytest.approx(64 * 4 / found.seconds)
    assert found.tokens_per_gpu == pytest.approx(16 * 4 / found.seconds)
    assert found.tflops == 0.0
    assert found.saved == Checkpoint(60, datetime(2026, 11, 22, 15, 11, 20, 158135), "run/checkpoints")
    assert (found.saving, found.seconds_left, found.error) == (None, None, "")


def test_iterations_that_were_made_again_count_once():
    found = RunReader(str(REAL)).look()
    made = [iteration for iteration, _ in found.trend]
    assert made == [1, *range(2, 21, 2), 21, *range(22, 61, 2)]
    losses = dict(found.trend)
    assert losses[28] == 3.600181  # by the restart
    assert losses[20] == 3.767501
    assert losses[2] == pytest.approx(2 * 4.547095 - 4.578841, abs=1e-4)


def test_on_its_way(run):
    run(0, 0, FIRST[0], LAST_LINE - timedelta(seconds=40))
    run(0, 1, FIRST[1], LAST_LINE - timedelta(seconds=40))
    begun = next(i for i, line in enumerate(SECOND[0]) if "saving checkpoint at iteration      40" in line)
    run(1, 0, SECOND[0][: begun + 1], LAST_LINE)
    run(1, 1, until(SECOND[1], 40), LAST_LINE)
    now = datetime(2026, 11, 22, 15, 11, 5)
    found = look(run, now)
    assert (found.state, found.why, found.ended) == ("training", "", False)
    assert (found.iteration, found.last, found.restarts) == (40, 60, 1)
    assert found.validation_iteration == 25
    assert found.saved == Checkpoint(20, datetime(2026, 11, 22, 15, 10, 29, 672741), "run/checkpoints")
    assert found.saving == Checkpoint(40, datetime(2026, 11, 22, 15, 11, 3, 652861), "run/checkpoints")
    # 19 iterations since the first line of this start took from 15:10:57.776445 to 15:11:03.655389.
    assert found.seconds_left == pytest.approx(20 * 5.878944 / 19)


def test_each_look_reads_on(run):
    run(0, 0, FIRST[0], LAST_LINE)
    log = run(0, 1, until(FIRST[1], 10), LAST_LINE)
    reader = RunReader(str(run.folder.path))
    assert reader.look(LAST_LINE).iteration == 10
    with log.open("a") as file:
        file.write("\n".join(FIRST[1][len(until(FIRST[1], 10)) :]) + "\n")
    assert reader.look(LAST_LINE).iteration == 28
    run(1, 0, SECOND[0], LAST_LINE)
    run(1, 1, SECOND[1], LAST_LINE)
    assert reader.look(LAST_LINE).state == "finished"


def test_the_slowest_rank_is_of_the_newest_start(run):
    told = "[2026-11-22 15:1{}:00] | MnRtt/Rnk: {}0.00ms/2 | MxRtt/Rnk: {}00.00ms/3 | MnPwr/Rnk: 0.00W/0"
    run(0, 0, [*FIRST[0], told.format(0, 1, 1)], LAST_LINE)
    run(0, 1, FIRST[1], LAST_LINE)
    assert look(run).rank_times == RankTimes(datetime(2026, 11, 22, 15, 10), 3, 0.1, 2, 0.01)
    run(1, 0, [*SECOND[0], told.format(1, 2, 2), told.format(2, 3, 3)], LAST_LINE)
    assert look(run).rank_times == RankTimes(datetime(2026, 11, 22, 15, 12), 3, 0.3, 2, 0.03)
    assert look(run).to_dict()["rank_times"] == {
        "time": "2026-11-22T15:12:00", "slowest": 3, "slowest_seconds": 0.3, "fastest": 2, "fastest_seconds": 0.03,
    }  # fmt: skip
    run(1, 0, SECOND[0], LAST_LINE + timedelta(seconds=1))
    assert look(run).rank_times is None


LINES = [line.partition(": ")[2] for line in [*SECOND[0], *SECOND[1]]]
FAILING = [
    line for line in LINES if "iteration       3" in line or "world_size ." in line or "  seq_length" in line
]
FAILING += ["RuntimeError: CUDA error: an illegal memory access was encountered"]


@pytest.mark.parametrize(("lines", "state"), [(LINES, "finished"), (FAILING, "failed")])
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_split_over_nodes_and_labels_says_the_same(lines, state, data, tmp_path):
    nodes = data.draw(st.integers(1, 4))
    labels = st.sampled_from(["", "3: ", "12: ", "[default3]:", "7: [default7]:"])
    parts = [[] for _ in range(nodes)]
    for line in lines:
        parts[data.draw(st.integers(0, nodes - 1))].append(data.draw(labels) + line)
    folder = RunFolder(tmp_path / "split")
    shutil.rmtree(folder.path, ignore_errors=True)
    whole = tmp_path / "whole.log"
    whole.write_text("\n".join(lines) + "\n")
    for node, part in enumerate(parts):
        path = folder.node_log("x", 0, node)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in part))

    def facts(path):
        found = RunReader(str(path)).look(LAST_LINE + timedelta(days=1)).to_dict()
        return {name: value for name, value in found.items() if name not in ("path", "error_log")}

    assert facts(whole)["state"] == state
    assert facts(folder.path) == facts(whole)


# ---- the state --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("after", "state", "why"),
    [
        (timedelta(minutes=4, seconds=59), "training", ""),
        (timedelta(minutes=5, seconds=1), "hung", "no new line for 5 min, and 5 min is already long for this run"),
        (timedelta(hours=3), "hung", "no new line for 3 h 00 min, and 5 min is already long for this run"),
    ],
)
def test_a_run_is_called_hung_after_five_minutes_at_least(run, halfway, after, state, why):
    found = look(run, halfway + after)
    assert (found.state, found.why) == (state, why)


def times(run, *seconds):
    """One log with a line of an iteration at each of these seconds after midnight."""
    start = datetime(2026, 11, 22)
    line = until(FIRST[1], 2)[-1]
    head, tail = line.partition("2026-")[0], line.partition("/      60 |")[2]
    lines = [
        f"{head}{start + timedelta(seconds=each)}.0] iteration {i:8d}/      60 |{tail}"
        for i, each in enumerate(seconds, 1)
    ]
    run(0, 0, lines, start)
    return start + timedelta(seconds=seconds[-1])


def test_a_run_with_long_iterations_may_be_silent_for_longer(run):
    at = times(run, 0, 100, 200, 300)
    assert look(run, at + timedelta(seconds=499)).state == "training"
    assert look(run, at + timedelta(seconds=501)).state == "hung"


def test_a_run_may_be_silent_for_twice_its_longest_pause(run):
    at = times(run, 0, 10, 20, 420, 430, 440)
    assert look(run, at + timedelta(seconds=799)).state == "training"
    assert look(run, at + timedelta(seconds=801)).state == "hung"


def test_a_checkpoint_that_is_begun_is_a_sign_of_life(run, halfway):
    run(
        0,
        0,
        [*FIRST[0][:-1], "0: [2026-11-22 15:14:00.0] saving checkpoint at iteration      30 to run in x format"],
        halfway,
    )
    found = look(run, halfway + timedelta(minutes=7))
    assert (found.state, found.saving.iteration) == ("training", 30)


def test_a_start_may_take_half_an_hour(run):
    run(0, 0, FIRST[0][:12], LAST_LINE)
    assert look(run, LAST_LINE + timedelta(minutes=29)).state == "starting"
    assert look(run, LAST_LINE + timedelta(minutes=31)).state == "hung"


def test_a_restart_that_has_made_no_iteration_is_starting(run, halfway):
    run(1, 0, SECOND[0][:12], LAST_LINE)
    found = look(run)
    assert (found.state, found.iteration, found.restarts, found.seconds_left) == ("starting", 28, 1, None)
    assert found.seconds is not None  # of the start before


def test_an_end_that_was_asked_for(run, halfway):
    run(
        0,
        0,
        [*FIRST[0][:-1], "0: [exiting program at iteration 28] datetime: 2026-11-22 15:10:33.100000 "],
        halfway,
    )
    found = look(run)
    assert (found.state, found.why, found.ended) == ("stopped", "exiting program at iteration 28", True)


def test_an_error_where_training_is_logged_is_the_last_word(run, halfway):
    log = run(0, 1, [*FIRST[1], "3: torch.OutOfMemoryError: CUDA out of memory."], halfway)
    found = look(run, halfway + timedelta(seconds=1))
    assert (found.state, found.error, found.error_log) == (
        "failed",
        "torch.OutOfMemoryError: CUDA out of memory.",
        str(log),
    )


def test_an_error_on_another_node_is_shown_and_is_a_failure_when_nothing_more_comes(run, halfway):
    run(0, 0, [*FIRST[0][:-1], "1: KeyError: 'x'"], halfway)
    found = look(run, halfway + timedelta(seconds=1))
    assert (found.state, found.error) == ("training", "KeyError: 'x'")
    assert look(run, halfway + timedelta(minutes=6)).state == "failed"


def test_a_rank_that_has_ended_is_a_failure_at_once(run, halfway):
    run(0, 0, [*FIRST[0][:-1], "1: KeyError: 'x'"], halfway)
    told = "srun: error: node1: task 1: Exited with exit code 1"
    run(0, 0, [told], halfway, log=run.folder.batch_log("1"))
    found = look(run, halfway + timedelta(seconds=1))
    assert (found.state, found.error) == ("failed", "KeyError: 'x'")


def test_an_error_that_training_survived_is_forgotten(run, halfway):
    run(0, 0, [*FIRST[0][:-1], "1: KeyError: 'x'"], halfway - timedelta(seconds=20))
    assert look(run, halfway + timedelta(minutes=6)).error == ""


def test_what_was_printed_of_an_earlier_start_is_forgotten(run):
    """1.log still says that the job was cancelled for the requeue."""
    text = (REAL / "logs" / "1.log").read_text()
    assert "JOB 1 ON node1 CANCELLED" in text
    run(0, 0, FIRST[0], LAST_LINE - timedelta(minutes=1))
    run(0, 0, text.splitlines(), LAST_LINE - timedelta(seconds=30), log=run.folder.batch_log("1"))
    run(1, 0, SECOND[0][:12], LAST_LINE)
    assert (look(run).state, look(run).error) == ("starting", "")


def test_a_job_that_was_cancelled(run, halfway):
    run(0, 0, (REAL / "logs" / "1.log").read_text().splitlines(), halfway, log=run.folder.batch_log("1"))
    found = look(run, halfway + timedelta(seconds=1))
    assert (found.state, found.ended) == ("stopped", True)
    assert found.error == "JOB 1 ON node1 CANCELLED AT 2026-11-22T15:10:33 DUE TO JOB REQUEUE"


# ---- skipped iterations, and how light it is --------------------------------------------------------


def test_skipped_iterations_and_losses_that_are_none(run):
    def line(iteration, told, skipped, nan):
        return (
            f" [2026-11-22 15:10:{iteration:02d}.000000] iteration {iteration:8d}/      60 | consumed samples: 4 |"
            f" elapsed time per iteration (ms): 500.0 | global batch size:     4 |{told} loss scale: 1.0 |"
            f" number of skipped iterations: {skipped:3d} | number of nan iterations: {nan:3d} |"
        )

    # fp16: the first is skipped, and is counted again in the second line, which it has no loss in.
    lines = [line(1, "", 1, 1), line(2, " lm loss: 4.0E+00 |", 1, 1), line(3, " lm loss: 0.0E+00 |", 1, 1)]
    run(0, 0, lines, LAST_LINE)
    found = look(run)
    assert (found.skipped, found.nan, found.loss, found.grad_norm) == (2, 2, 4.0, None)
    assert found.trend == ((2, 4.0),)
    assert (found.gpus, found.tokens_per_second, found.samples_per_second) == (None, None, 8.0)
    run(0, 0, [*lines, line(4, "", 0, 0)], LAST_LINE)
    assert str(look(run).loss) == "nan"


def test_nothing_heavy_is_imported():
    code = (
        "import sys; from megasched.cli import main as cli\n"
        "try: cli.main(['status', sys.argv[1]])\n"
        "finally: print([m for m in ('torch', 'transformers', 'megatron', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, REAL], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    assert "60 of 60" in done.stdout


# ---- what is no run ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "server.log"])
def test_a_log_of_something_else_is_no_run(tmp_path, name):
    (tmp_path / "server.log").write_text("GET / 200\nGET /favicon.ico 404\n")
    with pytest.raises(ConfigError, match=r"there is no run: no line of server\.log is megasched's or Megatron's"):
        RunReader(str(tmp_path / name)).look()


def test_a_folder_without_logs_is_no_run(tmp_path):
    with pytest.raises(ConfigError, match="there are no logs"):
        RunReader(str(tmp_path)).look()


@pytest.mark.parametrize(
    "text", ["", "megasched: megatron-core 0.19.2 from somewhere\n", "using world size: 2, Megatron\n"]
)
def test_a_log_that_has_only_begun_is_of_a_run(tmp_path, text):
    (tmp_path / "mine.log").write_text(text)
    assert RunReader(str(tmp_path)).look().state == "starting"


def test_what_the_launcher_has_made_is_a_run_whatever_it_prints_first(run):
    run(0, 0, ["Loading modules"], datetime.now())
    assert look(run).state == "starting"

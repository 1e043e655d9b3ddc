"""Hardware as a TOML file: what is written is what is read, and each figure says where it is from."""

import dataclasses
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megasched.planner.hardware.hardware import Hardware, Link, known_hardware, load_hardware
from megasched.planner.hardware.hardware_file import hardware_text

H100 = load_hardware("h100-80gb")
POSITIVE = st.floats(1e-9, 1e9) | st.integers(1, 10**6)


def read(text, folder):
    path = folder / "read.toml"
    path.write_text(text, encoding="utf-8")
    return load_hardware(str(path))


@pytest.mark.parametrize("name", known_hardware())
def test_what_comes_with_megasched_round_trips(name, tmp_path):
    found = load_hardware(name)
    assert read(hardware_text(found, (), name, ["a head"]), tmp_path) == found


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"])), POSITIVE, st.builds(Link, *[POSITIVE] * 3))
def test_any_name_and_any_number(tmp_path_factory, name, number, link):
    hardware = dataclasses.replace(H100, name=name, kernel_us=number, network=link)
    folder = tmp_path_factory.getbasetemp()
    assert read(hardware_text(hardware, (), "x", []), folder) == hardware


def test_each_figure_says_where_it_is_from():
    measured = {"kernel_us", "node.latency_us", "node.gpus"}
    text = hardware_text(H100, measured, "h100-80gb", ["first", "second"])
    assert text.startswith('# first\n# second\nname = "H100 SXM 80 GB"        # of h100-80gb\n')
    lines = [line for line in text.splitlines() if " = " in line]
    assert [line.split(" = ")[0] for line in lines if line.endswith("# measured")] == [
        *("kernel_us", "gpus", "latency_us")
    ]
    assert all(line.endswith(("# measured", "# of h100-80gb")) for line in lines)
    figures = [field.name for field in dataclasses.fields(Hardware)]
    assert set(tomllib.loads(text)) == set(figures) - {"gpus_per_node"}


def test_what_a_gpu_lacks_is_left_out():
    text = hardware_text(dataclasses.replace(H100, fp8_tflops=None, fp8_efficiency=None), (), "x", [])
    assert "fp8" not in text

"""A small Llama and a schedule for it, and what ``show`` says of them."""

from pathlib import Path

import pytest

from megasched.cli import main
from megasched.language.parallel_dims import ParallelDims

SCHEDULE = """\
def schedule(sch, layout):
    sch["model.embed_tokens"].shard("weight", axis=0)
    for layer in sch["model.layers"]:
        for name in ("q_proj", "k_proj", "v_proj"):
            layer["self_attn"][name].shard("weight", axis=0)
        layer["self_attn.o_proj"].shard("weight", axis=1)
        for name in ("gate_proj", "up_proj"):
            layer["mlp"][name].shard("weight", axis=0)
        layer["mlp.down_proj"].shard("weight", axis=1)
    sch["lm_head"].shard("weight", axis=0)
"""


@pytest.fixture(scope="session")
def llama(tmp_path_factory) -> str:
    """Folder of a Llama of four layers, hidden 32, eight heads and two kv heads of 4, MLP 64, vocabulary 300."""
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("llama")
    LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=64,
    ).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def write(tmp_path):
    """Writes a schedule file: the one above, with more lines in its function; returns its path."""

    def write(*lines: str) -> str:
        path: Path = tmp_path / "mysched.py"
        path.write_text(SCHEDULE + "".join(f"    {line}\n" for line in lines))
        return str(path)

    return write


@pytest.fixture
def inspect(llama, write):
    """A report of the schedule with more lines, at a layout given by Megatron's short names."""
    from megasched.cli.show.report import inspect_schedule

    def inspect(*lines: str, tp=1, sp=False, pp=1, vp=None, schedule=None, **options):
        layout = ParallelDims(
            tensor_model_parallel_size=tp,
            sequence_parallel=sp,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vp,
        )
        return inspect_schedule(schedule or write(*lines), llama, layout, **options)

    return inspect


@pytest.fixture
def run(capsys):
    """Runs a command in this process: exit status, stdout, stderr."""

    def run(*argv):
        with pytest.raises(SystemExit) as stop:
            main.main([str(word) for word in argv])
        captured = capsys.readouterr()
        return stop.value.code or 0, captured.out, captured.err

    return run


@pytest.fixture
def schedule(tmp_path):
    path = tmp_path / "mysched.py"
    path.write_text(SCHEDULE)
    return path

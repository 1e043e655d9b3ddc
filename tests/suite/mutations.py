"""Do the tests of `make test` still bite? Faults are planted in the product, one at a time; each must be found.

    .venv/bin/python -m tests.suite.mutations            # all of them: some 40 minutes on two cores
    .venv/bin/python -m tests.suite.mutations --only scale_of_attention

Each fault names the tests that are to find it; they run first, and `make test` would fail with them. Where they
pass, all of `make test` runs. It works in this checkout and puts every file back; a file with changes that are not
committed is left alone.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from tests.process import ROOT

FAST = ["-m", "not slow and not browser", "-q", "-x", "-p", "no:cacheprovider"]


@dataclass(frozen=True)
class Mutation:
    """A fault.

    Attributes:
        kind: what goes wrong.
        file: in which it is planted.
        old: what stands there, exactly once.
        new: what it becomes.
        tests: files or tests that are to find it.
    """

    kind: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MATRIX, EXPERTS = "tests/parity/test_matrix.py", "tests/parity/test_experts.py"
MUTATIONS = {
    "backward_all_reduce": Mutation(
        "a lost all-reduce of column-parallel linears in the backward pass",
        "megasched/layers/linear.py",
        "disable_grad_reduce=entered,",
        "disable_grad_reduce=True,",
        (MATRIX, "tests/lowering/test_build.py"),
    ),
    "replicated_heads_reduce": Mutation(
        "a lost all-reduce where several ranks have one k/v head",
        "megasched/layers/linear.py",
        "            x = copy_to_tensor_model_parallel_region(x, group=self.group)\n        elif",
        "            x = x.clone()\n        elif",
        ("tests/parity/test_few_heads.py",),
    ),
    "norm_gradient": Mutation(
        "a partial gradient that is not summed over TP under sequence parallelism",
        "megasched/layers/build_context.py",
        "    parameter.sequence_parallel = context.megatron_finalizes and context.plan.layout.sp\n",
        "    parameter.sequence_parallel = False\n",
        (MATRIX,),
    ),
    "packed_projections": Mutation(
        "swapped components of a packed projection, when shards are put together",
        "megasched/plan/placement.py",
        "for i in range(len(lengths)) for rank in range(size)",
        "for rank in range(size) for i in range(len(lengths))",
        ("tests/test_placement.py",),
    ),
    "pipeline_cut": Mutation(
        "an off-by-one in a pipeline cut that the schedule asks for",
        "megasched/plan/pipeline.py",
        "ends.add(index + 1)",
        "ends.add(index)",
        ("tests/parity/test_training_forms.py",),
    ),
    "buffer": Mutation(
        "a persistent buffer that is not read from the folder",
        "megasched/weights/source.py",
        "if buffer.is_meta else buffer.copy_(value)\n",
        "if buffer.is_meta else buffer.zero_()\n",
        ("tests/parity/test_mixture_blocks.py", "tests/parity/test_weights.py"),
    ),
    "scale_of_attention": Mutation(
        "a wrong scale of attention",
        "megasched/layers/torch_attention.py",
        "is_causal=causal, scale=scaling,",
        "is_causal=causal, scale=None,",
        ("tests/layers/test_attention.py", "tests/parity/test_attentions.py"),
    ),
    "window": Mutation(
        "a window that is a key too long under context parallelism",
        "megasched/definition/sequence_split.py",
        "(behind >= 0) & (behind < window)",
        "(behind >= 0) & (behind <= window)",
        ("tests/definition/test_sequence_split.py", "tests/parity/test_context.py"),
    ),
    "zigzag": Mutation(
        "a part of the sequence that is another rank's",
        "megasched/definition/sequence_split.py",
        "return self.rank, 2 * self.size - 1 - self.rank",
        "return self.rank, self.size + self.rank",
        ("tests/definition/test_sequence_split.py",),
    ),
    "vocabulary_padding": Mutation(
        "padding of the vocabulary that takes part in the softmax",
        "megasched/layers/losses/cross_entropy.py",
        "if real < logits.shape[-1]:",
        "if real < 0:",
        (MATRIX,),
    ),
    "padding_id": Mutation(
        "a gradient for the embedding of the padding id",
        "megasched/layers/embedding.py",
        "    if module.padding_idx is None:\n        return found\n",
        "    if True:\n        return found\n",
        ("tests/layers/test_embedding.py",),
    ),
    "expert_gradients": Mutation(
        "gradients of experts that are summed over ranks with other experts",
        "megasched/layers/experts.py",
        "parameter.allreduce = False",
        "parameter.allreduce = True",
        (EXPERTS,),
    ),
    "expert_choice": Mutation(
        "tokens that go to the expert of another choice",
        "megasched/layers/fused/pairs.py",
        "return Pairs(order // like.shape[-1],",
        "return Pairs(order % like.shape[0],",
        (EXPERTS, "tests/layers/test_experts.py"),
    ),
    "lora_scaling": Mutation(
        "an adapter that is not scaled",
        "megasched/lowering/lora.py",
        "(module.lora_dropout(x))) * self.lora.scaling",
        "(module.lora_dropout(x)))",
        ("tests/language/test_adapt.py", "tests/parity/test_lora.py"),
    ),
    "shared_by_stages": Mutation(
        "a parameter that layers of several stages share, with the gradient of one stage",
        "megasched/trainer/stages/shared_parameters.py",
        "        torch.distributed.all_reduce(total, group=group)\n",
        "",
        ("tests/parity/test_sides.py", "tests/parity/test_parts.py"),
    ),
    "random_states": Mutation(
        "another dropout mask in the recomputed forward",
        "megasched/layers/recompute/recompute.py",
        "            tracker.set_states(_copied(self.states))\n",
        "            pass\n",
        ("tests/language/test_fork_rng.py", "tests/language/test_checkpoint.py"),
    ),
    "contradicted_sync": Mutation(
        "a missing refusal: a sync that contradicts the placement",
        "megasched/plan/communication.py",
        "    if op != expected:\n",
        "    if not op and expected is not None:\n",
        ("tests/language/test_sync.py",),
    ),
    "overlap_with_shared": Mutation(
        "a missing refusal: gradients reduced over DP before they are summed over stages",
        "megasched/trainer/stages/shared_parameters.py",
        "    if shared:\n",
        "    if shared and not overlap_grad_reduce:\n",
        ("tests/parity/test_sides.py",),
    ),
    "flag": Mutation(
        "a missing refusal: a flag that would be ignored",
        "megasched/trainer/flags/refused_flags.py",
        '"mtp_*"',
        '"mtp_none"',
        ("tests/trainer/flags/test_flag_classes.py", "tests/test_docs.py"),
    ),
    "unknown_flag": Mutation(
        "a missing refusal: a flag of a Megatron that nobody has looked at",
        "megasched/trainer/flags/flag_classes.py",
        "        if unknown and not flag_class(dest):\n",
        "        if unknown and flag_class(dest) is None:\n",
        ("tests/trainer/flags/test_flag_classes.py",),
    ),
    "pickle": Mutation(
        "a missing refusal: a pickle that names a function",
        "megasched/weights/torch_dist/unpickling.py",
        "        found = _known(module, name)\n",
        "        found = super().find_class(module, name)\n",
        ("tests/weights/test_reader.py",),
    ),
    "half_a_folder": Mutation(
        "a folder that is left behind half written",
        "megasched/files.py",
        "        shutil.rmtree(beside, ignore_errors=True)\n",
        "        os.replace(beside, path)\n",
        ("tests/faults/test_transfers.py", "tests/weights/test_round_trip.py"),
    ),
    "seed": Mutation(
        "random weights that depend on the layout",
        "megasched/weights/random_init.py",
        "seeded(parameter_seed(self._seed, name)), ",
        "",
        ("tests/weights/test_random_init.py", MATRIX),
    ),
    "tolerance": Mutation(
        "a verifier that lets wrong numbers through",
        "megasched/verify/parity.py",
        "TOLERANCE = 1e-5",
        "TOLERANCE = 1.0",
        ("tests/verify/test_parity.py", "tests/verify/test_verify.py"),
    ),
    "flops": Mutation(
        "FLOPs of attention that count keys nobody attends to",
        "megasched/analysis/attention_flops.py",
        "    if not causal:\n        return float(queries * keys)\n",
        "    if True:\n        return float(queries * keys)\n",
        ("tests/analysis/test_flops.py",),
    ),
}


@contextmanager
def planted(mutation: Mutation) -> Iterator[None]:
    """A fault in the checkout, as long as it lasts."""
    path = ROOT / mutation.file
    unchanged = ["git", "diff", "--quiet", "HEAD", "--", mutation.file]
    if subprocess.run(unchanged, cwd=ROOT, check=False).returncode:
        raise SystemExit(f"{mutation.file} has changes that are not committed")
    text = path.read_text()
    assert text.count(mutation.old) == 1, mutation
    try:
        path.write_text(text.replace(mutation.old, mutation.new))
        yield
    finally:
        path.write_text(text)


def found_by(mutation: Mutation) -> str:
    """The first test that fails under a fault; empty where none does."""
    for tests in (mutation.tests, ()):
        processes = [] if tests else ["-n", "2"]
        command = [sys.executable, "-m", "pytest", *FAST, *processes, *tests]
        env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        if run.returncode == 1 and failed:
            return failed[0].split()[1]
        if run.returncode not in (0, 1):
            raise SystemExit(f"{' '.join(command)}\n{run.stdout}{run.stderr}")
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=MUTATIONS, default=list(MUTATIONS), metavar="NAME")
    names = parser.parse_args().only
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # files are put back
    table, survived = Table("fault", "found by", "seconds"), 0
    for name in names:
        start = time.monotonic()
        with planted(MUTATIONS[name]):
            found = found_by(MUTATIONS[name])
        survived += not found
        print(f"{name}: {found or 'NOT FOUND'}", flush=True)
        table.add_row(MUTATIONS[name].kind, found or "[bold]nothing[/bold]", f"{time.monotonic() - start:.0f}")
    Console(width=160).print(table)
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())

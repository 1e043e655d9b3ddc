"""What the matrix calls equal trains on a ghost GPU at each level, or is refused with a reason."""

import json
import re

import pytest

from megasched.trainer.evidence.matrix import load_matrix
from tests.ghost import process
from tests.ghost.sweep_case import Result
from tests.model_adapters.facts import facts_of

# Level -> what may be refused at it.
REFUSED = {
    "leaf": (),
    "fused": (),
    "parts": (),
    "block": (
        r"Megatron's layer can't stand for this one: no block is known for model type '[\w-]+'",
        r"attn_logit_softcapping is 50\.0, and Megatron's layer computes what None does",
    ),
}
# A block is known of it, for configs without a soft cap.
SPECIAL = {"vaultgemma"}
# transformers' own code multiplies float32 by bfloat16 where the package xlstm is missing.
UNSUPPORTED = {"xlstm"}
LONGEST = 3500  # seconds of a sweep where other work shares the machine; a third of it is usual

pytestmark = pytest.mark.usefixtures("transformer_engine")


def equal_types():
    """Architectures that were equal at some layout."""
    for model_type, found in load_matrix()["types"].items():
        if any(outcome.get("verdict") == "equal" for outcome in found.values()):
            yield model_type


def sweep(folder, pairs):
    """Results of pairs of an architecture and a level, as the matrix makes models and batches."""
    given, output = folder / "pairs.json", folder / "results"
    given.write_text(json.dumps(pairs))
    arguments = ["-m", "tests.ghost.sweep_case", str(given), str(output)]
    process.run(arguments, te=True, timeout=LONGEST, **process.INTEGERS)
    results = [Result(**json.loads(line)) for line in output.read_text().splitlines()]
    assert sorted((result.model_type, result.level) for result in results) == sorted(pairs)
    return results


def assert_run_or_refused(results):
    """None has failed but those of which plain transformers does; a refusal says a reason that is listed here."""
    failed = [f"{each.model_type} at {each.level}:\n{each.why}" for each in results if each.outcome == "failed"]
    assert not failed, "\n\n".join(failed)
    assert {each.model_type for each in results if each.outcome == "unsupported"} <= UNSUPPORTED
    refused = [each for each in results if each.outcome == "refused"]
    unknown = [
        f"{each.model_type} at {each.level}:\n{each.why}"
        for each in refused
        if not any(re.search(reason, each.why) for reason in REFUSED[each.level])
    ]
    assert not unknown, "\n\n".join(unknown)


def test_some_run_and_one_is_refused(tmp_path):
    results = sweep(tmp_path, [("gpt2", "parts"), ("mixtral", "block"), ("gemma2", "block")])
    assert_run_or_refused(results)
    assert [each.model_type for each in results if each.outcome == "refused"] == ["gemma2"]


@pytest.mark.slow
@pytest.mark.timeout(LONGEST + 60)
@pytest.mark.parametrize("level", REFUSED)
def test_every_architecture_runs_or_is_refused_with_a_reason(tmp_path, level):
    results = sweep(tmp_path, [(model_type, level) for model_type in equal_types()])
    assert_run_or_refused(results)
    refused = {each.model_type for each in results if each.outcome == "refused"}
    assert refused & facts_of("layer").keys() <= SPECIAL

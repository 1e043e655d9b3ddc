"""What an evaluation changes, or computes, that training does not: refused while flags are parsed."""

from __future__ import annotations

import pytest

from megasched.definition.small_models.small_models import write_small_model
from megasched.errors import ConfigError, ScheduleError
from megasched.trainer.session_from_args import begin_session
from tests import remote
from tests.trainer.test_session_from_args import arguments


def test_no_checkpoint_holds_what_an_evaluation_makes_of_weights(tmp_path):
    """RWKV divides weights to evaluate, and multiplies them again when it trains."""
    write_small_model("rwkv", tmp_path)
    given = {"world_size": 1, "allow_unverified": True}
    message = r"an evaluation changes parameters \(.*weight and \d+ more\) until .* --hf-override rescale_every=0"
    with pytest.raises(ConfigError, match=message):
        begin_session(arguments(tmp_path, save="checkpoints", **given), {})
    begin_session(arguments(tmp_path, save="checkpoints", hf_override=["rescale_every=0"], **given), {})
    for other in ({"save": None}, {"eval_interval": None}, {"eval_iters": 0}):
        begin_session(arguments(tmp_path, **{"save": "checkpoints", **given, **other}), {})


COUNTS_WHAT_IT_EVALUATES = """
    self.register_buffer("seen", torch.zeros(()))

    def counted(module, args):
        if not module.training:
            self.seen += args[0].float().mean()

    self.model.embed_tokens.register_forward_pre_hook(counted)
    """


NUMPY_WHEN_IT_EVALUATES = """
    def counted(module, args, output):
        return output if module.training else output * float(output.numpy().mean() > -1)

    self.model.layers[0].mlp.register_forward_hook(counted)
    """


def test_what_an_evaluation_computes_must_be_known_of_a_model_that_is_split(tmp_path):
    folder = remote.write_changed(tmp_path, NUMPY_WHEN_IT_EVALUATES)
    given = {"trust_remote_code": True, "allow_unverified": True, "world_size": 2}
    with pytest.raises(ScheduleError, match="what it computes when it evaluates is not known: the forward fails"):
        begin_session(arguments(folder, tensor_model_parallel_size=2, **given), {})
    begin_session(arguments(folder, tensor_model_parallel_size=2, eval_interval=None, **given), {})
    begin_session(arguments(folder, **given), {})


def test_replicas_do_not_keep_what_each_evaluates(tmp_path):
    folder = remote.write_changed(tmp_path, COUNTS_WHAT_IT_EVALUATES)
    given = {"trust_remote_code": True, "allow_unverified": True}
    message = r"an evaluation changes buffers \(seen\), and each replica would come to others"
    with pytest.raises(ScheduleError, match=message):
        begin_session(arguments(folder, world_size=2, **given), {})
    begin_session(arguments(folder, world_size=1, **given), {})

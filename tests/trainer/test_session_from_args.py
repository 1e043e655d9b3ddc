"""What is refused while flags are parsed, before any process group exists."""

from __future__ import annotations

from argparse import Namespace

import pytest
from megatron.core.transformer.enums import AttnBackend
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from megasched.definition.small_models.small_models import write_small_model
from megasched.errors import CheckpointError, ConfigError, ScheduleError
from megasched.printing.shell_command import shell_command
from megasched.trainer.checkpoint.source import CheckpointPlaceholder, loaded_folder
from megasched.trainer.current_session import get_session
from megasched.trainer.flags.moe import NOTHING_ASKED
from megasched.trainer.session_from_args import begin_session
from tests import tiny
from tests.parity.levels import SCHEDULE


def arguments(folder, schedule="auto", **changes):
    values = {
        "model_schedule": str(schedule),
        "hf_model": str(folder),
        "hf_override": [],
        "hf_random_init": True,
        "load": None,
        "pretrained_checkpoint": None,
        "finetune": False,
        "ckpt_format": "torch_dist",
        "trust_remote_code": False,
        "objective": None,
        "adapter": None,
        "allow_unverified": False,
        "require_certificate": None,
        "schedule_option": [],
        "seed": 1234,
        "rank": 0,
        "gradient_accumulation_fusion": True,
        "recompute_modules": None,
        "calculate_per_token_loss": False,
        "transformer_impl": "transformer_engine",
        "apply_rope_fusion": True,
        "no_persist_layer_norm": False,
        "masked_softmax_fusion": True,
        "attention_backend": AttnBackend.auto,
        "flash_attention_version": None,
        "overlap_grad_reduce": False,
        "fp8": None,
        "tp_comm_overlap": False,
        **NOTHING_ASKED,
        "sft": False,
        **dict.fromkeys(("split", "train_data_path", "valid_data_path", "test_data_path")),
        "bf16": False,
        "fp16": False,
        "optimizer_cpu_offload": False,
        "eval_interval": 10,
        "eval_iters": 1,
        "full_validation": False,
        "save": None,
        "seq_length": 16,
        "micro_batch_size": 1,
        "eval_micro_batch_size": None,
        "make_vocab_size_divisible_by": 4,
        "num_layers": 4,
        "moe_layer_freq": 1,
        "world_size": 4,
        "tensor_model_parallel_size": 1,
        "sequence_parallel": False,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "pipeline_model_parallel_layout": None,
        "num_layers_per_virtual_pipeline_stage": None,
        "num_virtual_stages_per_pipeline_rank": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
    }
    return Namespace(**{**values, **changes})


def written(tmp_path, body):
    path = tmp_path / "mysched.py"
    path.write_text("def schedule(sch, layout):\n" + "".join(f"    {line}\n" for line in body))
    return path


@pytest.fixture
def llama(tmp_path):
    return tiny.save("llama", tmp_path / "llama")


def test_the_balanced_cut_becomes_megatrons_layout(llama):
    args = arguments(llama, pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2)
    begin_session(args, {})
    assert args.pipeline_model_parallel_layout == "Et|t|t|tL"
    assert args.num_virtual_stages_per_pipeline_rank is None
    assert get_session().schedule.layout.vpp == 2


def test_sizes_of_batches_that_are_missing_are_named(llama):
    with pytest.raises(ConfigError, match=r"^--micro-batch-size missing: say how large"):
        begin_session(arguments(llama, micro_batch_size=None), {})
    with pytest.raises(ConfigError, match=r"^--seq-length and --micro-batch-size missing"):
        begin_session(arguments(llama, micro_batch_size=None, seq_length=None), {})


def test_an_optimizer_of_float32_parameters_beside_bf16_stays_on_the_gpu(tmp_path):
    write_small_model("deepseek_v3", tmp_path)
    changes = {"optimizer_cpu_offload": True, "allow_unverified": True, "world_size": 1}
    with pytest.raises(
        ConfigError, match=r"--optimizer-cpu-offload: the model keeps .*mlp\.gate\.weight.* in float32"
    ):
        begin_session(arguments(tmp_path, bf16=True, **changes), {})
    begin_session(arguments(tmp_path, **changes), {})


def test_rows_that_megatrons_attention_joins_are_one_in_validation_too(llama, tmp_path):
    """Under sequence parallelism; their loss would be that of other tokens."""
    schedule = tmp_path / "block.py"
    schedule.write_text(SCHEDULE.format(where="model.layers.*", level="block"))
    sft = {"sft": True, "sft_tokenizer_prompt_format": "identity", "allow_unverified": True}
    sft |= {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    with pytest.raises(ConfigError, match=r"--eval-micro-batch-size 2: Megatron's attention \(model\.layers\.0\)"):
        begin_session(arguments(llama, schedule, eval_micro_batch_size=2, **sft), {})
    begin_session(arguments(llama, schedule, **sft), {})


def test_a_rehearsal_refuses_what_flags_that_it_leaves_out_ask_of_the_model(llama, tmp_path, monkeypatch):
    def on_cluster(**flags):
        monkeypatch.setattr("megasched.trainer.current_session._on_cluster", [arguments(llama, **flags)])

    on_cluster(moe_grouped_gemm=True)
    with pytest.raises(ScheduleError, match="--moe-grouped-gemm: Megatron's own mixtures of experts do that"):
        begin_session(arguments(llama), {})
    schedule = tmp_path / "fused.py"
    schedule.write_text(SCHEDULE.format(where="model.layers.*", level="fused"))
    on_cluster(tp_comm_overlap=True)
    with pytest.raises(ScheduleError, match="--tp-comm-overlap: only Megatron's own layers"):
        begin_session(arguments(llama, schedule), {})
    begin_session(arguments(llama), {})


def test_a_run_that_no_check_covers_is_refused_until_it_is_allowed(llama, monkeypatch):
    monkeypatch.setattr("megasched.trainer.evidence.compatibility.load_matrix", lambda: {"types": {}})
    for one_rank in (arguments(llama), arguments(llama, world_size=1)):
        with pytest.raises(ConfigError, match="model type 'llama' has not been checked"):
            begin_session(one_rank, {})
    with pytest.raises(ConfigError, match="model type 'llama' has not been checked"):
        begin_session(arguments(llama, tensor_model_parallel_size=2), {})
    begin_session(arguments(llama, tensor_model_parallel_size=2, allow_unverified=True), {})


def test_options_that_were_not_checked_are_a_warning(tmp_path, capsys):
    folder = tiny.save("llama", tmp_path / "biased", attention_bias=True)
    begin_session(arguments(folder, tensor_model_parallel_size=4), {})
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "warning" in line)
    assert "attention_bias=True" in line
    model = ("--model-schedule", "auto", "--hf-model", folder)
    assert line.endswith(f"`{shell_command('verify', *model, '--tensor-model-parallel-size', '2')}`")


def test_a_fusion_without_its_kernel_is_off_and_said_so(llama, capsys):
    args = arguments(llama)
    begin_session(args, {})
    assert args.gradient_accumulation_fusion is False
    assert args.apply_rope_fusion is False
    said = capsys.readouterr().out
    assert "gradient accumulation fusion is off" in said
    assert "Transformer Engine is not installed" in said


def test_tensors_that_the_class_leaves_aside_are_said(llama, capsys, monkeypatch):
    later = [f"model.layers.46.{name}" for name in "abcd"]
    monkeypatch.setattr("megasched.weights.hf.folder.HFFolder.passed_over", later)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(llama)).save_pretrained(llama)
    begin_session(arguments(llama, hf_random_init=False), {})
    assert (
        "megasched: not taken, as LlamaForCausalLM does not take them: model.layers.46.a"
        in capsys.readouterr().out
    )
    begin_session(arguments(llama, hf_random_init=True), {})
    assert "not taken" not in capsys.readouterr().out


def test_a_loss_that_is_another_one_for_the_runs_batches(llama, monkeypatch):
    plain = LlamaForCausalLM.forward

    def forward(self, input_ids=None, labels=None, **kwargs):
        output = plain(self, input_ids=input_ids, labels=labels, **kwargs)
        if output.loss is not None and input_ids.shape == (4, 100):
            output.loss = output.loss.exp()
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    longer = {"seq_length": 100, "allow_unverified": True}
    begin_session(arguments(llama, **longer), {})
    for rows in ({"micro_batch_size": 4}, {"eval_micro_batch_size": 4}):
        with pytest.raises(ScheduleError, match="for 4 x 100 tokens it has a loss of its own"):
            begin_session(arguments(llama, **longer, **rows), {})


def test_without_an_interval_nothing_is_evaluated_as_megatron_says(llama, capsys):
    args = arguments(llama, eval_interval=None)
    begin_session(args, {})
    assert 1_000_000_000 // args.eval_interval + 1 == 1  # what Megatron counts its evaluations by
    assert "nothing is evaluated during training" in capsys.readouterr().out


def test_flags_for_uneven_stages_are_left_to_megatron(llama):
    args = arguments(llama, pipeline_model_parallel_size=2)
    begin_session(args, {"decoder_first_pipeline_num_layers": 3})
    assert args.pipeline_model_parallel_layout is None


def test_more_stages_than_layers(llama):
    args = arguments(llama, pipeline_model_parallel_size=4, num_virtual_stages_per_pipeline_rank=2)
    with pytest.raises(ScheduleError, match="PP x VPP = 8 stages for 4 layers"):
        begin_session(args, {})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (['sch["model.layers.0.mlp"].cut_pipeline_stage()'], "can only end after a whole layer"),
        (['sch["model.layers.3"].cut_pipeline_stage()'], "no cut goes after the last layer"),
        (['sch["model.layers"][0:2].cut_pipeline_stage()'], "2 cuts make 3 stages; PP x VPP is 2"),
    ],
)
def test_cuts_that_do_not_fit_name_their_line(llama, tmp_path, body, message):
    path = written(tmp_path, body)
    with pytest.raises(ScheduleError, match=message) as refused:
        begin_session(arguments(llama, path, pipeline_model_parallel_size=2), {})
    assert f"{path}:2" in str(refused.value)


def test_cuts_in_the_schedule_and_by_flag(llama, tmp_path):
    path = written(tmp_path, ['sch["model.layers.1"].cut_pipeline_stage()'])
    args = arguments(llama, path, pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Ett|ttL")
    with pytest.raises(ScheduleError, match="so does --pipeline-model-parallel-layout"):
        begin_session(args, {"pipeline_model_parallel_layout"})


def test_heads_that_do_not_divide(llama):
    with pytest.raises(ScheduleError, match="TP 3 does not divide 4 heads"):
        begin_session(arguments(llama, world_size=3, tensor_model_parallel_size=3), {})


def test_ranks_that_do_not_divide(llama):
    with pytest.raises(ConfigError, match="4 ranks are no multiple of TP 8"):
        begin_session(arguments(llama, tensor_model_parallel_size=8), {})


def test_sequences_that_sequence_parallelism_cannot_cut(llama):
    given = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    with pytest.raises(ConfigError, match="2 does not divide the 15 positions"):
        begin_session(arguments(llama, seq_length=15, **given), {})
    begin_session(arguments(llama, seq_length=15, tensor_model_parallel_size=2), {})
    joined = {"sft": True, "sft_tokenizer_prompt_format": "identity"}
    begin_session(arguments(llama, seq_length=15, micro_batch_size=2, **joined, **given), {})


def test_every_problem_is_in_one_report(llama, tmp_path):
    path = written(
        tmp_path,
        [
            'sch["model.layers.0.mlp.up_proj"].shard("wieght", axis=0)',
            'sch["model.layers.0.mlp.down_proj"].shard("weight", axis=2)',
            'sch["lm_head"].shard("weight", axis=0)',
            'sch["lm_head"].shard("weight", axis=0)',
        ],
    )
    with pytest.raises(ScheduleError) as refused:
        begin_session(arguments(llama, path, tensor_model_parallel_size=2), {})
    assert len(refused.value.problems) == 3
    assert [p.source.rpartition(":")[2] for p in refused.value.problems] == ["2", "3", "5"]


def test_replaced_weights_that_a_function_computes_are_refused_in_a_run(llama, tmp_path):
    """They would be overwritten by name when the weights are filled in."""
    path = written(
        tmp_path,
        [
            "import torch",
            "norm = lambda old: torch.nn.RMSNorm(32, eps=1e-6)",
            'sch["model.norm"].replace(norm, weights={"weight": lambda old: 3.0 * old["weight"]})',
        ],
    )
    with pytest.raises(ScheduleError, match="which a training run can't do") as refused:
        begin_session(arguments(llama, path), {})
    assert f"{path}:4" in str(refused.value)


def test_a_folder_without_weights_needs_random_init(llama):
    with pytest.raises(ConfigError, match="pass --hf-random-init"):
        begin_session(arguments(llama, hf_random_init=False), {})


def test_weights_of_another_model_are_refused_with_their_names(tmp_path):
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "qwen2"
    AutoModelForCausalLM.from_config(tiny.config("qwen2")).save_pretrained(folder)
    tiny.save("llama", folder)  # the config of another architecture over its weights
    with pytest.raises(CheckpointError, match=r"q_proj\.bias"):
        begin_session(arguments(folder, hf_random_init=False), {})


def test_linears_that_8_bits_do_not_reach_are_named(tmp_path, capsys):
    """Two heads of k and v on four ranks; the head of the first layer's attention is told of by name."""
    folder = tiny.save("llama", tmp_path / "llama", hidden_size=64, intermediate_size=192)
    asked = {"fp8": "hybrid", "fp8_recipe": "tensorwise", "first_last_layers_bf16": False}
    begin_session(arguments(folder, world_size=4, tensor_model_parallel_size=4, **asked), {})
    names = [f"model.layers.{path}_proj" for path in ("0.self_attn.k", "0.self_attn.v", "1.self_attn.k")]
    assert f"linears that stay in 16 bits: {', '.join(names)} and 5 more" in capsys.readouterr().out


def test_a_certificate_stands_for_the_checks_that_were_not_made(tmp_path):
    """Of the same config and schedule; a run that it does not speak for ends here."""
    from transformers import AutoConfig

    from megasched.definition.build import build_definition
    from megasched.language.parallel_dims import ParallelDims
    from megasched.trainer.evidence.certificate import subject_of, write_certificate

    folder = tiny.save("llama", tmp_path / "llama")
    path = tmp_path / "certificate.json"
    layout = ParallelDims(tensor_model_parallel_size=2)
    definition = build_definition(AutoConfig.from_pretrained(folder))
    write_certificate(path, subject_of("auto", definition, layout), {"verdict": "equal"})
    begin_session(arguments(folder, tensor_model_parallel_size=4, require_certificate=str(path)), {})
    with pytest.raises(ConfigError, match="it was made without PP"):
        begin_session(arguments(folder, pipeline_model_parallel_size=2, require_certificate=str(path)), {})
    changed = arguments(folder, require_certificate=str(path), hf_override=["rms_norm_eps=0.1"])
    with pytest.raises(ConfigError, match="the model is another one"):
        begin_session(changed, {})


def test_options_of_the_schedule_reach_its_function(tmp_path):
    schedule = tmp_path / "mine.py"
    schedule.write_text("def schedule(sch, layout, ratio=0):\n    raise ValueError(f'ratio {ratio}')\n")
    model = tiny.save("llama", tmp_path)
    given = arguments(model, str(schedule), schedule_option=["ratio=0.5"])
    with pytest.raises(ScheduleError, match=r"ValueError: ratio 0\.5"):
        begin_session(given, {})


def test_the_checkpoint_that_megatron_loads_and_whether_a_run_begins_anew_from_it(tmp_path):
    """A run's own checkpoint comes before the one that it was begun with."""
    for name in ("own", "before"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "latest_checkpointed_iteration.txt").write_text("3")
    own, before, missing = (str(tmp_path / name) for name in ("own", "before", "missing"))

    def found(load, pretrained, finetune=False):
        args = Namespace(load=load, pretrained_checkpoint=pretrained, finetune=finetune)
        return loaded_folder(args)

    assert found(None, None) is None
    assert found(missing, None) is None
    assert found(own, None) == (tmp_path / "own", False)
    assert found(own, before) == (tmp_path / "own", False)
    assert found(own, before, finetune=True) == (tmp_path / "own", True)
    assert found(missing, before) == found(None, before) == (tmp_path / "before", True)


def test_a_run_with_a_pretrained_checkpoint_needs_no_weights_beside_the_config(llama, tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    begin_session(arguments(llama, hf_random_init=False, pretrained_checkpoint=str(tmp_path)), {})
    assert isinstance(get_session().source, CheckpointPlaceholder)


ONLY_MLP = """
from megasched.model_adapters.registry import Adapter

ADAPTER = Adapter(
    model_types=("llama",),
    roles={"model.layers.*.mlp.up_proj": "mlp.up", "model.layers.*.mlp.down_proj": "mlp.down"},
)
"""


def test_the_adapter_of_a_file_says_the_roles_of_the_run(llama, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(ONLY_MLP)
    begin_session(arguments(llama, adapter=str(file), tensor_model_parallel_size=2), {})
    roles = get_session().schedule.roles.role
    assert set(roles.values()) == {"mlp.up", "mlp.down"}


def test_an_adapter_of_another_model_is_refused(llama, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(ONLY_MLP.replace("llama", "gpt2"))
    with pytest.raises(ConfigError, match=r"mine.py: it is for model type gpt2, and this model is of 'llama'"):
        begin_session(arguments(llama, adapter=str(file)), {})

"""Trains a GPT for people who have the megatron-core wheel and no Megatron-LM checkout.

This entry script takes the flags of Megatron-LM's own pretrain_gpt.py and holds only the trainer's side: data,
forward step, loss. The model is the one that megasched's builder makes; without megasched, the script trains
Megatron's own GPT.

    torchrun ... -m megasched pretrain_gpt.py --model-schedule mysched.py --hf-model DIR <Megatron's flags>
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import (
    StragglerDetector,
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import argument_utils, get_args, get_timers, inprocess_restart, pretrain, print_rank_0
from megatron.training.arguments import parse_and_validate_args
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from megasched.errors import ConfigError
from megasched.reading.files import Expected
from megasched.reading.json_file import read_json

Batch = dict[str, torch.Tensor | None]
LossReport = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]

BATCH_FIELDS = ("tokens", "position_ids", "attention_mask", "labels", "loss_mask")
# What ``SFTDataset`` adds to the fields of other data sets.
PACKED_FIELDS = ("cu_seqlens", "max_seqlen")

SEQUENCES = Expected("sequences and documents of each data set by its path", flag="--per-dataset-sequences-path")

# Made once: Megatron's class has one object, and each call of the class switches it off again.
straggler = StragglerDetector()

# A loss this many times the largest one seen so far counts as a spike (--check-for-spiky-loss).
SPIKE_FACTOR = 10

# Megatron's flag (its name in `args`) -> why this script can't serve it.
UNSUPPORTED = {
    "fim_data": "fill-in-the-middle data needs Megatron-LM's own dataset",
    "dataloader_inter_document_masking": "it packs documents into one sequence",
    "hybrid_context_parallel": "it packs sequences of different lengths",
    "logits_save_dir": "distillation needs the teacher's side of Megatron-LM",
    "logits_load_dir": "distillation needs the teacher's side of Megatron-LM",
    "mtp_num_layers": "multi-token prediction is a part of Megatron's own GPT layers",
    "overlap_moe_expert_parallel_comm": "its schedule plan exists for Megatron's own GPT layers only",
}


def refuse_unsupported(args: Namespace) -> None:
    """Raises ConfigError, naming every flag in ``args`` that this script leaves to Megatron-LM's."""
    asked = [
        f"--{name.replace('_', '-')}: {why}" for name, why in UNSUPPORTED.items() if getattr(args, name, None)
    ]
    if asked:
        raise ConfigError(
            "the pretrain_gpt.py that comes with megasched does not take\n  "
            + "\n  ".join(asked)
            + "\nleave the flag out, or run the pretrain_gpt.py of a Megatron-LM checkout"
        )


# ---- data -------------------------------------------------------------------------------------------


def uses_batches(vp_stage: int | None) -> bool:
    """Returns whether a stage needs a batch: tokens (first), labels (last), or sequence bounds (all, in SFT)."""
    return get_args().sft or is_first_or_last_pipeline_stage(vp_stage)


def holds_data(vp_stage: int | None) -> bool:
    """Returns whether this rank reads samples: TP rank 0 of the stages that use them does."""
    return mpu.get_tensor_model_parallel_rank() == 0 and uses_batches(vp_stage)


def dataset_config(args: Namespace) -> GPTDatasetConfig:
    """Returns Megatron's dataset configuration, from its flags (core/datasets/gpt_dataset.py)."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    sequences_per_dataset = None
    if args.per_dataset_sequences_path is not None:
        sequences_per_dataset = read_json(args.per_dataset_sequences_path, SEQUENCES, {str: [int]})
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        tokenizer=build_tokenizer(args),
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        sequences_per_dataset=sequences_per_dataset,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        object_storage_cache_path=args.object_storage_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size if args.sequence_parallel else 0,
    )


def datasets_provider(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Returns the training, validation and test set of these sizes; each is None where this rank reads no samples.

    Megatron calls it once per model chunk under VPP, with ``vp_stage`` by name (training/training.py), so the name
    is part of the contract.
    """
    args = get_args()
    print_rank_0("> building train, validation and test datasets ...")
    datasets = BlendedMegatronDatasetBuilder(
        SFTDataset if args.sft else MockGPTDataset if args.mock_data else GPTDataset,
        num_samples,
        partial(holds_data, vp_stage),
        dataset_config(args),
    ).build()
    print_rank_0("> datasets are ready")
    return datasets


# Every rank calls the provider; the builder itself decides by `holds_data` who reads.
datasets_provider.is_distributed = True


def get_batch(data_iterator: Iterator[dict[str, torch.Tensor]] | None, vp_stage: int | None) -> Batch:
    """Returns one micro-batch: read on TP rank 0, broadcast over TP, and cut along the sequence under CP.

    Args:
        data_iterator: yields samples; None where `holds_data` is False.
        vp_stage: number of the model chunk on this rank; None without VPP.

    Returns:
        ``tokens``, ``position_ids``, ``labels`` (int64) and ``loss_mask`` (float32), each
        [micro_batch_size, seq_length / CP], and ``attention_mask`` (bool, True = masked) or None. A stage
        gets what it uses: the first no labels, the last no tokens, a middle one nothing at all. Under ``--sft``
        all rows are joined, [1, micro_batch_size * seq_length], and every stage gets ``cu_seqlens`` [1, n + 1]
        (int32) and ``max_seqlen`` [1].
    """
    args = get_args()
    fields = (*BATCH_FIELDS, *PACKED_FIELDS) if args.sft else BATCH_FIELDS
    if not uses_batches(vp_stage):
        return dict.fromkeys(fields)
    tp_rank = mpu.get_tensor_model_parallel_rank()
    batch: Batch = {}
    if tp_rank == 0:
        sample = next(data_iterator)
        batch = {name: sample[name].cuda(non_blocking=True) for name in fields if name in sample}
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=args.sft,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    # CP cuts whatever is there, so what belongs to no field must not be in it.
    used = fields if is_first_or_last_pipeline_stage(vp_stage) else PACKED_FIELDS
    batch = {name: batch.get(name) if name in used else None for name in fields}
    if args.sft:  # CP is refused with it
        return flatten_batch_for_packed_sequences(batch)
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())


def packed_seq_params(
    cu_seqlens: torch.Tensor | None, max_seqlen: torch.Tensor | None, seq_length: int
) -> PackedSeqParams | None:
    """Returns the bounds of a micro-batch's sequences, as Megatron's models take them; None without packing.

    Args:
        cu_seqlens: [1, n + 1] int32, cumulative lengths over all rows of the micro-batch, one after the other.
        max_seqlen: [1], length of the longest sequence.
        seq_length: length of a row.
    """
    if cu_seqlens is None or max_seqlen is None:
        return None
    bounds, longest = cu_seqlens.squeeze(0), int(max_seqlen.item())
    update_seqlen_stats_from_cu_seqlens(bounds)  # for the FLOPs in the log
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        tokens_per_sample=seq_length,
    )


# ---- forward and loss -------------------------------------------------------------------------------


def check_loss(loss: torch.Tensor, args: Namespace) -> None:
    """Reports NaN, Inf and spikes to Megatron's rerun state machine, which tells bad data from bad hardware.

    It runs before the reduction over DP, so that the report names the rank. Tolerance 0: a forward repeated
    on the same rank gives the same bits.
    """
    machine = get_rerun_state_machine()
    checks: list[tuple[Callable, str, bool]] = []
    if args.check_for_nan_in_loss_and_grad:
        checks += [(torch.isnan, "the loss of this rank is NaN", True)]
        checks += [(torch.isinf, "the loss of this rank is infinite", True)]
    if args.check_for_spiky_loss:
        spike = partial(machine.is_unexpectedly_large, threshold=SPIKE_FACTOR, context="loss")
        checks += [(spike, "the loss of this rank jumped", False)]
    for rejection_func, message, fatal in checks:
        machine.validate_result(
            result=loss, rejection_func=rejection_func, message=message, tolerance=0.0, fatal=fatal
        )


def loss_func(loss_mask: torch.Tensor, output_tensor: torch.Tensor) -> LossReport:
    """Sums the unmasked per-token losses, in the three-part form of core/pipeline_parallel/schedules.py.

    Args:
        loss_mask: [b, s], 1.0 where a token counts.
        output_tensor: [b, s], nats per token.

    Returns:
        The loss summed over tokens, the number of tokens (int32), and what Megatron logs: ``lm loss`` as
        [sum, tokens], which it reduces over DP and micro-batches before dividing.
    """
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output_tensor.view(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    report = {"lm loss": torch.cat([loss.detach().clone().view(1), num_tokens.view(1)])}
    check_loss(loss, get_args())
    return loss, num_tokens, report


def forward_step(
    data_iterator: Iterator[dict[str, torch.Tensor]] | None, model: torch.nn.Module
) -> tuple[torch.Tensor, Callable[[torch.Tensor], LossReport]]:
    """Runs one model chunk on one micro-batch; returns the output, to be sent on, and a function for the loss."""
    timer = get_timers()("batch-generator", log_level=2)
    timer.start()
    with straggler(bdata=True):
        batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    packed = packed_seq_params(batch.get("cu_seqlens"), batch.get("max_seqlen"), get_args().seq_length)
    timer.stop()
    with straggler:
        output_tensor = model(
            batch["tokens"],
            batch["position_ids"],
            batch["attention_mask"],
            labels=batch["labels"],
            loss_mask=batch["loss_mask"],
            packed_seq_params=packed,
        )
    return output_tensor, partial(loss_func, batch["loss_mask"])


# ---- entry ------------------------------------------------------------------------------------------


def get_embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """Returns a pipeline's ranks that hold the word embedding: the first, and the last if the head is tied."""
    if len(pp_ranks) == 1 or get_args().untie_embeddings_and_output_weights:
        return [pp_ranks[0]]
    return [pp_ranks[0], pp_ranks[-1]]


def model_config(args: Namespace) -> Any:
    """Returns what Megatron's trainer is told of the model: sizes, precision, parallelism.

    It describes a GPTModel while Megatron has one; core 0.20 announces that HybridModel takes its place.
    """
    make = getattr(argument_utils, "gpt_config_from_args", None) or argument_utils.hybrid_config_from_args
    return make(args)


def main() -> None:
    """Parses Megatron's flags and hands everything to its trainer.

    Raises:
        ConfigError: a flag is given that this script does not support (`UNSUPPORTED`).
    """
    run, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    refuse_unsupported(args)
    run(
        argument_utils.pretrain_cfg_container_from_args(args, model_config(args)),
        datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        store=store,
        get_embedding_ranks=get_embedding_ranks,
    )


if __name__ == "__main__":
    main()

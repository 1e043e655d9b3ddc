"""Who reads a micro-batch, who is sent it, and who gets none: TP 2 x PP 2, VPP, CP 2, and packed sequences."""

from argparse import Namespace
from unittest import mock

import torch

from megasched.verify.ranks.pool import init_megatron

SEQ_LENGTH = 8


def _sample():
    tokens = torch.arange(SEQ_LENGTH + 1).view(1, -1)
    return {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "loss_mask": torch.ones(1, SEQ_LENGTH),
        "position_ids": torch.arange(SEQ_LENGTH).view(1, -1),
        "attention_mask": torch.ones(1, 1, SEQ_LENGTH, SEQ_LENGTH, dtype=torch.bool).triu(1),
        # Megatron's blended datasets add it; it is no tensor for the model.
        "dataset_id": torch.zeros(1),
    }


def _batches(vpp, cp=1, mask=True):
    """This rank's batch for each of its model chunks, and how many samples it read for each."""
    from megatron.core import mpu

    from megasched.launch import pretrain_gpt

    tp, pp = (1, 1) if cp > 1 else (2, 2)
    init_megatron(tp=tp, pp=pp, vpp=vpp, cp=cp)
    args = Namespace(
        create_attention_mask_in_dataloader=mask,
        context_parallel_size=cp,
        micro_batch_size=1,
        seq_length=SEQ_LENGTH,
        pipeline_model_parallel_size=pp,
        sft=False,
    )
    sample = _sample() if mask else {name: value for name, value in _sample().items() if name != "attention_mask"}
    outcome = []
    for vp_stage in range(vpp) if vpp else [None]:
        with mock.patch.object(pretrain_gpt, "get_args", return_value=args):
            samples = iter([sample]) if pretrain_gpt.holds_data(vp_stage) else None
            batch = pretrain_gpt.get_batch(samples, vp_stage)
        left = None if samples is None else len(list(samples))
        outcome.append((batch, left))
    return mpu.get_tensor_model_parallel_rank(), mpu.get_pipeline_model_parallel_rank(), outcome


def _names(batch):
    assert list(batch) == ["tokens", "position_ids", "attention_mask", "labels", "loss_mask"]
    return {name for name, value in batch.items() if value is not None}


def _assert_is_the_samples(batch):
    sample = _sample()
    for name, value in batch.items():
        if value is not None:
            torch.testing.assert_close(value, sample[name], rtol=0, atol=0)


def test_each_stage_gets_what_it_uses_on_every_tp_rank(ranks):
    for tp_rank, pp_rank, [(batch, left)] in ranks.run(4, _batches, None):
        used = {"tokens", "position_ids"} if pp_rank == 0 else {"labels", "loss_mask"}
        assert _names(batch) == used | {"attention_mask"}
        _assert_is_the_samples(batch)
        assert left == (0 if tp_rank == 0 else None)


def test_without_a_mask_from_the_dataloader_there_is_none(ranks):
    for _, pp_rank, [(batch, _)] in ranks.run(4, _batches, None, 1, False):
        assert _names(batch) == ({"tokens", "position_ids"} if pp_rank == 0 else {"labels", "loss_mask"})


def test_chunks_between_the_first_and_the_last_read_nothing(ranks):
    for _, pp_rank, chunks in ranks.run(4, _batches, 2):
        # Stages 0 and 2 lie on the first pipeline rank, 1 and 3 on the second.
        end, middle = (chunks[0], chunks[1]) if pp_rank == 0 else (chunks[1], chunks[0])
        assert _names(middle[0]) == set()
        assert middle[1] is None
        assert "attention_mask" in _names(end[0])
        _assert_is_the_samples(end[0])


def test_context_parallel_ranks_get_the_outer_and_the_inner_quarters(ranks):
    got = [batch["tokens"].tolist() for _, _, [(batch, _)] in ranks.run(2, _batches, None, 2)]
    assert got == [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]


PACKED_ROWS = ([0, 3, 8], [0, 8])


def _packed_batches():
    """Two rows of eight tokens at TP 2 x PP 2 x VPP 2: fields of each chunk, as lists."""
    from megatron.core import mpu

    from megasched.launch import pretrain_gpt

    init_megatron(tp=2, pp=2, vpp=2)
    args = Namespace(
        create_attention_mask_in_dataloader=False,
        context_parallel_size=1,
        micro_batch_size=2,
        seq_length=SEQ_LENGTH,
        pipeline_model_parallel_size=2,
        sft=True,
    )
    names = ("tokens", "labels", "loss_mask", "position_ids")
    sample = {name: torch.cat([_sample()[name]] * 2) for name in names}
    # As Megatron's data set pads them, so that rows can be stacked.
    filled = [[*bounds, *[SEQ_LENGTH] * (SEQ_LENGTH + 1 - len(bounds))] for bounds in PACKED_ROWS]
    sample |= {"cu_seqlens": torch.tensor(filled, dtype=torch.int32), "max_seqlen": torch.tensor([5, 8]).int()}
    outcome = []
    for vp_stage in range(2):
        with mock.patch.object(pretrain_gpt, "get_args", return_value=args):
            samples = iter([sample]) if pretrain_gpt.holds_data(vp_stage) else None
            outcome.append(pretrain_gpt.get_batch(samples, vp_stage))
    return mpu.get_pipeline_model_parallel_rank(), outcome


def test_every_stage_is_told_where_packed_sequences_begin_and_no_more_than_it_uses(ranks):
    ends = {0: {"tokens", "position_ids"}, 1: {"labels", "loss_mask"}}
    for pp_rank, chunks in ranks.run(4, _packed_batches):
        end, middle = (chunks[0], chunks[1]) if pp_rank == 0 else (chunks[1], chunks[0])
        for batch, used in ((end, ends[pp_rank]), (middle, set())):
            assert {name for name, value in batch.items() if value is not None} == used | {
                "cu_seqlens",
                "max_seqlen",
            }
            assert batch["cu_seqlens"].tolist() == [[0, 3, 8, 16]]
            assert batch["max_seqlen"].tolist() == [8]
            assert all(batch[name].shape == (1, 2 * SEQ_LENGTH) for name in used)

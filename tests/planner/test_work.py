"""Work counted as modules run: against the formulas of what they compute."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from megasched.language.parallel_dims import ParallelDims
from megasched.planner.measure.build_stage import Setting
from megasched.planner.measure.probe import fake_groups
from megasched.planner.measure.stages import Measurements
from megasched.planner.measure.work import CountWork, Product, Sent
from megasched.planner.step_time import chunk_work
from megasched.trainer.session import open_session
from megasched.trainer.stages.stage import Stage
from tests.planner.configs import config_of


def test_products_are_counted_by_shape():
    layer, x = nn.Linear(16, 32, bias=False), torch.ones(4, 8, 16, requires_grad=True)
    with CountWork() as count:
        layer(x).sum().backward()
    of_input = Product(1, 32, 16, 32, 4, 4)  # a gradient of 32 rows times the weight
    assert count.work.products[Product(1, 32, 32, 16, 4, 4)] + count.work.products[of_input] == 3
    assert count.work.flops == 3 * 2 * 32 * 32 * 16


def test_causal_attention_counts_the_keys_up_to_each_query():
    q, k, v = (torch.ones(2, 4, 64, 16, requires_grad=True) for _ in range(3))
    with CountWork() as count:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        forward = count.work.attention
        out.sum().backward()
    pairs = 2 * 4 * 64 * 65 / 2
    assert forward == 2 * pairs * (16 + 16)
    assert count.work.attention == forward + 2 * pairs * (3 * 16 + 2 * 16)


def test_other_operations_count_what_they_read_and_write_and_views_nothing():
    x = torch.ones(10, 10)
    with CountWork() as count:
        y = x.t()[1:]
        assert count.work.traffic == 0
        y + 1.0
    assert count.work.traffic == 2 * 90 * 4


def test_the_work_of_a_stage_is_the_definitions_by_ranks(tmp_path):
    """TP2 with sequence parallelism: half of the FLOPs; the hidden state is gathered before each product."""
    config_of("llama").save_pretrained(tmp_path)
    layout = ParallelDims(tensor_model_parallel_size=2, sequence_parallel=True)
    session = open_session("auto", str(tmp_path), layout, make_vocab_size_divisible_by=4)
    batch, length, layers = 2, 128, 8
    with fake_groups(layout):
        measured = Measurements(session, Setting(batch, length, torch.float32))
        forward, backward = chunk_work(measured, Stage(0, layers, True, True))
    tokens, hidden = batch * length, 256
    weights = layers * (hidden * hidden * 2 + hidden * 128 * 2 + 3 * hidden * 704) + hidden * 2000
    assert forward.flops - forward.attention == tokens * weights
    assert backward.flops - backward.attention == 2 * tokens * weights
    assert forward.attention == layers * 2 * batch * 4 * length * (length + 1) / 2 * 64
    gathered = Sent("allgather_base", "TENSOR_MODEL_PARALLEL_GROUP", False, tokens * hidden, 4)
    assert forward.sent[gathered] == 2 * layers + 1  # before attention and the MLP; joined after the last


@pytest.mark.parametrize(
    ("name", "on_gpu"),
    [("llama", True), ("llama", False), ("mixtral", True), ("mixtral", False), ("mistral", True)],
)
def test_a_plan_counts_what_a_cut_and_the_log_count(tmp_path, name, on_gpu):
    """What a plan times is the same forward, operation by operation: a token's experts, and the keys of a window,
    which a GPU's kernel computes alone."""
    config = config_of(name)
    config.save_pretrained(tmp_path)
    session = open_session("auto", str(tmp_path), ParallelDims(), make_vocab_size_divisible_by=1)
    length = 256
    with fake_groups(ParallelDims()):
        measured = Measurements(session, Setting(1, length, on_gpu=on_gpu))
        forward, _ = chunk_work(measured, Stage(0, config.num_hidden_layers, True, True))
    counted = session.forward_flops(length)
    assert forward.flops == counted.total

"""Kernels of a GPU in a plan: what they keep, compute and send, against what is known of each."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megasched.language.parallel_dims import Fp8, ParallelDims
from megasched.planner.measure.build_stage import Setting
from megasched.planner.measure.parameter_counts import ParameterCounts
from megasched.planner.measure.probe import fake_groups, measure
from megasched.planner.stand_ins.kernels import attended_on_rank
from megasched.trainer.session import open_session
from megasched.trainer.stages.stage import Stage
from tests.parity.cases import spread
from tests.planner.configs import config_of
from tests.planner.sent import sent_bytes

HIDDEN, FFN, HEADS, GROUPS, WIDTH = 256, 704, 8, 4, 32
BATCH, LENGTH = 1, 512
MIDDLE = Stage(1, 2, False, False)
TENSORWISE = Fp8(fp8_recipe="tensorwise")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved("llama", tmp_path_factory.mktemp("model"))


def saved(name, path):
    config_of(name).save_pretrained(path)
    return str(path)


def measured(folder, schedule="auto", *, recompute=None, on_gpu=True, **layout):
    layout = ParallelDims(sequence_parallel=layout.get("tensor_model_parallel_size", 1) > 1, **layout)
    session = open_session(schedule, folder, layout)
    with fake_groups(layout):
        return measure(session, MIDDLE, Setting(BATCH, LENGTH, torch.bfloat16, recompute, on_gpu=on_gpu))


def schedule_at(level, tmp_path):
    """All layers at a level; ``parts``: only their attention and MLP are Megatron's."""
    calls = [(f"model.layers.*.{part}", "block") for part in ("self_attn", "mlp")]
    calls = calls if level == "parts" else [("model.layers.*", level)]
    path = tmp_path / f"{level}.py"
    path.write_text(
        "from megasched.model_adapters.default_schedule import schedule as default\n\n"
        "def schedule(sch, layout):\n    default(sch, layout)\n"
        + "".join(f"    sch[{where!r}].level({name!r})\n" for where, name in calls)
    )
    return str(path)


def linears(tp):
    """(out, in) on a rank: q, k and v together, out, gate and up together, down."""
    qkv, ffn = (HEADS + 2 * GROUPS) * WIDTH // tp, FFN // tp
    return [(qkv, HIDDEN), (HIDDEN, HEADS * WIDTH // tp), (2 * ffn, HIDDEN), (HIDDEN, ffn)]


@pytest.mark.parametrize(
    ("model_type", "tp"), [("llama", 1), ("llama", 2), ("gemma", 1), ("starcoder2", 1), ("nemotron", 1)]
)
def test_what_megatrons_layer_keeps_in_8_bits(tmp_path, model_type, tp):
    """Per token: the hidden state before the second norm and at the end, and twice in 8 bits (what came in was
    there before); q and k rotated, and v, for itself; attention's output, and in 8 bits; gate and up, and their
    product in 8 bits. Without a gate, up alone, or what of it is squared."""
    layout = {"tensor_model_parallel_size": tp} if tp > 1 else {}
    found = measured(saved(model_type, tmp_path), **layout, fp8=TENSORWISE)
    qkv = (HEADS + 2 * GROUPS) * WIDTH // tp
    attention, ffn = HEADS * WIDTH // tp, FFN // tp
    hidden = HIDDEN // tp  # under sequence parallelism
    parts = 1 if model_type in ("starcoder2", "nemotron") else 2
    bytes_per_token = 2 * (2 + 1) * hidden + 2 * qkv + (2 + 1) * attention + (2 * parts + 1) * ffn
    sums = 4 * (2 + HEADS) // tp  # float32: a number for each norm (of layer norms, two in 16 bits), and each head
    assert found.layer == BATCH * LENGTH * (bytes_per_token + sums)


@pytest.mark.parametrize(("level", "tp"), spread(["leaf", "fused", "block", "parts"], [2, 1]))
def test_products_of_sharded_linears_are_in_8_bits(folder, tmp_path, level, tp):
    layout = {"tensor_model_parallel_size": tp} if tp > 1 else {}
    found = measured(folder, schedule_at(level, tmp_path), **layout, fp8=TENSORWISE)
    assert {product.itemsize for product in found.forward_work.products} == {1}
    parameters = sum(rows * columns for rows, columns in linears(tp))
    flops = 2 * BATCH * LENGTH * parameters
    assert found.forward_work.flops - found.forward_work.attention == flops
    assert found.backward_work.flops - found.backward_work.attention == 2 * flops
    products = found.backward_work.products.items()
    added = [product.m * product.n * count for product, count in products if product.result_itemsize == 8]
    assert sum(added) == parameters


def test_8_bits_are_gathered_where_it_is_fused(folder):
    """Half as much before qkv and before the MLP; what goes back is in 16 bits."""
    key = ("allgather_base", "TENSOR_MODEL_PARALLEL_GROUP", False)
    sizes = [measured(folder, tensor_model_parallel_size=2, fp8=fp8) for fp8 in (TENSORWISE, None)]
    eight, sixteen = (sent_bytes(found.forward_work)[key] for found in sizes)
    assert eight == 2 * BATCH * LENGTH * HIDDEN
    assert sixteen == 2 * eight


def test_gradients_of_columns_are_sent_behind_products(folder, tmp_path):
    found = measured(folder, schedule_at("block", tmp_path), tensor_model_parallel_size=2)
    behind = {key[0]: size for key, size in sent_bytes(found.backward_work).items() if key[2]}
    assert behind == dict.fromkeys(("allgather_base", "reduce_scatter_base"), 2 * BATCH * LENGTH * HIDDEN * 2)


@pytest.mark.parametrize("level", ["leaf", "fused", "parts", "block"])
def test_context_parallelism_halves_attention_and_keeps_no_keys_of_others(folder, tmp_path, level):
    schedule = schedule_at(level, tmp_path)
    whole, part = (measured(folder, schedule, context_parallel_size=cp) for cp in (1, 2))
    assert part.forward_work.attention == whole.forward_work.attention / 2
    assert part.backward_work.attention == whole.backward_work.attention / 2
    assert part.layer == pytest.approx(whole.layer / 2, rel=0.02)
    assert sent_bytes(part.forward_work)["allgather_base", "CONTEXT_PARALLEL_GROUP", True] > 0


@pytest.mark.parametrize(("level", "fp8"), spread(["fused", "parts", "block"], [None, TENSORWISE]))
def test_full_recompute_keeps_the_hidden_state_alone(folder, tmp_path, level, fp8):
    """Megatron's layer would hold on to what was recomputed (``MegatronLayer.forward``)."""
    found = measured(folder, schedule_at(level, tmp_path), recompute="full", fp8=fp8)
    assert found.layer == BATCH * LENGTH * HIDDEN * 2
    assert found.held <= 3 * LENGTH * WIDTH * 4 + 2 * BATCH * LENGTH * WIDTH * 4  # rotary tables


def test_fused_norms_keep_their_input_alone(folder):
    on_gpu, on_cpu = (measured(folder, on_gpu=on_gpu) for on_gpu in (True, False))
    assert on_gpu.layer < on_cpu.layer
    assert on_gpu.forward_work.traffic < on_cpu.forward_work.traffic
    assert on_gpu.forward_work.flops == on_cpu.forward_work.flops


def test_a_fused_layer_keeps_what_megatrons_does(folder, tmp_path):
    """Its attention takes a copy of v, and lets go of the product of which it is a part; gate and up are read by
    one kernel in either pass, and no temporary stands beside what it writes."""
    fused, block = (measured(folder, schedule_at(level, tmp_path)) for level in ("fused", "block"))
    assert fused.layer == block.layer
    assert fused.backward == pytest.approx(block.backward, rel=0.01)


def test_capped_logits_are_not_kept(tmp_path):
    """Gemma 2's attention keeps its inputs and its output, as any fused one does: twice as much for two rows."""
    gemma = saved("gemma2", tmp_path / "model")
    session = open_session("auto", gemma, ParallelDims())
    with fake_groups(ParallelDims()):
        short, long = (
            measure(session, MIDDLE, Setting(BATCH, length, torch.bfloat16, None, on_gpu=True)).layer
            for length in (LENGTH, 2 * LENGTH)
        )
    assert long == pytest.approx(2 * short, rel=0.01)


def test_weights_in_8_bits_are_kept_beside(folder):
    session = open_session("auto", folder, ParallelDims(fp8=TENSORWISE))
    count = ParameterCounts(session).held([MIDDLE])
    assert count.quantized == sum(rows * columns for rows, columns in linears(1))


def test_a_second_measurement_finds_the_same(folder):
    """Everything that was replaced is replaced again."""
    first, second = (measured(folder, fp8=TENSORWISE) for _ in range(2))
    assert first == second


@given(st.integers(1, 64), st.integers(1, 80) | st.none(), st.booleans())
def test_pairs_are_counted(length, window, causal):
    pairs = [
        (query, key)
        for query in range(length)
        for key in range(length)
        if not causal or (key <= query and (window is None or query - key < window))
    ]
    assert attended_on_rank(length, length, causal, window, 1) == len(pairs)


@given(st.integers(1, 64), st.integers(1, 40) | st.none(), st.integers(1, 4))
def test_ranks_share_pairs_evenly(part, window, ranks):
    whole = attended_on_rank(part * ranks, part * ranks, True, window, 1)
    assert attended_on_rank(part, part, True, window, ranks) * ranks == pytest.approx(whole)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    path = tmp_path_factory.mktemp("mixture")
    config_of("mixtral").save_pretrained(path)
    return str(path)


@pytest.mark.parametrize(("ep", "on_gpu"), spread([2, 1], [True, False]))
def test_megatrons_mixture_computes_as_much_as_hfs(mixture, tmp_path, ep, on_gpu):
    """Pairs of token and expert, two of each token, go to their experts and come back; with a weight each."""
    layout = {"expert_model_parallel_size": ep} if ep > 1 else {}
    fused, block = (
        measured(mixture, schedule_at(level, tmp_path), on_gpu=on_gpu, **layout) for level in ("fused", "block")
    )
    assert block.forward_work.flops == fused.forward_work.flops
    assert block.backward_work.flops == fused.backward_work.flops
    pairs = 2 * BATCH * LENGTH
    there_and_back = {("alltoall_base", "EXPERT_MODEL_PARALLEL_GROUP", False): pairs * (2 * HIDDEN + 1) * 2}
    assert dict(sent_bytes(block.forward_work)) == (there_and_back if ep > 1 else {})


def test_under_sequence_parallelism_a_mixture_computes_each_token_once(mixture, tmp_path):
    """HF's experts see the tokens of all TP ranks, on each."""
    fused, block = (
        measured(mixture, schedule_at(level, tmp_path), tensor_model_parallel_size=2).forward_work
        for level in ("fused", "block")
    )
    parameters = 3 * HIDDEN * FFN * 2  # of the two experts of a token
    assert fused.flops - block.flops == pytest.approx(2 * BATCH * LENGTH * parameters / 2, rel=0.01)


@pytest.mark.parametrize("ep", [1, 2])
def test_what_megatrons_mixture_keeps(mixture, tmp_path, ep):
    """Beside what an MLP's layer keeps, with which attention and norms are shared: for each pair its hidden state,
    gate and up, and their product, a weight and places; for each token the router's logits and choices."""
    layout = {"expert_model_parallel_size": ep} if ep > 1 else {}
    found = measured(mixture, schedule_at("block", tmp_path), **layout)
    qkv = (HEADS + 2 * GROUPS) * WIDTH
    attention = 3 * HIDDEN + qkv + HEADS * WIDTH  # hidden states; q and k rotated, and v
    pairs = 2 * (HIDDEN + 2 * FFN + FFN)
    assert found.layer == pytest.approx(2 * BATCH * LENGTH * (attention + pairs), rel=0.05)

"""Which lines of a run a terminal shows."""

from __future__ import annotations

from megasched.launch.console_lines import ConsoleLines

# In the order of a run; those that begin with a bar are shown.
RUN = """\
|rehearsal: flags set for this machine
|    --distributed-backend gloo --transformer-impl local
|megasched: megatron-core 0.19.2 from /env/lib/python3.12/site-packages/megatron
using world size: 4, data-parallel size: 1, context-parallel size: 1
------------------------ arguments ------------------------
  accumulate_allreduce_grads_in_fp32 .............. False
  data_path ....................................... ['a', 'b']
-------------------- end of arguments ---------------------
INFO:megatron.core.num_microbatches_calculator:setting number of microbatches to constant 4
                 VPP rank 0               VPP rank 1
PP rank 0        embedding,decoder        decoder
> initializing torch distributed ...
 > number of parameters on (tensor, gtp_remat, pipeline) model parallel rank (1, 0, 1): 1378176
Params for bucket 1 (738048 elements, 738048 padded size, 0 param(s) with extra main_grads):
	definition.model.layers.0.mlp.down_proj.weight (param.main_grad.dtype=torch.float32)
/env/lib/python3.12/site-packages/megatron/core/optimizer.py:29: UserWarning: Apex is not installed
  warnings.warn(
|/home/me/modeling_mine.py:3: UserWarning: a mask is all zeros
|  warnings.warn("a mask is all zeros")
|what my own forward prints
[after dataloaders are built] datetime: 2026-11-28 12:28:30.396049
    train/valid/test-data-iterators-setup ..........: (145.57, 153.34)
|WARNING:megatron.core.utils: found something odd
WARNING:megatron.core.utils: found something odd
| [2026-11-28 12:28:31.4] iteration        1/      20 | consumed samples: 4 | lm loss: 5.7E+00 |
[Rank 1] (after 1 iterations) memory (MB) | allocated: 0.00 | max allocated: 0.00
Number of parameters in transformer block in billions:  0.01
Theoretical memory footprints: weight and optimizer=23.65 MB, activation=5.54 MB, total=29.19 MB

-------------------------------------------------------------------
| validation loss at iteration 6 | lm loss value: 3.802912E+00 | lm loss PPL: 4.483154E+01 |
-------------------------------------------------------------------
|[2026-11-28 12:29:08.6] saving checkpoint at iteration      20 to /run/checkpoints in torch_dist format
W1128 12:29:18.635000 4698 torch/utils/cpp_extension.py:178] No CUDA runtime is found, using CUDA_HOME='/usr/local'
/env/lib/python3.12/site-packages/megatron/core/optimizer.py:29: UserWarning: Apex is not installed
|  [2026-11-28 12:29:25.4] successfully saved checkpoint from iteration      20 to /run/checkpoints [ t 1/2 ]
Evaluating iter 1/16
"""
FAILURE = """\
Traceback (most recent call last):
  File "/env/lib/python3.12/site-packages/megatron/training/training.py", line 1, in train
    > a line that begins as Megatron's own
ValueError: no

megasched: the run failed on rank 1: ValueError: no
    at: train.py:1
"""


def test_what_a_terminal_shows():
    lines = ConsoleLines()
    shown = [line.removeprefix("|") for line in RUN.splitlines() if lines.shows(line.removeprefix("|"))]
    assert shown == [line[1:] for line in RUN.splitlines() if line.startswith("|")]


def test_from_an_error_on_all_is_shown():
    lines = ConsoleLines()
    assert not lines.shows("> initializing torch distributed ...")
    assert all(map(lines.shows, FAILURE.splitlines()))
    assert lines.shows("> initializing torch distributed ...")


def test_a_mistaken_flag_of_argparse_is_an_error():
    lines = ConsoleLines()
    assert lines.shows("pretrain_gpt.py: error: unrecognized arguments: --x")
    assert lines.shows("")

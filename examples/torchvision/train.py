"""Trains a small TorchVision ResNet on random pictures at TP 2, with as many replicas as there are pairs of ranks.

torchrun --nproc-per-node 4 examples/torchvision/train.py
"""

import os
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torchvision.models.resnet import Bottleneck, ResNet

import megasched
from megasched.patches import host_cuda

GPUS = torch.cuda.is_available()
STEPS, PICTURES = 3, 8


def main() -> None:
    if not GPUS:
        host_cuda.install()  # Megatron's groups ask for CUDA; this emulates it on the CPU
    from megatron.core import parallel_state

    torch.distributed.init_process_group("nccl" if GPUS else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if GPUS else torch.device("cpu")
    if GPUS:
        torch.cuda.set_device(device)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    group = parallel_state.get_data_parallel_group()

    torch.manual_seed(0)  # the same weights and pictures on every rank
    model = ResNet(Bottleneck, [1, 1, 1, 1], num_classes=10, width_per_group=8).to(device)
    pictures, labels = torch.randn(PICTURES, 3, 64, 64).to(device), torch.arange(PICTURES, device=device)

    schedule = str(Path(__file__).with_name("schedule.py"))
    model = megasched.apply_schedule(model, schedule, inputs={"x": pictures})
    model = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)

    own = [whole.chunk(group.size())[group.rank()] for whole in (pictures, labels)]
    for step in range(STEPS):
        loss = cross_entropy(model(own[0]), own[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total, group=group)
        if torch.distributed.get_rank() == 0:
            print(f"step {step}: loss {total.item() / group.size():.6f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

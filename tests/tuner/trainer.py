"""A stand-in for the trainer: it prints Megatron's lines, and fails as it is told, by the flags it is given.

    python trainer.py --micro-batch-size B --recompute-num-layers R --exit-interval N --log-interval 1

It runs out of memory where B x (4 - R) is above 16; its iterations take 10 + B x (1 + R / 10) ms, by its own word.
"""

import argparse
import sys
import time

LINE = (
    " [2026-01-01 00:00:00] iteration {i:8d}/{n:8d} | consumed samples: {samples:12d} | elapsed time per iteration"
    " (ms): {ms:.1f} | learning rate: 1.0E-04 | global batch size: {batch:5d} | lm loss: 4.5E+00 |"
)


def line(i, ms, batch, n=8):
    return LINE.format(i=i, n=n, samples=i * batch, ms=ms, batch=batch)


def milliseconds(batch, layers):
    return 10 + batch * (1 + layers / 10)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--recompute-num-layers", type=int, default=0)
    parser.add_argument("--exit-interval", type=int)
    parser.add_argument("--log-interval", type=int)
    parser.add_argument("--hang", action="store_true")
    parser.add_argument("--schedule-option", nargs="+", default=[])
    args = parser.parse_args()
    batch, layers = args.micro_batch_size, args.recompute_num_layers
    if args.hang:
        print("hanging", flush=True)
        time.sleep(3600)
    if batch == 3:
        sys.exit("megasched: error: micro-batches of 3 are not for this trainer")
    if batch * (4 - layers) > 16:
        raise MemoryError("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
    for i in range(1, args.exit_interval + 1):
        print(line(i, milliseconds(batch, layers), batch, args.exit_interval), flush=True)


if __name__ == "__main__":
    main()

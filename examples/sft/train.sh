#!/bin/sh
# Fine-tunes what make.py wrote: sh examples/sft/train.sh FOLDER [more flags]. From the top folder of the repository.
# On four GPUs; without any, the same on the CPU with --rehearse at the end.
set -eu
folder=$1
shift
torchrun --nproc-per-node 4 -m megasched pretrain_gpt.py \
    --model-schedule examples/sft/schedule.py --hf-model "$folder/model" \
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 \
    --sft --tokenizer-type SFTTokenizer --tokenizer-model "$folder/model" \
    --sft-tokenizer-prompt-format nemotron-nano-v2 --calculate-per-token-loss \
    --train-data-path "$folder/train.jsonl" --valid-data-path "$folder/valid.jsonl" \
    --data-cache-path "$folder/cache" \
    --seq-length 128 --micro-batch-size 2 --global-batch-size 16 --train-iters 200 \
    --lr 3e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 20 --adam-beta2 0.95 \
    --eval-interval 200 --eval-iters 2 --log-interval 20 \
    --save "$folder/checkpoints" --save-interval 200 --ckpt-format torch_dist "$@"

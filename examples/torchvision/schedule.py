"""TorchVision's ResNets and WideResNets: in each block the wide convolution by outputs, the next one by inputs.

The batch norm between them has its channels' weights and statistics on each rank; samples of all replicas count.
"""


def schedule(sch, layout):
    for stage in range(1, 5):
        sch[f"layer{stage}.*.conv2"].shard("weight", axis=0)
        sch[f"layer{stage}.*.conv3"].shard("weight", axis=1)
    sch["fc"].shard("weight", axis=0)
    sch.sync_batch_norm()

"""Your own pipeline cuts and recompute on top of what `auto` shards, for models whose layers are `model.layers`.

Under 1F1B the first pipeline rank keeps the activations of PP micro-batches, the last one those of a single one.
So the first half of the ranks recomputes its layers in the backward pass, and the others keep theirs.
"""

from megasched.model_adapters.default_schedule import schedule as auto


def schedule(sch, layout):
    auto(sch, layout)
    layers = sch["model.layers"]
    # Equal numbers of layers, where megasched by itself would balance the cost of the head too. A batch goes
    # through PP x VPP stages, and stage i runs on pipeline rank i % PP.
    stages = layout.pp * layout.vpp
    ends = [len(layers) * (stage + 1) // stages for stage in range(stages)]
    for end in ends[:-1]:
        layers[end - 1].cut_pipeline_stage()
    for stage, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if stage % layout.pp < layout.pp // 2:
            layers[start:end].checkpoint()

"""The built-in primitives, one a file. Importing this package registers them."""

from megasched.primitives.adapt import Adapt
from megasched.primitives.annotate import Annotate
from megasched.primitives.checkpoint import Checkpoint
from megasched.primitives.cut_pipeline_stage import CutPipelineStage
from megasched.primitives.decompose import Decompose
from megasched.primitives.find import Find
from megasched.primitives.fork_rng import ForkRng
from megasched.primitives.fuse import Fuse
from megasched.primitives.hook import Hook
from megasched.primitives.level import Level
from megasched.primitives.replace import Replace
from megasched.primitives.replace_all import ReplaceAll
from megasched.primitives.shard import Shard
from megasched.primitives.sync import Sync
from megasched.primitives.trace import Trace
from megasched.primitives.trace_until import TraceUntil
from megasched.primitives.unfreeze import Unfreeze

__all__ = [
    "Adapt",
    "Annotate",
    "Checkpoint",
    "CutPipelineStage",
    "Decompose",
    "Find",
    "ForkRng",
    "Fuse",
    "Hook",
    "Level",
    "Replace",
    "ReplaceAll",
    "Shard",
    "Sync",
    "Trace",
    "TraceUntil",
    "Unfreeze",
]

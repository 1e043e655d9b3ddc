"""The built-in primitives, one a file. Importing this package registers them."""

from megasched.language.primitives.adapt import Adapt
from megasched.language.primitives.annotate import Annotate
from megasched.language.primitives.checkpoint import Checkpoint
from megasched.language.primitives.cut_pipeline_stage import CutPipelineStage
from megasched.language.primitives.decompose import Decompose
from megasched.language.primitives.find import Find
from megasched.language.primitives.fork_rng import ForkRng
from megasched.language.primitives.fuse import Fuse
from megasched.language.primitives.hook import Hook
from megasched.language.primitives.level import Level
from megasched.language.primitives.replace import Replace
from megasched.language.primitives.replace_all import ReplaceAll
from megasched.language.primitives.shard import Shard
from megasched.language.primitives.sync import Sync
from megasched.language.primitives.trace import Trace
from megasched.language.primitives.trace_until import TraceUntil
from megasched.language.primitives.unfreeze import Unfreeze

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

"""Training in parallel: the model's own plan, applied with DTensor and FSDP2.

Parameters are DTensors to optimizers and checkpoints, and plain local tensors inside the forward pass (`local_view`);
what crosses ranks is in hooks around the modules that the plan names (`styles`).
"""

from titan_adapters.parallel.dry_run import DryRun, PlannedTensor, dry_run
from titan_adapters.parallel.init_weights import init_weights
from titan_adapters.parallel.parallelize import parallelize
from titan_adapters.parallel.replicas import check_replicas

__all__ = ["DryRun", "PlannedTensor", "check_replicas", "dry_run", "init_weights", "parallelize"]

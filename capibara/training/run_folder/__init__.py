"""Reads run folders (configuration, parameters, optimizer state, adapters), and writes one of parameters alone."""

from capibara.training.run_folder.reading import (
    CONFIG,
    Placed,
    TrainedRun,
    adapters,
    described,
    has_gates,
    head,
    is_run,
    load,
    lora,
    merger,
    newest_optimizer,
    newest_params,
    newest_state,
    no_checkpoint,
    on_one_device,
    recorded,
    value_head,
)
from capibara.training.run_folder.starting import changes, check_resumable, recorded_steps, start_over
from capibara.training.run_folder.writing import save

__all__ = [
    "CONFIG", "Placed", "TrainedRun", "adapters", "changes", "check_resumable",
    "described", "has_gates", "head", "is_run", "load", "lora", "merger", "newest_optimizer",
    "newest_params", "newest_state", "no_checkpoint", "on_one_device", "recorded", "recorded_steps",
    "save", "start_over", "value_head",
]  # fmt: skip

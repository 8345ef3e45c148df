"""Writes the summary of a traced part of a run beside the trace, and prints it."""

from __future__ import annotations

import json
import logging
import os
import tempfile

from etils import epath

from capibara.config import configurable
from capibara.monitoring.profiling import summary, trace
from capibara.storage import stores
from capibara.training.base.callbacks import Callback


@configurable
class ProfileSummary(Callback):
    """After Profile.stop: writes summary.txt and summary.json into the folder of the trace, and prints the text."""

    def on_profile(self, step: int, first_step: int, folder: str) -> None:
        try:
            result = of_folder(folder, step - first_step + 1)
            if result is None:
                print(f"profile: {folder} has no operation of a device")
                return
            store, target = stores.of(folder), epath.Path(folder)
            store.write_atomic(target / "summary.txt", f"{result.text()}\n".encode())
            store.write_atomic(target / "summary.json", json.dumps(result.as_json(), indent=1).encode())
        except Exception as error:  # a trace that cannot be read, or a full disk, must not end the run
            logging.getLogger(__name__).warning("%s cannot be summarised (%s: %s)", folder, type(error).__name__, error)
            return
        print(f"profile of steps {first_step} to {step}, see it with: tensorboard --logdir={folder}")
        print(result.text(), flush=True)


def of_folder(folder: str, steps: int) -> summary.Summary | None:
    """The summary of a folder's traces; None: they have no operation of a device.

    Args:
      folder: from training.profiling.folder_of; may be in a bucket.
      steps: number of traced steps.
    """
    if stores.of(folder).has_local_paths:
        return summary.summarised([trace.read(path) for path in trace.files_of(folder)], steps)
    with tempfile.TemporaryDirectory() as local:
        traces = []
        for number, path in enumerate(sorted(epath.Path(folder).glob("plugins/profile/*/*.xplane.pb"))):
            copied = os.path.join(local, f"{number}.xplane.pb")
            with open(copied, "wb") as file:
                file.write(stores.of(folder).read(path))
            traces.append(trace.read(copied))
        return summary.summarised(traces, steps)

"""What real clients have kept of a run with two starts, read back by their own readers; printed as JSON.

Run in an environment with capibara and the clients: python real_clients.py wandb|mlflow|comet FOLDER [ADDRESS]
"""

import glob
import json
import os
import struct
import sys
import zipfile

from capibara.monitoring.trackers.clients.comet import CometTracker
from capibara.monitoring.trackers.clients.mlflow import MlflowTracker
from capibara.monitoring.trackers.clients.weights_and_biases import WandbTracker
from tests.monitoring.trackers.runs import lived, sent

_BLOCK = 32 << 10


def two_starts(tracker, folder):
    """Feeds a run that is interrupted at step 3, and resumes at step 2."""
    os.makedirs(folder, exist_ok=True)
    picture(f"{folder}/loss_curve.png", 8)
    metrics = lived(folder, [1, 2, 3], reason=None)
    metrics.on_facts(0, {"git": {"commit": "a" * 40, "dirty": True}, "host": "here"})
    metrics.on_evaluate(3, {"loss": 0.5})
    metrics.on_sample(3, "def ", "f(x): return hf_abcdefghijklmnopqrstuv")
    metrics.on_train_end(3, "interrupted")
    first = sent([tracker], folder, within_s=120.0)
    picture(f"{folder}/loss_curve.png", 16)
    lived(folder, [3, 4], start=2, loss=10.0)
    second = sent([tracker], folder, within_s=120.0)
    return {"said": first[0] + second[0], "unsent": first[1] | second[1]}


def picture(path, size):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(size / 10, size / 10))
    figure.subplots().plot([1, 2])
    figure.savefig(path)


def wandb(folder):
    """From the .wandb files of both starts."""
    from wandb.proto import wandb_internal_pb2

    found = two_starts(WandbTracker(mode="offline", project="mine"), folder)
    history, summary, files, ids, config = [], {}, [], set(), {}
    for path in sorted(
        glob.glob(f"{folder}/trackers/wandb-offline.files/wandb/offline-run-*/*.wandb"), key=os.path.getmtime
    ):
        for data in records_of(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.run.run_id:
                ids.add((record.run.run_id, record.run.project))
            for item in [*record.run.config.update, *record.config.update]:
                config[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
            if record.history.item:
                row = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
                }
                history.append(row)
            for item in record.summary.update:
                summary[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
        files += [
            os.path.relpath(one, folder)
            for one in glob.glob(f"{os.path.dirname(path)}/files/media/**/*.*", recursive=True)
        ]
    tables = [json.load(open(f"{folder}/{name}")) for name in files if name.endswith(".table.json")]
    return found | {
        "ids": sorted(ids), "history": history, "summary": summary, "files": files, "tables": tables, "config": config
    }  # fmt: skip


def records_of(path):
    """The records of a .wandb file, which is a log of LevelDB after a header of 7 bytes: blocks of 32 KiB with pieces."""
    with open(path, "rb") as file:
        data = file.read()
    assert data.startswith(b":W&B")
    at, record = 7, b""
    while at + 7 <= len(data):
        if (left := _BLOCK - at % _BLOCK) < 7:  # no piece begins there
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        record, at = record + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""


def mlflow(folder, uri):
    """From the server, or a local store."""
    from mlflow.tracking import MlflowClient

    found = two_starts(MlflowTracker(uri=uri, experiment="mine"), folder)
    client = MlflowClient(tracking_uri=uri)
    runs = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    (run,) = runs
    metrics = {
        key: [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, key)]
        for key in run.data.metrics
    }
    artifacts = {}

    def walk(path=None):
        for one in client.list_artifacts(run.info.run_id, path):
            if one.is_dir:
                walk(one.path)
            else:
                local = client.download_artifacts(run.info.run_id, one.path)
                artifacts[one.path] = None if one.path.endswith(".png") else open(local).read()

    walk()
    return found | {
        "status": run.info.status, "params": run.data.params, "tags": run.data.tags, "metrics": metrics, "artifacts": artifacts
    }  # fmt: skip


def comet(folder):
    """From the archives of both starts."""
    found = two_starts(CometTracker(mode="offline", project="mine"), folder)
    messages, names, keys = [], [], []
    for path in sorted(glob.glob(f"{folder}/trackers/comet-offline.files/*.zip"), key=os.path.getmtime):
        with zipfile.ZipFile(path) as archive:
            names += archive.namelist()
            keys.append(json.loads(archive.read("experiment.json"))["offline_id"])
            messages += [json.loads(line) for line in archive.read("messages.json").splitlines()]
    return found | {"messages": messages, "names": names, "keys": keys}


if __name__ == "__main__":
    print("RESULT " + json.dumps({"wandb": wandb, "mlflow": mlflow, "comet": comet}[sys.argv[1]](*sys.argv[2:])))

"""The hosts of a cluster on which trials of a sweep run: they report what a run would, and take no time."""

import json
import threading

from capibara.storage import stores


class Hosts(threading.Thread):
    """What the hosts of a cluster do: each job reports its losses to its trial's run folder, then completes.

    Args:
      cluster: the FakeKubernetes.
      name: of the binding on which the loss depends.
      holds: jobs that report one step only, and never complete.
    """

    def __init__(self, cluster, *, name="x", holds=()):
        super().__init__(daemon=True)
        self.cluster, self.binding, self.steps, self.holds = cluster, name, 3, {*holds}
        self.created, self._has_ended = [], threading.Event()

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self._has_ended.set()
        self.join()

    def run(self):
        while not self._has_ended.wait(0.02):
            for name, item in self.cluster.objects("jobsets").items():
                labels = item["metadata"]["labels"]
                key = (name, labels["capibara-launch"], labels["capibara-attempt"])
                if key in self.created:
                    continue
                self.created.append(key)
                self.report(commands(item)[0], is_whole=name not in self.holds)
                if name not in self.holds:
                    self.cluster.start(name)
                    self.cluster.complete(name)

    def report(self, command, is_whole):
        bound = dict(one.removeprefix("--gin_bindings=").split(" = ") for one in command if "gin_bindings=" in one)
        path = stores.folder_of(json.loads(bound["Trainer.model_dir"])) / "metrics.jsonl"
        lines = [{"kind": "event", "step": 0, "event": "start"}]
        steps = range(1, self.steps + 1 if is_whole else 2)
        lines += [{"kind": "eval", "step": k, "loss": (float(bound[self.binding]) - 0.3) ** 2 + 1 / k} for k in steps]
        lines += [{"kind": "event", "step": self.steps, "event": "end", "reason": "finished"}] * is_whole
        store = stores.of(path)
        store.make_folder(path.parent)
        store.write_atomic(path, "".join(f"{json.dumps(line)}\n" for line in lines).encode())


def commands(item):
    """What the pods of a JobSet run."""
    pods = [job["template"]["spec"]["template"]["spec"] for job in item["spec"]["replicatedJobs"]]
    return [container["command"] for pod in pods for container in pod["containers"]]


def live(cluster):
    """The JobSets that have not ended; Kubernetes keeps the others."""
    return [name for name, item in cluster.objects("jobsets").items() if "terminalState" not in item["status"]]

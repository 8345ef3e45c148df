"""The task module of routing sets: when it is imported, it registers the SeqIO tasks that Gin names by `routing_task`."""

from capibara.data.tasks import routing

routing.register_wanted()

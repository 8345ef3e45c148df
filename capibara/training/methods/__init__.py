"""Training methods: how a run turns batches into updates, one file each."""

"""Builds training sets from playbooks, execution logs and documents, with a manifest and lineage of each."""

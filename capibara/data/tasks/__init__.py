"""SeqIO tasks and mixtures."""

"""Training sets from ACE playbooks: the bullets that agents found helpful, merged, ranked, and as conversations."""

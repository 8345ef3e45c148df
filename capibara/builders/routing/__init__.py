"""Training sets for the hybrid expert router: texts labelled with a domain, balanced, split and decontaminated."""

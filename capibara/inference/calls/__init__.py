"""Tool calls and reasoning in the text of a model, in the form that its chat template has."""

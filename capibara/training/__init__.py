"""Training: the train state, the step, the loop, set-up, recovery, evaluation and callbacks."""

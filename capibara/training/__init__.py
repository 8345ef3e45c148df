"""Training: the run and its methods, the train state, the step, the loop, set-up, recovery, evaluation and callbacks."""

"""The train state, the step, the loop and what surrounds it."""

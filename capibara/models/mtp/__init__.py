"""Multi-token prediction: further modules that predict the tokens after the next one."""

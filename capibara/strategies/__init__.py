"""Training strategies in which the model generates its own data, such as GRPO."""

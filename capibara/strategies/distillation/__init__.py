"""Distillation: training on the next-token distributions of a teacher."""

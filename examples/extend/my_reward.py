"""A reward: how much of an answer is digits, for GRPO.

cd examples/extend && python -m capibara.train --gin_file=my_reward.gin --emulate=2
"""

from capibara.config import configurable


@configurable
def digits(prompt, answer, record, *, least=1):
    """The share of digits among the letters of an answer; 0 where there are fewer than `least`.

    Args:
      prompt: what the model was asked, as the chat template writes it.
      answer: what it said.
      record: the line of the data, for right answers and the like.
      least: of digits.
    """
    found = sum(letter.isdigit() for letter in answer)
    return found / len(answer) if found >= least else 0.0

"""A metric: how near a number in an answer is to the right one. It judges the answers of any model or run folder.

cd examples/extend && python -m capibara.evaluate --gin_file=my_metric.gin --model_dir=runs/my_source --trust_config
"""

import re

from capibara.config import configurable


@configurable
def numbers_apart(targets, predictions, *, most=100.0):
    """Distance from the first number in each prediction to the target; `most` where there is none.

    Args:
      targets: of each example what `EvalTask.target` names.
      predictions: of each example the generated text.
      most: the largest distance.
    """

    def apart(target, prediction):
        found = re.search(r"-?\d+", prediction)
        return min(most, abs(float(found[0]) - float(target))) if found else most

    # One number an example: the mean is shown, with its standard error.
    return {"numbers_apart": [apart(t, p) for t, p in zip(targets, predictions)]}

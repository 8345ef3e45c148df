"""What a run refuses before anything is built."""

import pytest

from capibara.types import UserError


@pytest.mark.parametrize("seed", [-1, 2**32, 10**30])
def test_a_seed_has_32_bits(make_trainer, seed):
    with pytest.raises(UserError, match=f"Trainer.seed is {seed}, must be from 0 to 4294967295"):
        make_trainer(seed=seed)
    assert make_trainer(seed=2**32 - 1).seed == 2**32 - 1

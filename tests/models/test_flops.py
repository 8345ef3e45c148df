"""Model FLOPs per trained token against manual counts."""

import dataclasses

import pytest

from capibara.models import api
from capibara.models.architectures.decoder import DecoderConfig
from capibara.models.architectures.encdec import EncoderDecoderConfig
from capibara.models.architectures.encoder import EncoderConfig
from capibara.models.parts.moe import Moe

D, N, K, H, F, V, L, T = 32, 4, 2, 8, 48, 64, 6, 16
SIZES = dict(vocab_size=V, embed_dim=D, num_layers=L, num_heads=N, num_kv_heads=K, head_dim=H, mlp_dim=F)
ATTENTION, MLP, HEAD = 2 * D * N * H + 2 * D * K * H, 3 * D * F, V * D
KEY = 12 * N * H  # two products of 2 FLOPs a dimension and query head, forward and twice backward


def flops(config, *lengths):
    return api.build(config).flops_per_token(*(lengths or (T,)))


DENSE = DecoderConfig(**SIZES)
WEIGHTS = 6 * (L * (ATTENTION + MLP) + HEAD)


@pytest.mark.parametrize(
    "change",
    [{}, dict(head="separate"), dict(bias="all"), dict(positions="learned", max_length=99), dict(qk_norm="head")],
    ids=str,
)
def test_a_decoder_counts_matmuls_and_the_causal_half(change):
    assert flops(dataclasses.replace(DENSE, **change)) == WEIGHTS + L * KEY * T / 2


def test_a_local_layer_counts_the_keys_in_its_window():
    window = 4
    local = (T * window - window**2 / 2) / T  # a band of the square, less the triangle before the row's beginning
    config = dataclasses.replace(DENSE, window=window, layer_pattern=("local", "local", "global", "local"))
    assert flops(config) == pytest.approx(WEIGHTS + KEY * (5 * local + T / 2))  # the pattern's first two again
    assert flops(dataclasses.replace(config, window=T)) == flops(DENSE)
    assert flops(dataclasses.replace(config, window=99)) == flops(DENSE)


def test_a_block_counts_the_half_of_its_keys():
    sliding = dataclasses.replace(DENSE, window=4, layer_pattern=("local",))
    blocks = dataclasses.replace(sliding, window_kind="block")
    whole = dataclasses.replace(sliding, window=T)
    per_key = (flops(DENSE) - flops(blocks)) / (T / 2 - 4 / 2)
    assert flops(whole) == flops(dataclasses.replace(whole, window_kind="block")) == flops(DENSE)
    assert flops(DENSE) - flops(sliding) == pytest.approx(per_key * (T / 2 - 4 + 4**2 / (2 * T)))


def test_of_experts_those_of_the_token_count():
    config = dataclasses.replace(DENSE, moe=Moe(num_experts=8, top_k=2, expert_dim=24, shared_experts=1, shared_dim=40))
    mlp = D * 8 + 2 * 3 * D * 24 + 3 * D * 40  # router, two experts of eight, the shared one
    assert flops(config) == 6 * (L * (ATTENTION + mlp) + HEAD) + L * KEY * T / 2
    assert flops(dataclasses.replace(config, bias="all")) == flops(config)


def test_an_encoder_sees_whole_rows():
    config = EncoderConfig(**SIZES)
    weights = L * (ATTENTION + 2 * D * F) + D * D + HEAD  # no gate; the transform before the head
    assert flops(config) == 6 * weights + L * KEY * T


def test_an_encoder_shares_its_cost_out_among_the_decoders_tokens():
    S, E = 40, 3
    config = EncoderDecoderConfig(**SIZES, num_encoder_layers=E)
    into, out = 2 * D * K * H, 2 * D * N * H  # of an attention: keys and values; queries and what comes out
    decoder = 6 * (L * (ATTENTION + out + MLP) + HEAD) + L * KEY * (T / 2 + S)
    encoder = 6 * (E * (ATTENTION + MLP) + L * into) + E * KEY * S
    assert flops(config, T, S) == pytest.approx(decoder + encoder * S / T)

"""Summaries of traces: of TPU planes, emulated devices and several hosts; times are those of the trace."""

from __future__ import annotations

import gzip
import json
import pathlib

import jax
import jax.numpy as jnp
import pytest
from jax.profiler import ProfileData

from capibara.core.types import UserError
from capibara.monitoring.profiling import callback, categories, summary, trace
from capibara.monitoring.profiling.trace import Lane, Op, Trace
from capibara.training.profiling import profile, profiler

# Steps of 10 us on one chip: a loop of 6 us with two products within, an all-reduce of 2 us half hidden by a copy, 1 us idle.
TPU = """
planes { name: "/device:TPU:0"
  lines { name: "XLA Modules" timestamp_ns: 1000 events { metadata_id: 9 offset_ps: 0 duration_ps: 10000000 } }
  lines { name: "XLA Ops" timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 0 duration_ps: 6000000 }
    events { metadata_id: 2 offset_ps: 1000000 duration_ps: 2000000 stats { metadata_id: 1 str_value: "convolution fusion" } }
    events { metadata_id: 2 offset_ps: 3000000 duration_ps: 2000000 stats { metadata_id: 1 str_value: "convolution fusion" } }
    events { metadata_id: 3 offset_ps: 7000000 duration_ps: 2000000 stats { metadata_id: 1 str_value: "all-reduce" } }
    events { metadata_id: 5 offset_ps: 9000000 duration_ps: 1000000 stats { metadata_id: 1 str_value: "loop fusion" } } }
  lines { name: "XLA Async Ops" timestamp_ns: 1000
    events { metadata_id: 4 offset_ps: 8000000 duration_ps: 1000000 stats { metadata_id: 1 str_value: "copy" } } }
  event_metadata { key: 1 value { id: 1 name: "while.3" } }
  event_metadata { key: 2 value { id: 2 name: "%fusion.7 = bf16[8,8]{1,0} fusion(bf16[8,8]{1,0} %copy.2), kind=kOutput" } }
  event_metadata { key: 3 value { id: 3 name: "fusion.8" } }
  event_metadata { key: 4 value { id: 4 name: "copy.1" } }
  event_metadata { key: 5 value { id: 5 name: "fusion.9" } }
  event_metadata { key: 9 value { id: 9 name: "jit_step" } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_category" } } }
planes { name: "/host:CPU" lines { name: "python" timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 0 duration_ps: 500000 stats { metadata_id: 1 int64_value: 6 } } }
  event_metadata { key: 1 value { id: 1 name: "train" } }
  stat_metadata { key: 1 value { id: 1 name: "step_num" } } }
"""


def written(folder, text=TPU, host="a"):
    path = folder / "plugins" / "profile" / "2026" / f"{host}.xplane.pb"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
    return folder


def test_a_tpus_time_is_divided_by_category_without_counting_any_twice(tmp_path):
    found = callback.of_folder(str(written(tmp_path)), steps=1)
    assert (found.devices, found.steps) == (1, 1) and found.step_s == pytest.approx(10e-6)
    assert found.busy == pytest.approx(0.9)
    assert found.collectives == pytest.approx(0.1)  # the copy hides the other half
    scale = 9 / 10  # 10 us of operations run within 9 us
    assert found.by_category == pytest.approx(
        {"matrix products": 0.4 * scale, "control flow": 0.2 * scale, "collectives": 0.2 * scale}
        | {"fused operations": 0.1 * scale, "copies and layouts": 0.1 * scale}
    )
    name, category, share, times = found.largest[0]
    assert (name, category, times) == ("fusion.7", "matrix products", 2) and share == pytest.approx(0.4 * scale)
    text = found.text()
    assert "busy 90% of the time, and idle 10%" in text and "fusion.7 (matrix products), 2.0 times a step" in text
    assert found.as_json()["idle"] == pytest.approx(0.1) and json.dumps(found.as_json())


def test_a_gpus_time_is_divided_by_category(tmp_path):
    """A step of a decoder with cuDNN's attention, as an H200 ran it: kernels of XLA, Triton, cuBLAS and cuDNN, and copies."""
    path = tmp_path / "plugins" / "profile" / "2026" / "a.xplane.pb"
    path.parent.mkdir(parents=True)
    path.write_bytes(gzip.decompress(pathlib.Path(__file__).with_name("h200_step.xplane.pb.gz").read_bytes()))
    found = callback.of_folder(str(tmp_path), steps=1)
    assert (found.devices, found.collectives) == (1, 0.0)
    assert found.step_s == pytest.approx(0.03595, rel=1e-3) and found.busy == pytest.approx(0.868, abs=1e-3)
    shares = {
        "matrix products": 0.343, "copies and layouts": 0.174, "attention kernels": 0.111, "fused operations": 0.102,
        "gather and scatter": 0.093, "reductions": 0.043, "host transfers": 0.001,
    }  # fmt: skip
    assert found.by_category == pytest.approx(shares, abs=1e-3)
    assert found.largest[0][:2] == ("memcpy128", "copies and layouts") and found.largest[0][3] == 134
    (read,) = [trace.read(one) for one in trace.files_of(str(tmp_path))]
    names = {op.name for lane in read.lanes for op in lane.ops}
    assert "cudnn::fusion::convert_dq_to_16bits" in names and not any(set("(%<= ") & set(name) for name in names)


def test_hosts_are_read_together_and_steps_divide(tmp_path):
    written(tmp_path)
    written(tmp_path, TPU.replace("duration_ps: 1000000", "duration_ps: 3000000"), host="b")
    found = callback.of_folder(str(tmp_path), steps=2)
    assert found.devices == 2 and found.step_s == pytest.approx((10e-6 + 12e-6) / 2 / 2)
    assert found.largest[0][3] == 1.0


def test_advice_follows_the_figures():
    lane = lambda *ops: Trace((Lane("TPU:0", tuple(Op(*op) for op in ops)),), ())  # noqa: E731
    waits = summary.summarised([lane(("a", "matrix products", 0, 10), ("b", "matrix products", 90, 100))], 1)
    assert any("wait for the host" in line for line in waits.advice())
    bound = summary.summarised([lane(("a", "matrix products", 0, 50), ("c", "collectives", 50, 100))], 1)
    assert bound.collectives == 0.5 and any("collectives bound" in line for line in bound.advice())
    good = summary.summarised([lane(("a", "matrix products", 0, 100))], 1)
    assert good.advice() == []
    assert summary.summarised([Trace((), ())], 1) is None


@pytest.mark.parametrize(
    ("name", "hlo_category", "category"),
    [
        ("all-gather.3", None, "collectives"),
        ("fusion.1", "convolution fusion", "matrix products"),
        ("fusion.1", "loop fusion", "fused operations"),
        ("splash_mha_fwd", "custom-call", "attention kernels"),
        ("dot.4", None, "matrix products"),
        ("dynamic-update-slice.2", None, "gather and scatter"),
        ("copy.2", "data formatting", "copies and layouts"),
        ("reduce-scatter.1", None, "collectives"),
        ("reduce.1", None, "reductions"),
        ("infeed.2", None, "host transfers"),
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT", None, "matrix products"),
        ("void cutlass::Kernel2<cutlass_80_wmma>(Params)", None, "matrix products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma", None, "attention kernels"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, 128>(void*)", None, "attention kernels"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", None, "collectives"),
        ("MemcpyH2D", None, "host transfers"),
        ("MemcpyD2D", None, "copies and layouts"),
        ("Memset 3", None, "copies and layouts"),
        ("zzz", None, "other"),
    ],
)
def test_categories(name, hlo_category, category):
    assert categories.category_of(name, hlo_category) == category or hlo_category == "custom-call"


def test_a_traced_function_of_this_machine_is_summarised(tmp_path, capsys):
    step = jax.jit(lambda x: jnp.sort(x @ x, axis=0))
    x = jnp.ones((128, 128))
    step(x).block_until_ready()
    with profiler.Profiler(profile.Profile(start=4, stop=5), str(tmp_path)) as tracing:
        for number in (3, 4, 5, 6):
            with tracing.step(number):
                result = step(x)
            if tracing.ends(number):
                first, folder = tracing.end(number, result)
    assert first == 4 and folder == profiler.folder_of(str(tmp_path), 4, 5)
    (path,) = trace.files_of(folder)
    read = trace.read(path)
    assert len(read.steps_ns) == 2 and {lane.device for lane in read.lanes} == {"CPU:0"}
    callback.ProfileSummary().on_profile(5, 4, folder)
    assert f"tensorboard --logdir={folder}" in capsys.readouterr().out
    found = json.loads((tmp_path / "profile" / "steps-4-5" / "summary.json").read_text())
    assert found["steps"] == 2 and 0 < found["busy"] <= 1 and sum(found["by_category"].values()) <= 1.0001


def test_what_is_no_trace_is_refused_and_does_not_stop_a_run(tmp_path, caplog):
    path = written(tmp_path) / "plugins" / "profile" / "2026" / "a.xplane.pb"
    path.write_bytes(b"\xff" * 64)
    with pytest.raises(UserError, match="no trace of JAX's profiler"):
        trace.read(str(path))
    callback.ProfileSummary().on_profile(2, 1, str(tmp_path))
    assert "cannot be summarised" in caplog.text
    callback.ProfileSummary().on_profile(2, 1, str(tmp_path / "nowhere"))

"""Ranks all legal ways to train a workload on a slice by the cost model's predictions, in about a second."""

from __future__ import annotations

import bisect
import dataclasses
import enum
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from capibara.core import projections
from capibara.core.fields import did_you_mean
from capibara.core.types import UserError
from capibara.optim import StateDtype
from capibara.planner.hardware import network, slices
from capibara.planner.hardware.chips import GIB
from capibara.planner.hardware.slices import Slice
from capibara.planner.model import cost, memory
from capibara.planner.model.choice import Choice, Kind
from capibara.planner.model.cost import Cost
from capibara.planner.model.memory import Memory
from capibara.planner.model.workload import Workload
from capibara.sharding import MESH_AXES, Remat, RematPolicy

_PRODUCTS = (*projections.QKV, projections.ATTENDED, *(n for n in projections.NEEDED if n not in projections.QKV))
_UP, _OUT = "mlp_up", "attention_out"
# Remat policies to consider, from the least to the most recomputation. The second one recomputes norms and activations
# but no product: it saves half of what `none` saves. Those that offload are for TPUs alone: on a CPU JAX offloads nothing, and
# for GPUs no compile has shown what is hidden. A byte of any product's result costs about the same FLOPs to make again: keys and
# values are the smallest, and half of a gated MLP's hidden units is what PCIe can move beside the forward pass of wide layers.
REMATS = (
    RematPolicy(Remat.NONE),
    RematPolicy(Remat.SAVE, _PRODUCTS),
    RematPolicy(Remat.MINIMAL),
    RematPolicy(Remat.SAVE, (*projections.QKV, projections.ATTENDED)),
    RematPolicy(Remat.SAVE, projections.QKV),
    RematPolicy(Remat.OFFLOAD, (projections.LAYER_INPUT, *projections.QKV[1:], projections.ATTENDED, _UP)),
    RematPolicy(Remat.OFFLOAD, (projections.LAYER_INPUT, *projections.QKV, projections.ATTENDED, _OUT)),
    RematPolicy(Remat.OFFLOAD, (projections.LAYER_INPUT, *projections.QKV, projections.ATTENDED)),
    RematPolicy(Remat.OFFLOAD, (projections.LAYER_INPUT, *projections.QKV)),
    RematPolicy(Remat.FULL),
    RematPolicy(Remat.OFFLOAD, (projections.LAYER_INPUT,)),
)
# Share of the machine's memory for activations. The rest is for the processes, their data, and the copy of the state that
# a checkpoint is written from. A published recipe (Llama 3.1 70B on v6e-256, 5 rows of 8192) uses 67%.
_HOST_SHARE = 0.7
# Larger axes only add traffic: the first by a chip's neighbours in a torus, the second by layers in flight.
_MOST_TENSOR, _MOST_CONTEXT, _MOST_STAGES = 16, 32, 16
_PARTS = 4  # most parts of a micro-batch per pipeline stage: more shorten the bubble, but make products small
_FEWEST_TOKENS = 512  # least tokens of a row on one device of a context axis: fewer make its kernels too small
_MOST_ROWS = 8192  # most rows of a micro-batch on one device
_ALIKE = 1.01  # plans whose speeds differ by less count as equal


class Goal(enum.StrEnum):
    """What the best plan maximises: tokens per second, or rows per step."""

    THROUGHPUT = "throughput"
    LARGEST_BATCH = "largest_batch"


@dataclasses.dataclass(frozen=True)
class Ranked:
    """A choice with its predictions.

    Attributes:
      choice, memory: the choice and its predicted memory.
      work, slice_: what was asked about.
      limit_bytes: HBM of a device that a plan may use.
      host_limit_bytes: the host's memory that activations of a device may use.
    """

    choice: Choice
    memory: Memory
    work: Workload = dataclasses.field(repr=False)
    slice_: Slice
    limit_bytes: float
    host_limit_bytes: float = math.inf

    @functools.cached_property  # half of a search's plans do not fit, and are ranked by what they miss
    def cost(self) -> Cost:
        """The predicted step."""
        return cost.cost(self.work, self.choice, self.slice_)

    @property
    def fits(self) -> bool:
        return not self.missing_bytes

    @property
    def missing_bytes(self) -> float:
        """HBM or host memory missing for each device, whichever is more; 0 if the plan fits."""
        return max(0.0, self.memory.peak - self.limit_bytes, self.memory.host - self.host_limit_bytes)


def check_headroom(headroom: float) -> None:
    """Raises UserError for a headroom that is not a share of the HBM."""
    if not 0 <= headroom < 1:
        raise UserError(f"--headroom={headroom} must be from 0 to below 1: try --headroom=0.06")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """The search's question.

    Attributes:
      goal: what to maximise.
      batch_size: rows per step; None: the best number.
      accumulation: micro-batches per step; None: the fewest that fit.
      headroom: share of the usable HBM that predictions leave free, since they err by a few percent.
      state_dtypes: dtypes of the optimizer's state to consider.
      remats: remat policies to consider; None: those of REMATS that are known on the chip.
      fixed: mesh axis -> required size.
      scales: corrections of the memory model (planner.model.memory) for kinds of choices, learned from compiles.
    """

    goal: Goal = Goal.THROUGHPUT
    batch_size: int | None = None
    accumulation: int | None = None
    headroom: float = 0.06
    state_dtypes: tuple[StateDtype, ...] = (StateDtype.FLOAT32,)
    remats: tuple[RematPolicy, ...] | None = None
    fixed: tuple[tuple[str, int], ...] = ()
    scales: tuple[tuple[Kind, float], ...] = ()

    def scale(self, choice: Choice) -> float:
        """The correction for a choice; for kinds that were not compiled the median of the others, at least 1."""
        return self._by_kind.get(choice.kind, self._fallback) if self.scales else 1.0

    @functools.cached_property
    def _by_kind(self) -> dict[Kind, float]:
        return dict(self.scales)

    @functools.cached_property
    def _fallback(self) -> float:
        # One kind needing less than predicted says little about others; one needing more is a warning.
        return max(1.0, statistics.median(self._by_kind.values()))

    def __post_init__(self) -> None:
        if self.batch_size is not None and self.batch_size < 1:
            raise UserError(f"batch_size is {self.batch_size}, must be at least 1")
        check_headroom(self.headroom)


def parse_axis(text: str) -> tuple[str, int]:
    """Parses a mesh axis and its size from "tensor=4".

    Raises:
      UserError: the axis does not exist, or the size is not a positive number.
    """
    name, _, size = text.partition("=")
    if name not in MESH_AXES:
        raise UserError(f"--axis={text}: no mesh axis {name!r}{did_you_mean(name, MESH_AXES)}")
    if not (size.isascii() and size.isdigit()) or int(size) < 1:
        raise UserError(f"--axis={text} must be like {name}=4: a number of at least 1")
    return name, int(size)


def search(work: Workload, slice_: Slice, question: Question | None = None) -> list[Ranked]:
    """All plans, the best first; those that do not fit come last, sorted by the missing memory.

    Args:
      work: the workload.
      slice_: the slice.
      question: goal and limits.

    Raises:
      UserError: no mesh of the slice divides the model or the batch.
    """
    question = question or Question()
    ranked: list[Ranked] = []
    for sizes in meshes(work, slice_, dict(question.fixed)):
        ranked += _of_mesh(work, slice_, sizes, question)
    if not ranked:
        raise _no_mesh(work, slice_, question)
    return sorted(ranked, key=functools.partial(_order, work=work, question=question))


def fitting(work: Workload, slice_: Slice, question: Question, words: Mapping[str, str] | None = None) -> list[Ranked]:
    """The plans of `search`.

    Args:
      work, slice_, question: as for `search`.
      words: as for `no_plan`; None: FLAGS.

    Raises:
      UserError: none fits, or as in `search`.
    """
    ranked = search(work, slice_, question)
    if not ranked[0].fits:
        raise no_plan(ranked[0], work, slice_, question, words or FLAGS)
    return ranked


def _order(ranked: Ranked, work: Workload, question: Question) -> tuple:
    axes = sum(size > 1 for size in ranked.choice.sizes)
    if not ranked.fits:
        return 1, ranked.memory.host > ranked.host_limit_bytes, ranked.missing_bytes, axes
    if question.goal is Goal.LARGEST_BATCH:
        return 0, -ranked.choice.batch_size(work), -ranked.cost.tokens_per_s, axes
    # Predictions cannot distinguish plans within a percent: prefer the simplest, with the most exact optimizer state.
    rounded = list(StateDtype).index(ranked.choice.state_dtype)
    speed, offloads = ranked.cost.tokens_per_s, ranked.memory.host > 0
    return 0, -round(math.log(speed) / math.log(_ALIKE)), rounded, axes, offloads, -speed


def meshes(work: Workload, slice_: Slice, fixed: dict[str, int] | None = None) -> Iterator[tuple[int, ...]]:
    """Sizes of sharding.MESH_AXES that divide the model and multiply to the slice's devices."""
    fixed, devices = fixed or {}, slice_.devices
    longest = max(1, min(_MOST_CONTEXT, work.length // _FEWEST_TOKENS))
    most = {"tensor": _MOST_TENSOR, "context": longest, "expert": devices, "stage": _MOST_STAGES}
    if slice_.count > 1:  # stages across the data centre's network only if they are requested
        most["stage"] = 1
    options = {
        axis: [n for n in _divisors(devices) if (n == fixed[axis] if axis in fixed else n <= largest)]
        for axis, largest in most.items()
    }
    options = {axis: [n for n in sizes if not _illegal(work, axis, n)] for axis, sizes in options.items()}
    for stage in options["stage"]:
        for expert in options["expert"]:
            for context in options["context"]:
                for tensor in options["tensor"]:
                    inner = stage * expert * context * tensor
                    if devices % inner:
                        continue
                    for fsdp in _divisors(devices // inner):
                        sizes = dict(stage=stage, expert=expert, context=context, tensor=tensor, fsdp=fsdp)
                        sizes["data"] = devices // inner // fsdp
                        if all(sizes[axis] == size for axis, size in fixed.items()) and _legal(work, slice_, sizes):
                            yield tuple(sizes[axis] for axis in MESH_AXES)


def _illegal(work: Workload, axis: str, size: int) -> str | None:
    """Why the model cannot be trained with a mesh axis of that size; None: this axis does not prevent it."""
    c = work.config
    experts = 1 if c.moe is None else c.moe.num_experts
    pattern = len(getattr(c, "layer_pattern", (0,)))
    if size == 1:
        return None
    if axis == "context" and c.stateful:
        return "recurrent layers read a row's tokens one after the other"
    if axis == "context" and c.streaming is not None:
        return "streaming heads see the first tokens of whole rows"
    if axis == "context" and work.length % (2 * size):
        return f"rows of {work.length} must be a multiple of {2 * size}"
    if axis == "expert" and experts % size:
        return f"it must divide the {experts} experts" if c.moe is not None else "the model has no experts"
    if axis == "stage" and not c.runs_in_stages:
        return "the model's layers run in one stage"
    if axis == "stage" and c.num_layers % (size * pattern):
        of_pattern = f" in patterns of {pattern}" if pattern > 1 else ""
        return f"stages must divide the {c.num_layers} layers{of_pattern}"
    return None


@functools.lru_cache(maxsize=256)
def _divisors(n: int) -> tuple[int, ...]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return tuple(sorted({*small, *(n // d for d in small)}))


def _legal(work: Workload, slice_: Slice, mesh: dict[str, int]) -> bool:
    if slice_.count > 1 and all(mesh[axis] % slice_.count for axis in MESH_AXES[:3]):
        return False
    for _, _, size, axes in work.constraints:
        if size % math.prod(mesh[axis] for axis in axes):
            return False
    return True


def _of_mesh(work: Workload, slice_: Slice, sizes: tuple[int, ...], question: Question) -> Iterator[Ranked]:
    """The best rows and accumulation of a mesh for each remat policy and state dtype."""
    limit = slice_.chip.device_usable_hbm_bytes * (1 - question.headroom)
    host_limit = slice_.device_host_bytes * _HOST_SHARE
    base = Choice(sizes=sizes, rows=1)
    shards = base.batch_shards(work)
    layers = functools.cache(lambda rows: memory.results_of_layers(work, dataclasses.replace(base, rows=rows)))
    for dtype, remat in itertools.product(question.state_dtypes, question.remats or _known(work, slice_)):

        @functools.cache  # most pairs are evaluated more than once
        def weighed(
            rows: int, accumulation: int, remat: RematPolicy = remat, dtype: StateDtype = dtype
        ) -> tuple[Choice, Memory]:
            choice = _choice(base, rows=rows, accumulation=accumulation, remat=remat, state_dtype=dtype)
            return choice, memory.memory(work, choice, slice_.chip, question.scale(choice), limit, layers(rows))

        def peak(rows: int, accumulation: int) -> float:
            predicted = weighed(rows, accumulation)[1]
            return predicted.peak if predicted.host <= host_limit else math.inf

        for pair in _rows(peak, base.mesh["stage"], shards, question, limit):
            choice, predicted = weighed(*pair)
            yield Ranked(choice, predicted, work, slice_, limit, host_limit)


def _known(work: Workload, slice_: Slice) -> Iterator[RematPolicy]:
    """The policies of REMATS that are known on the chip and name only results that the model has."""
    layer = projections.of_layer(gated=work.config.activation.gated, experts=work.config.moe is not None)
    results = {projections.LAYER_INPUT, projections.ATTENDED, *(item.result for item in layer)}
    for remat in REMATS:
        if remat.kind is not Remat.OFFLOAD or slice_.chip.is_tpu and results.issuperset(remat.names):
            yield remat


def _choice(base: Choice, *, rows: int, accumulation: int, remat: RematPolicy, state_dtype: StateDtype) -> Choice:
    """The choice with as many pipeline parts as its rows allow, up to four per stage."""
    stages = base.mesh["stage"]
    parts_of_rows = max((n for n in _divisors(rows) if n <= _PARTS * stages), default=1) if stages > 1 else 1
    return dataclasses.replace(
        base, rows=rows, accumulation=accumulation, pipeline_microbatches=parts_of_rows, remat=remat,
        state_dtype=state_dtype,
    )  # fmt: skip


def _rows(
    peak: Callable[[int, int], float], stages: int, shards: int, question: Question, limit: float
) -> Iterable[tuple[int, int]]:
    """Pairs of rows and accumulation that are worth ranking; `peak` gives the bytes of HBM of such a pair."""
    if question.batch_size is not None:
        if question.batch_size % shards:
            return []
        each = question.batch_size // shards
        counts = [n for n in _divisors(each) if each // n % stages == 0]
        pairs = [(each // n, n) for n in counts if question.accumulation in (None, n)]
        if not pairs:
            return []
        # Fewer micro-batches gather weights less often: take the first number that fits, or comes closest. From two on,
        # when the sum of their gradients is held, more micro-batches need less memory each.
        whole, split = pairs[: pairs[0][1] == 1], pairs[pairs[0][1] == 1 :]
        if any(peak(*pair) <= limit for pair in whole):
            return whole
        if not split or peak(*split[-1]) > limit:
            return [min([*whole, *split[-1:]], key=lambda pair: peak(*pair))]
        return [split[bisect.bisect_left(split, True, key=lambda pair: peak(*pair) <= limit)]]
    fewest, parts = stages, question.accumulation or 1
    if peak(fewest, parts) > limit:
        return [(fewest, parts)]
    if stages > 1 and peak(_PARTS * stages, parts) <= limit:  # complete pipelines, else fewer parts, which hold more
        fewest = _PARTS * stages
    most = _most(lambda n: peak(n * fewest, parts) <= limit, _MOST_ROWS // fewest, _guess(peak, fewest, parts, limit))
    most *= fewest
    return [(rows, parts) for rows in sorted({fewest * max(1, most // fewest // part) for part in (1, 2, 4)})]


def _guess(peak: Callable[[int, int], float], fewest: int, parts: int, limit: float) -> int:
    """An estimate of how many times the fewest rows fit: peak memory is nearly linear in rows."""
    low, high = peak(fewest, parts), peak(8 * fewest, parts)
    return int(1 + 7 * (limit - low) / max(1.0, high - low))


def _most(fits: Callable[[int], bool], end: int, guess: int) -> int:
    """The largest n up to `end` that fits; `fits` must be monotonic and true for 1. Fast if the guess is close."""
    good, bad, step = 1, end + 1, 1
    n = min(max(guess, 1), end)
    while bad - good > 1:
        if fits(n):
            good = n
            n = good + step if bad > end else (good + bad) // 2
        else:
            bad = n
            n = bad - step if good == 1 else (good + bad) // 2
        n, step = min(max(n, good + 1), bad - 1), 2 * step
    return good


def _no_mesh(work: Workload, slice_: Slice, question: Question) -> UserError:
    fixed, devices = dict(question.fixed), slice_.devices
    shown = " ".join(f"{axis}={size}" for axis, size in fixed.items())
    named = f"{slice_.title} with {shown}" if fixed else slice_.title
    if question.batch_size is not None and any(True for _ in meshes(work, slice_, fixed)):
        if question.accumulation is not None and question.batch_size % question.accumulation:
            return UserError(
                f"batch_size ({question.batch_size}) must be a multiple of Plan.accumulation ({question.accumulation}): "
                f"try {max(1, round(question.batch_size / question.accumulation)) * question.accumulation}"
            )
        return UserError(
            f"batch_size ({question.batch_size}) divides over no mesh of {named}: try a multiple of {devices}"
        )
    if devices % math.prod(fixed.values()):
        near = max(d for d in _divisors(devices) if d <= math.prod(fixed.values()))
        return UserError(
            f"no mesh of {named}: the axes must divide its {devices} devices: try axes that multiply to {near}"
        )
    if len(fixed) == len(MESH_AXES) and math.prod(fixed.values()) != devices:
        return UserError(
            f"no mesh of {named}: the axes multiply to {math.prod(fixed.values())}, the slice has {devices} devices: leave "
            "one of them open"
        )
    for axis, size in fixed.items():
        if why := _illegal(work, axis, size):
            return UserError(f"no mesh of {named}: {why}")
    for name, logical, dimension, axes in work.constraints:
        size = math.prod(fixed.get(axis, 1) for axis in axes)
        if dimension % size:
            near = max(n for n in _divisors(size) if dimension % n == 0)
            product = " x ".join(axis for axis in axes if fixed.get(axis, 1) > 1)
            return UserError(
                f"no mesh of {named}: {product} ({size}) must divide {logical} of {name} ({dimension}): try {near}, or "
                "Rules that keep it whole"
            )
    if slice_.count > 1 and fixed and all(fixed.get(axis, slice_.count) % slice_.count for axis in MESH_AXES[:3]):
        return UserError(f"no mesh of {named}: data, stage or fsdp must be a multiple of the {slice_.count} slices")
    names = ", ".join(f"{name} {axis}={size}" for name, axis, size, _ in work.constraints[:4])
    return UserError(
        f"no mesh of {named} ({devices} devices) divides the model's sizes ({names}): try another slice, or Rules that "
        "keep one of them whole"
    )


def smallest_slice(work: Workload, like: Slice, question: Question) -> Slice | None:
    """The smallest slice of a kind of chip that some plan fits; if `like` is a part, beside as many other devices."""
    drawing = 0 if like.whole is None else like.whole.devices - like.devices
    for slice_ in slices.sizes(like.chip):
        if slice_.devices & (slice_.devices - 1):
            continue  # numbers of chips that are not powers of two divide few models
        if _fits(work, slice_, drawing, question):
            return slice_
    return None


def _fits(work: Workload, slice_: Slice, drawing: int, question: Question) -> bool:
    """Whether a plan fits a slice of which the last `drawing` devices do not train."""
    if drawing and (slice_.hosts > 1 or slice_.devices <= drawing):
        return False
    part = slices.part(slice_, 0, slice_.devices - drawing) if drawing else slice_
    try:
        return part is not None and search(work, part, question)[0].fits
    except UserError:  # no mesh of this slice divides the model or the batch
        return False


# Wording of remedies for `plan`, and for runs with an open mesh, which have other flags.
FLAGS = {
    "headroom": "it fits with --headroom={free:g}",
    "batch_size": "use a smaller --batch_size",
    "state_dtype": "--state_dtypes=int8",
}
BINDINGS = {
    "headroom": "it fits with a plan that capibara plan --headroom={free:g} --output=plan.gin writes",
    "batch_size": "use a smaller Plan.batch_size",
    "state_dtype": "Optimizer.state_dtype = 'int8'",
}


def no_plan(
    best: Ranked, work: Workload, slice_: Slice, question: Question, words: Mapping[str, str] = FLAGS
) -> UserError:
    """An error that says what the smallest plan lacks, and where it would fit.

    Args:
      best, work, slice_, question: the result and the question.
      words: FLAGS or BINDINGS: the wording for what the user can set.
    """
    if best.memory.host > best.host_limit_bytes:
        return UserError(
            f"no plan fits {slice_.title}: the leanest ({best.choice.describe()}) keeps {best.memory.host / GIB:.1f} GiB a "
            f"{slice_.chip.unit} in the host's memory, of which {best.host_limit_bytes / GIB:.1f} GiB are for it: name fewer "
            f"results in Plan.remat_names, or {words['batch_size']}"
        )
    usable, need = slice_.chip.device_usable_hbm_bytes / GIB, best.memory.peak / GIB
    return UserError(
        f"no plan fits {slice_.title}: the leanest ({best.choice.describe()}) needs "
        f"{f'{need:.1f}' if need >= 0.1 else f'{need:.2g}'} GiB a {slice_.chip.unit}, {slice_.chip.name} has {usable:.2f} "
        f"usable and {100 * question.headroom:.5g}% of it is kept free: {_suggested_fix(best, work, slice_, question, words)}"
    )


def _suggested_fix(best: Ranked, work: Workload, slice_: Slice, question: Question, words: Mapping[str, str]) -> str:
    """Changes that would make a plan fit."""
    free = 1 - best.memory.peak / slice_.chip.device_usable_hbm_bytes
    if free >= 0:
        return words["headroom"].format(free=math.floor(1000 * free) / 1000)
    ways = [f"use {smallest.name}"] if (smallest := smallest_slice(work, slice_, question)) else []
    if (whole := slice_.whole) is not None:
        fewer = range(whole.devices - slice_.devices - 1, 0, -1)
        ways += [f"rollout_devices = {n}" for n in fewer if _fits(work, whole, n, question)][:1]
    plain = dataclasses.replace(question, batch_size=None, accumulation=None)
    if question.batch_size is not None and search(work, slice_, plain)[0].fits:
        ways.append(words["batch_size"])
    if not ways:
        kind = "no single slice" if slice_.whole is None else "no slice of one host"
        ways = [f"{kind} of these chips has enough: use chips with more HBM", "shorter rows"]
        ways += [words["state_dtype"]] if StateDtype.INT8 not in question.state_dtypes else []
    return ", or ".join(ways)


def layout_lines(ranked: Ranked, slice_: Slice) -> Sequence[str]:
    """Which mesh axis lies on which torus axis."""
    layout = network.layout(slice_, ranked.choice.mesh)
    return [layout.describe(axis) for axis in MESH_AXES if layout.mesh[axis] > 1]

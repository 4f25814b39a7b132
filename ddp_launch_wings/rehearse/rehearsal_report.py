"""What a rehearsal has found, in sentences, as values for programs, and as one HTML file. Pure."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddp_launch_wings.rehearse.comparison import (
    FileDifference,
    LoggedCurve,
    Return,
    StepDifference,
    Track,
    compared_curves,
    compared_files,
    curves,
    differing_weights,
    first_difference,
    logged_again,
    logging_rank,
    returns,
)
from rendezvous.values.late_dataclass import dataclass

if TYPE_CHECKING:
    from ddp_launch_wings.rehearse.faults import Play


@dataclass(frozen=True, slots=True)
class Run:
    """What came of one run. `play` is None if it was undisturbed."""

    play: Play | None
    exit_code: int | None  # None: it took too long
    seconds: float
    parts: Mapping[str, float]  # seconds of its restarts
    said: str  # why it failed, in the launcher's words
    tracks: tuple[Track, ...]
    files: Mapping[str, str | bytes]
    shared: tuple[tuple[str, str], ...] = ()  # files outside of its folder that it wrote, with lines
    folder: str = ""


@dataclass(frozen=True, slots=True)
class Compared:
    run: Run
    verdict: str  # "same", "differs" or "failed"
    back: tuple[Return, ...]
    difference: StepDifference | None
    curves: tuple[LoggedCurve, ...]
    weights: tuple[str, ...] | None  # None: not known
    files: tuple[FileDifference, ...]
    lost_s: float
    again: tuple[int, ...]  # steps whose values were logged more than once

    @property
    def lost_steps(self) -> int | None:
        lost = [each.lost for each in self.back]
        return None if None in lost else sum(each or 0 for each in lost)


@dataclass(frozen=True, slots=True)
class Rehearsal:
    script: str
    seed: int
    undisturbed: Run
    again: Compared  # the second undisturbed run
    played: tuple[Compared, ...]
    skipped: tuple[tuple[str, str], ...]  # faults, and why they were not played
    unstable: tuple[str, ...] = ()  # files that differ between undisturbed runs

    @property
    def steps(self) -> int:
        return min((len(each.steps) for each in self.undisturbed.tracks), default=0)

    @property
    def is_same(self) -> bool:
        return self.again.verdict == "same" and all(each.verdict == "same" for each in self.played)


def compare(reference: Run, run: Run) -> Compared:
    a, b = reference.tracks, run.tracks
    weights, difference = differing_weights(a, b), first_difference(a, b)
    found, files = compared_curves(a, b), compared_files(reference.files, run.files)
    same = not weights and not files and not any(each.differs_from or each.missing for each in found)
    if run.exit_code != 0:
        verdict = "failed"
    elif same and (weights is not None or difference is None):
        verdict = "same"
    else:
        verdict = "differs"
    return Compared(
        run,
        verdict,
        tuple(returns(a, b)),
        difference,
        tuple(found),
        None if weights is None else tuple(weights),
        tuple(files),
        _training_s(run) - _training_s(reference),
        tuple(logged_again(a, b)),
    )


def _training_s(run: Run) -> float:
    began = min((each.steps[0].done_at or 0.0 for each in run.tracks if each.steps), default=0.0)
    return max((each.ended for each in run.tracks), default=0.0) - began


# --- sentences -------------------------------------------------------------------------------------

_NAMES = {
    "weights": "the weights",
    "optimizer": "the state of the optimizer",
    "rates": "the learning rate",
    "torch": "torch's random generator on the CPU",
    "cuda": "torch's random generator on the GPU",
    "python": "Python's random generator",
    "numpy": "NumPy's random generator",
    "inputs": "the inputs of the model",
    "values": "the logged values",
    "steps": "the number of steps",
}
_GENERATORS = ("torch", "cuda", "python", "numpy")
_STATE = "ddp.elastic.State keeps it (`ddp-launch docs elastic`)"
_ONE_LINE = (
    "no values were logged, so no curve is compared. Add one line to the script: "
    'ddp.log({"loss": loss.item()}, step=step)'
)


def text(found: Rehearsal) -> str:
    ranks = len(found.undisturbed.tracks)
    head = f"rehearsal of {found.script}: {ranks} rank{'s' * (ranks != 1)}, {found.steps} steps, seed {found.seed}"
    blocks = [head, "\n".join(_undisturbed(found))]
    for each in found.played:
        assert each.run.play is not None
        rows = [f"{each.run.play.kind.name}: {each.run.play.words}: {each.verdict}"]
        blocks.append("\n".join([*rows, *(f"  {line}" for line in sentences(found, each))]))
    blocks += [f"{name}: not played: {why}" for name, why in found.skipped]
    return "\n\n".join(blocks)


def _undisturbed(found: Rehearsal) -> Iterator[str]:
    again, seconds = found.again, found.undisturbed.seconds
    if again.verdict == "same":
        yield f"undisturbed, twice: the same in every step ({seconds:.1f} s)"
    else:
        yield "undisturbed, twice: the two runs differ, so differences after a fault prove nothing"
        if again.verdict == "failed":
            yield f"  the second one failed: {again.run.said}"
        yield from (f"  {line}" for line in _first_words(found, again))
        yield from (f"  {line}" for line in (*_curve_words(again), *_file_words(again)))
    if logging_rank(found.undisturbed.tracks) is None:
        yield f"  {_ONE_LINE}"
    if not any(step.inputs for each in found.undisturbed.tracks for step in each.steps[:1]):
        yield "  no DistributedDataParallel was seen, so the inputs of the model are not compared"
    for path, line in found.undisturbed.shared:
        yield (
            f"  {path} is written by all runs ({line}), so a run may find what another has left. Give the script a "
            "path with {run}, or name the path with --compare"
        )
    if found.unstable:
        names = ", ".join(sorted(found.unstable)[:3])
        yield f"  not compared, because undisturbed runs write them differently: {len(found.unstable)} files ({names})"
    for problem in dict.fromkeys(each.problem for each in found.undisturbed.tracks if each.problem):
        yield f"  the recording of a rank is not complete: {problem}"


def sentences(found: Rehearsal, each: Compared) -> list[str]:
    assert each.run.play is not None
    rows = [_recovery(each)]
    if each.verdict == "failed":
        return [*rows, f"output: {each.run.folder}"]
    if each.verdict == "same":
        kept = "logged values, files and weights at the end"
        if each.weights is None:
            kept = "all steps, logged values and files"
        rows.append(f"no difference: {kept} are those of the undisturbed run")
    elif each.run.play.kind.name == "nan":
        rows += _nan_words(each)
    else:
        rows += _first_words(found, each)
    rows += [*_curve_words(each), *_weight_words(each), *_file_words(each)]
    if each.again:
        rows.append(
            f"logged more than once: the values of {len(each.again)} steps, from step {each.again[0]} on. What was "
            "given to W&B, MLflow or TensorBoard is there twice. State(on_step=...) runs once for each step"
        )
    return rows


def _recovery(each: Compared) -> str:
    if each.run.exit_code is None:
        return "the job did not end within --limit, and was stopped"
    if each.run.exit_code:
        return f"the job failed with exit code {each.run.exit_code}: {each.run.said}"
    if not each.back:
        return f"no rank was restarted; {_seconds(each)}"
    steps = each.lost_steps
    where = ", ".join("unknown" if back.at is None else str(back.at) for back in each.back)
    lost = "an unknown number of steps" if steps is None else f"{steps} step{'s' * (steps != 1)}"
    return f"lost: {lost} (it went on at step {where}); {_seconds(each)}"


def _seconds(each: Compared) -> str:
    if not each.back:
        return f"{max(0.0, each.lost_s):.1f} s longer than undisturbed"
    stood = f"{sum(back.stood_s for back in each.back):.1f} s without a step"
    parts = ", ".join(f"{name.replace('_', ' ')} {seconds:.2f}" for name, seconds in each.run.parts.items())
    return f"{stood} ({parts})" if parts else stood


def _first_words(found: Rehearsal, each: Compared) -> Iterator[str]:
    first = each.difference
    if first is None:
        return
    names = _joined([_NAMES[name] for name in first.what])
    if first.step:
        yield f"first difference: step {first.step}, rank {first.rank}: {names}"
    else:
        yield f"first difference: rank {first.rank} began with weights that no step of the undisturbed run has"
    lines = found.undisturbed.tracks[first.rank].lines
    is_undisturbed = each is found.again
    for name in first.what:
        why, what_to_do = _advice(name, first, lines, is_undisturbed)
        if name in _GENERATORS and each.run.play is not None and each.run.play.kind.needs == "nodes":
            why = f"{_NAMES[name]} was lost with its node"
            what_to_do = f"set its seed in each step, from the number of the step{_at(lines, 'forward')}"
        yield f"why: {why}"
        yield f"do: {what_to_do}"


def _joined(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _at(lines: Mapping[str, str], what: str) -> str:
    return f" ({lines[what]})" if what in lines else ""


def _advice(name: str, first: StepDifference, lines: Mapping[str, str], undisturbed: bool) -> tuple[str, str]:
    saved = _at(lines, "save")
    again = first.again.get(name)
    if undisturbed:
        return _advice_undisturbed(name, lines)
    if name in _GENERATORS:
        state = f"is in the state of step {again} again" if again else "was not kept"
        seeded = _at(lines, "manual_seed") if name in ("torch", "cuda") else ""
        why = f"{_NAMES[name]} {state}: a new process sets its seed anew{seeded}"
        return why, f"save and load its state{saved}; {_STATE}"
    match name:
        case "weights":
            why = "the checkpoint is not the state of a finished step: another precision, an average, or too early"
            return why, f"save model.state_dict() after optimizer.step(){saved or _at(lines, 'step')}"
        case "optimizer":
            why = f"the optimizer{_at(lines, 'step')} went on without its state"
            return why, f"save and load optimizer.state_dict(){saved}"
        case "rates":
            return "the scheduler began anew", f"save and load scheduler.state_dict(){saved}"
        case "inputs":
            same = f"those of step {again} again" if again else "those of no step"
            why = f"the samples{_at(lines, 'forward')} are {same}: the order of the data was not kept"
            return why, "save the position in the data, or use ddp.elastic.ElasticSampler"
        case "steps":
            why = "the script counts its steps from another number after a restart"
            return why, f"save the number of the step{saved}"
    why = "something is used that is neither weights, optimizer, generators nor inputs"
    return why, "look for buffers, loss scales, averages and variables that a new process begins anew"


def _advice_undisturbed(name: str, lines: Mapping[str, str]) -> tuple[str, str]:
    if name in _GENERATORS:
        return f"{_NAMES[name]} has another seed in each run", "set its seed before the model is made"
    if name == "inputs":
        return (
            f"the samples{_at(lines, 'forward')} come in another order in each run",
            "set the seed of the loader",
        )
    why = "the order of operations differs between runs, or the script begins with what another run has left"
    return why, "use torch.use_deterministic_algorithms(True), and a path with {run} for all that it writes"


def _nan_words(each: Compared) -> Iterator[str]:
    bad = [curve for curve in each.curves if math.isnan(curve.last[1])]
    if bad:
        yield f"the script trained on with NaN until its end: {', '.join(curve.name for curve in bad)}"
        yield "do: end it with --stop-when 'loss is nan', or leave out a step whose gradients are not finite"
    else:
        yield "the script went on without NaN in what it logs"


def _curve_words(each: Compared) -> Iterator[str]:
    for curve in each.curves:
        if curve.differs_from is not None:
            a, b = curve.last
            by = "" if math.isnan(curve.most) else f", by {curve.most:.3g} at most"
            yield f"{curve.name}: differs from step {curve.differs_from} on{by}; at the end {b:.6g} instead of {a:.6g}"
        if curve.missing:
            yield f"{curve.name}: missing for {curve.missing} of {curve.steps} steps"


def _weight_words(each: Compared) -> Iterator[str]:
    if each.weights is None:
        yield "weights at the end: not known, because a rank ended without its exit functions"
    elif each.weights:
        more = f" and {len(each.weights) - 3} more" if len(each.weights) > 3 else ""
        yield f"weights at the end: different: {', '.join(each.weights[:3])}{more}"


def _file_words(each: Compared) -> Iterator[str]:
    for file in each.files:
        where = [
            line
            for track in each.run.tracks
            for path, line, _appends in track.wrote
            if path.endswith(f"/{file.path}")
        ]
        yield f"{file.path} {file.words}{f' (written at {where[0]})' if where else ''}"
        if file.repeated:
            yield f"  for example {file.line[:80]!r}: steps that were repeated have written again"
            yield "  do: write from State(on_step=...), or cut the file to the step that is resumed"


# --- for programs ----------------------------------------------------------------------------------


def values(found: Rehearsal) -> dict[str, Any]:
    return {
        "script": found.script,
        "seed": found.seed,
        "ranks": len(found.undisturbed.tracks),
        "steps": found.steps,
        "same": found.is_same,
        "undisturbed": {"seconds": round(found.undisturbed.seconds, 3), "verdict": found.again.verdict},
        "faults": [_values_of(found, each) for each in found.played],
        "not_played": [{"fault": name, "why": why} for name, why in found.skipped],
    }


def _values_of(found: Rehearsal, each: Compared) -> dict[str, Any]:
    play, first = each.run.play, each.difference
    assert play is not None
    return {
        "fault": play.kind.name,
        "rank": play.rank,
        "node": play.node,
        "step": play.step,
        "moment": play.moment,
        "verdict": each.verdict,
        "exit_code": each.run.exit_code,
        "lost_steps": each.lost_steps,
        "longer_s": round(each.lost_s, 3),
        "without_a_step_s": round(sum(back.stood_s for back in each.back), 3),
        "restart_s": {name: round(seconds, 4) for name, seconds in each.run.parts.items()},
        "first_difference": None
        if first is None
        else {"step": first.step, "rank": first.rank, "what": first.what},
        "weights": each.weights,
        "files": [{"path": file.path, "what": file.words} for file in each.files],
        "sentences": sentences(found, each),
    }


# --- the page --------------------------------------------------------------------------------------

_COLORS = ("#7a7f87", "#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d")
_WIDTH, _HEIGHT = 720, 220
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #8884; vertical-align: top; }}
.same {{ color: #059669; }} .differs, .failed {{ color: #dc2626; }}
svg {{ width: 100%; height: auto; }} code {{ font-size: .9em; }}
</style>
<h1>{title}</h1>
{body}
</html>
"""


def page(found: Rehearsal) -> str:
    said = html.escape
    rows = [
        (each.run.play.kind.name, each.run.play.words, each.verdict, each)
        for each in found.played
        if each.run.play is not None
    ]
    parts = [f"<p>{said(line)}</p>" for line in _undisturbed(found)]
    parts.append("<table><tr><th>fault<th>what happened<th>steps lost<th>result</tr>")
    for name, words, verdict, each in rows:
        lost = "?" if each.lost_steps is None else each.lost_steps
        parts.append(
            f'<tr><td><a href="#{name}">{said(name)}</a><td>{said(words)}<td>{lost}<td class="{verdict}">{verdict}</tr>'
        )
    parts += [f"<tr><td>{said(name)}<td>{said(why)}<td><td>not played</tr>" for name, why in found.skipped]
    parts.append("</table>")
    parts += _charts(found)
    for name, words, _verdict, each in rows:
        items = "".join(f"<li>{said(line)}" for line in sentences(found, each))
        parts.append(f'<h2 id="{name}">{said(name)}</h2><p>{said(words)}</p><ul>{items}</ul>')
    ranks = len(found.undisturbed.tracks)
    title = f"Rehearsal of {found.script}: {ranks} ranks, {found.steps} steps, seed {found.seed}"
    return _PAGE.format(title=said(title), body="\n".join(parts))


def _charts(found: Rehearsal) -> Iterator[str]:
    rank = logging_rank(found.undisturbed.tracks)
    if rank is None:
        return
    reference = found.undisturbed.tracks[rank]
    lines = [("undisturbed", curves(reference, reference))]
    lines += [
        (each.run.play.kind.name, curves(reference, each.run.tracks[rank]))
        for each in found.played
        if each.run.play is not None and rank < len(each.run.tracks)
    ]
    for name in lines[0][1]:
        drawn = [(label, of.get(name, {})) for label, of in lines]
        yield f"<h2>{html.escape(name)}</h2>{_chart(drawn)}"


def _chart(lines: Sequence[tuple[str, Mapping[int, float]]]) -> str:
    numbers = [value for _, points in lines for value in points.values() if math.isfinite(value)]
    last = max((at for _, points in lines for at in points), default=1)
    low, high = min(numbers, default=0.0), max(numbers, default=1.0)
    drawn = []
    for place, (label, points) in enumerate(lines):
        color = _COLORS[place % len(_COLORS)]
        at = " ".join(
            f"{40 + (step - 1) / max(1, last - 1) * (_WIDTH - 60):.1f},"
            f"{_HEIGHT - 30 - (value - low) / ((high - low) or 1.0) * (_HEIGHT - 50):.1f}"
            for step, value in sorted(points.items())
            if math.isfinite(value)
        )
        wide = 4 if place == 0 else 1.5
        drawn.append(f'<polyline fill="none" stroke="{color}" stroke-width="{wide}" points="{at}"/>')
        drawn.append(
            f'<text x="{45 + 90 * place}" y="14" fill="{color}" font-size="12">{html.escape(label)}</text>'
        )
    drawn.append(f'<text x="2" y="30" font-size="11" fill="#7a7f87">{high:.3g}</text>')
    drawn.append(f'<text x="2" y="{_HEIGHT - 28}" font-size="11" fill="#7a7f87">{low:.3g}</text>')
    drawn.append(
        f'<text x="{_WIDTH - 80}" y="{_HEIGHT - 8}" font-size="11" fill="#7a7f87">step {last}</text>'
    )
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(drawn)}</svg>'

"""Draw results.json: the tables of benchmarks/README.md and of README.md, and the charts.

python -m benchmarks.report
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

from tests.markdown import with_made

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS, CUDA_RESULTS = HERE / "results.json", HERE / "cuda_cache.json"
PAGES = (HERE / "README.md", ROOT / "README.md")
MEMORY_CHART, TIME_CHART = HERE / "memory.png", HERE / "seconds.png"
MIB, ROW_BYTES, BATCH = 2**20, 20_000 * 4, 200

# The ways, as ways.py has them: label, colour, line. That needs transformers; this does not.
LABELS = {
    "stock": "stock",
    "accumulate": "stock, eval_accumulation_steps=1",
    "native": "native batch_eval_metrics",
    "shim": "shim, batch_eval_metrics",
    "spool": "shim, spool",
}
STYLES = {
    "stock": ("#b23a2a", "-", "o"),
    "accumulate": ("#d98e04", "--", "s"),
    "native": ("#666666", "-", "^"),
    "shim": ("#1b6ca8", "-", "o"),
    "spool": ("#2a9d74", "-.", "D"),
}

Results = Dict[str, Any]


def recorded() -> Results:
    """results.json: what was found with each release, the newest first."""
    found: Results = json.loads(RESULTS.read_text())
    return {release: found[release] for release in sorted(found, key=_by_number, reverse=True)}


def _by_number(release: str) -> List[int]:
    return [int(part) for part in release.split(".")]


class Limit(NamedTuple):
    """What has to hold, and what was found."""

    what: str
    release: str
    most: float
    found: float
    form: str = "{:,.3f}"

    @property
    def holds(self) -> bool:
        return self.found <= self.most

    def shown(self) -> str:
        return self.form.format(self.found) + ("" if self.holds else " (above)")


def limits(results: Results) -> Iterator[Limit]:
    """The promises of this project that are figures."""
    newest, found = next(iter(results.items()))
    for rows, cases in found["seconds"].items():
        name = f"{int(rows):,} rows" if rows.isdigit() else "batches of 8 rows with 3 logits"
        yield Limit(f"time, {name}: shim to native", newest, 1.03, cases["shim"]["ratios"][1])
    shim, native = found["memory"]["shim"], found["memory"]["native"]
    yield Limit("peak, 32,000 rows: shim to native", newest, 1.01, shim["32000"] / native["32000"])
    for release, found in results.items():
        yield from _limits_to_stock(release, found)
        yield from _limits_when_off(release, found["off"])


def _limits_to_stock(release: str, found: Results) -> Iterator[Limit]:
    seconds, memory = found["seconds"]["3000"], found["memory"]
    time = seconds["shim"]["seconds"] / seconds["stock"]["seconds"]
    yield Limit("time, 3,000 rows: shim to stock", release, 1 / 5, time)
    yield Limit("peak, 3,000 rows: shim to stock", release, 1 / 10, memory["shim"]["3000"] / memory["stock"]["3000"])
    for way in ("shim", "spool"):
        what = f"memory a row, 3,000 to 32,000 rows: {LABELS[way]} (bytes)"
        yield Limit(what, release, 1024, bytes_a_row(memory[way]), "{:,.0f}")


def _limits_when_off(release: str, off: Dict[str, Any]) -> Iterator[Limit]:
    calls = off["added calls"]
    yield Limit("off: added calls an evaluation", release, 5, max(calls["evaluation"].values()), "{:,.0f}")
    yield Limit("off: added calls a batch", release, 0, calls_a_batch(calls["evaluation"]), "{:,.0f}")
    yield Limit("off: added calls a training step", release, 3, calls["training step"], "{:,.0f}")
    for work, figures in off["time"].items():
        yield Limit(f"off: time, {work}, lower quartiles", release, 1.02, figures["ratio"])


def bytes_a_row(peaks: Dict[str, float]) -> float:
    """By how much the peak grows."""
    return max(0.0, (peaks["32000"] - peaks["3000"]) * MIB / (32_000 - 3_000))


def calls_a_batch(calls: Dict[str, int]) -> float:
    """By how much the added calls grow."""
    (few, at_few), (many, at_many) = ((int(batches), count) for batches, count in calls.items())
    return (at_many - at_few) / (many - few)


def exponent(of_rows: Dict[str, float], first: int, last: int) -> float:
    """p, where the figure grows with the p-th power of the rows."""
    return math.log(of_rows[str(last)] / of_rows[str(first)]) / math.log(last / first)


def _table(head: List[str], lines: List[List[str]], numbers_from: int = 1) -> str:
    rule = "".join("---|" if column < numbers_from else "---:|" for column in range(len(head)))
    rows = [f"| {' | '.join(line)} |" for line in [head, *lines]]
    return "\n".join([rows[0], f"|{rule}", *rows[1:]])


def _of_each_release(results: Results, make: Any) -> str:
    return "\n\n".join(f"transformers {release}\n\n{make(found)}" for release, found in results.items())


def _memory_table(found: Results) -> str:
    memory = found["memory"]
    rows = list(next(iter(memory.values())))
    lines = [
        [LABELS[way], *(f"{peaks[count]:,.1f}" for count in rows), f"{bytes_a_row(peaks):,.0f}"]
        for way, peaks in memory.items()
    ]
    return _table(["MiB", *(f"{int(count):,} rows" for count in rows), "bytes a row"], lines)


def _ratio(case: Optional[Dict[str, Any]]) -> str:
    if case is None:
        return "-"
    low, middle, high = case.get("ratios", (1, 1, 1))
    return f"{middle:.2f} ({low:.2f} to {high:.2f})" if "ratios" in case else "1"


def _seconds_table(found: Results) -> str:
    seconds = {rows: cases for rows, cases in found["seconds"].items() if rows.isdigit()}
    ways = [way for way in LABELS if way in seconds["3000"]]
    lines = []
    for way in ways:
        times = {rows: cases[way]["seconds"] for rows, cases in seconds.items() if way in cases}
        lines.append(
            [LABELS[way]]
            + [_ratio(cases.get(way)) for cases in seconds.values()]
            + [f"{times['3000']:.2f}", f"{exponent(times, 1_000, 8_000):.2f}"]
        )
    head = ["", *(f"{int(rows):,} rows" for rows in seconds), "seconds, 3,000 rows", "exponent"]
    return _table(head, lines)


def _batches_table(results: Results) -> str:
    newest, found = next(iter(results.items()))
    lines = []
    for title, case in (
        ("3,000 rows of 20,000 logits, batches of 8", found["default_batch"]["default batch"]),
        ("4,000 rows of 3 logits, batches of 8", found["seconds"]["narrow"]),
    ):
        for way in (way for way in LABELS if way in case):
            lines.append([title, LABELS[way], f"{case[way]['seconds']:.2f}", _ratio(case[way])])
    return _table([f"transformers {newest}", "way", "seconds", "to native"], lines, numbers_from=2)


def _off_table(results: Results) -> str:
    lines = []
    for release, found in results.items():
        calls, time, milliseconds = (found["off"][name] for name in ("added calls", "time", "milliseconds"))
        lines.append(
            [
                release,
                *(str(calls["evaluation"][batches]) for batches in ("10", "100")),
                str(calls["first evaluation"]),
                str(calls["training step"]),
                *(f"{time[work]['ratio']:.3f} ({time[work]['turns']})" for work in ("evaluation", "training")),
                *(f"{milliseconds[name]:.0f}" for name in ("import", "apply")),
            ]
        )
    head = ["transformers", "evaluation of 10 batches", "of 100", "first of a Trainer", "training step"]
    head += ["time, evaluation (turns)", "time, training (turns)", "import shim, ms", "apply(), ms"]
    return _table(head, lines)


def _calls_table(results: Results) -> str:
    ways = [way for way in LABELS if any(way in found["off"]["calls"] for found in results.values())]
    lines = []
    for release, found in results.items():
        calls = found["off"]["calls"]
        lines.append(
            [
                release,
                *(f"{calls[way]['a batch']:,.0f} + {calls[way]['beside']:,}" if way in calls else "-" for way in ways),
            ]
        )
    return _table(["transformers", *(LABELS[way] for way in ways)], lines)


def _ranks_table(results: Results) -> str:
    newest, found = next(iter(results.items()))
    ways = list(next(iter(found["ranks"].values())))
    lines = [[processes, *(f"{sizes[way]:,}" for way in ways)] for processes, sizes in found["ranks"].items()]
    return _table([f"processes, transformers {newest}", *ways], lines)


def _limits_table(results: Results) -> str:
    by_what: Dict[str, Dict[str, Limit]] = {}
    for limit in limits(results):
        by_what.setdefault(limit.what, {})[limit.release] = limit
    lines = []
    for what, by_release in by_what.items():
        first = next(iter(by_release.values()))
        cells = [by_release[release].shown() if release in by_release else "-" for release in results]
        lines.append([what, first.form.format(first.most), *cells])
    return _table(["what", "at most", *results], lines)


def _machines(results: Results) -> str:
    lines = [
        [release, found["machine"], *(found["versions"][name] for name in ("python", "accelerate", "torch", "numpy"))]
        for release, found in results.items()
    ]
    return _table(["transformers", "machine", "Python", "accelerate", "torch", "numpy"], lines, numbers_from=6)


def _summary(results: Results) -> str:
    newest, found = next(iter(results.items()))
    lines = []
    for way in (way for way in LABELS if way in found["memory"]):
        times, default = found["seconds"]["3000"], found["default_batch"]["default batch"]
        peaks = found["memory"][way]
        lines.append(
            [LABELS[way], f"{peaks['3000']:,.1f}", f"{peaks['32000']:,.1f}"]
            + [f"{cases[way]['seconds']:.2f}" for cases in (times, default)]
        )
    head = [f"transformers {newest}", "peak MiB, 3,000 rows", "32,000 rows", "seconds, 3,000 rows", "in batches of 8"]
    return _table(head, lines)


def _cuda(_: Results) -> str:
    if not CUDA_RESULTS.exists():
        return "Not measured yet: no figure of this kind has been taken on a GPU."
    from benchmarks.cuda_cache import table

    return table(json.loads(CUDA_RESULTS.read_text()))


MADE = {
    "limits": _limits_table,
    "machines": _machines,
    "memory": lambda results: _of_each_release(results, _memory_table),
    "seconds": lambda results: _of_each_release(results, _seconds_table),
    "batches": _batches_table,
    "off": _off_table,
    "calls": _calls_table,
    "ranks": _ranks_table,
    "cuda": _cuda,
    "summary": _summary,
}


def page(text: str, results: Results) -> str:
    """The page with what is made from the results in it made anew."""
    for name, make in MADE.items():
        begin = f"<!-- made by benchmarks/report.py: {name} -->"
        if begin in text:
            text = with_made(text, begin, make(results))
    return text


def digest() -> str:
    """What the charts carry, so that it can be told what they were drawn from."""
    return hashlib.sha256(RESULTS.read_bytes()).hexdigest()


def _panels(results: Results, title: str, what: str) -> Tuple[Any, Iterator[Tuple[Any, str, Results]]]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(9, 7), sharex=True, sharey=True, layout="constrained")
    figure.suptitle(title, fontsize=12)
    for axis in axes[:, 0]:
        axis.set_ylabel(what, fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("rows evaluated, of 20,000 float32 logits each", fontsize=9)

    def panels() -> Iterator[Tuple[Any, str, Results]]:
        for axis, (release, found) in zip(axes.flat, reversed(results.items())):
            axis.set_title(f"transformers {release}", fontsize=10)
            axis.set(xscale="log", yscale="log")
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
            yield axis, release, found

    return figure, panels()


def _finish(figure: Any, path: Path) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    ticks = [500, 1_000, 3_000, 8_000, 16_000, 32_000]
    for axis in figure.axes:
        axis.set_xticks(ticks, [f"{rows:,}" for rows in ticks], fontsize=8)
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.minorticks_off()
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    handles: Dict[str, Any] = {}
    for axis in figure.axes:
        handles.update(dict(zip(*reversed(axis.get_legend_handles_labels()))))
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path, dpi=110, metadata={"Source": digest()})


def draw_memory(results: Results) -> None:
    """A line for each way, and the floor: one batch of logits."""
    figure, panels = _panels(results, "Memory of an evaluation, at its highest", "MiB more than before it began")
    for axis, _, found in panels:
        for way, peaks in found["memory"].items():
            colour, line, marker = STYLES[way]
            width = 5 if way == "native" else 2  # the shim's line lies on it
            alpha = 0.4 if way == "native" else 1
            axis.plot(
                [int(rows) for rows in peaks], peaks.values(), line, color=colour, marker=marker, markersize=4,
                linewidth=width, alpha=alpha, label=LABELS[way],
            )  # fmt: skip
            if way in ("stock", "shim"):
                text = f"{peaks['32000']:,.1f} MiB"
                place = {"xytext": (-6, 5), "textcoords": "offset points", "ha": "right"}
                axis.annotate(text, (32_000, peaks["32000"]), color=colour, fontsize=8, **place)
        axis.axhline(BATCH * ROW_BYTES / MIB, color="black", linestyle=":", label="one batch of logits")
    _finish(figure, MEMORY_CHART)


def draw_seconds(results: Results) -> None:
    """A line for each way: the median of its ratios, with the quartiles as bars."""
    figure, panels = _panels(
        results, "Time of an evaluation: median and quartiles of the ratios of pairs", "ratio to the reference"
    )
    for axis, release, found in panels:
        seconds = {rows: cases for rows, cases in found["seconds"].items() if rows.isdigit()}
        reference = "native" if "native" in found["memory"] else "shim"
        axis.set_title(f"transformers {release}, to {LABELS[reference].split(' ')[0].rstrip(',')}", fontsize=10)
        axis.axhline(1, color=STYLES[reference][0], linewidth=5, alpha=0.4, label=f"{LABELS[reference]} (reference)")
        for way in (way for way in LABELS if way in seconds["3000"] and way != reference):
            colour, line, marker = STYLES[way]
            points = [(int(rows), *cases[way]["ratios"]) for rows, cases in seconds.items() if way in cases]
            rows, low, middle, high = zip(*points)
            bars = [[at - to for at, to in zip(middle, low)], [to - at for at, to in zip(middle, high)]]
            label = LABELS[way]
            axis.errorbar(
                rows, middle, bars, color=colour, linestyle=line, marker=marker, markersize=4, capsize=3, label=label
            )
            if way == "stock":
                times = {count: cases[way]["seconds"] for count, cases in seconds.items() if way in cases}
                text = f"seconds grow with rows$^{{{exponent(times, 1_000, 8_000):.2f}}}$"
                axis.annotate(text, (rows[-1], middle[-1]), xytext=(8, -2), textcoords="offset points", fontsize=8)
    _finish(figure, TIME_CHART)


def main() -> None:
    results = recorded()
    draw_memory(results)
    draw_seconds(results)
    for path in PAGES:
        path.write_text(page(path.read_text(), results))
    broken = [
        f"{of.what}, transformers {of.release}: expected at most {of.form.format(of.most)}, found {of.shown()}"
        for of in limits(results)
        if not of.holds
    ]
    if broken:
        sys.exit(
            "\n".join(["Above what this project promises (see benchmarks/README.md; is the machine busy?):", *broken])
        )


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Draws pipeline timelines as an SVG: scripts/plot_timeline.py TRACE.json [TRACE.json ...] OUT.svg

One panel for each replica and step of each trace (llmc/trace.h, measured or simulated), all on the same time scale; one
row a rank. Colour is the kind of work, the number is the micro-batch; of several stages a rank the later ones are darker.
Needs nothing but Python."""
import json
import sys
from xml.sax.saxutils import escape

KINDS = {  # name, fill for the rank's first and last stage
    "F": ("forward", (0x7C, 0xB5, 0xEC), (0x2B, 0x6C, 0xB0)),
    "B": ("backward", (0xF6, 0xC8, 0x5F), (0xC9, 0x8A, 0x1B)),
    "I": ("input gradient", (0xF7, 0xA3, 0x5C), (0xC4, 0x62, 0x1A)),
    "W": ("weight gradient", (0x9A, 0xD3, 0xA0), (0x3E, 0x8E, 0x4A)),
}
PHASE_FILL = "#d8d8e0"
LEFT, RIGHT, ROW, GAP, WIDTH = 64, 16, 26, 5, 1200
TITLE, AXIS, LEGEND = 24, 26, 30


def fail(message):
    sys.exit(f"error: {message}")


class Panel:
    """The actions and phases of one replica; times in milliseconds after its first action."""

    def __init__(self, title, events):
        self.title = title
        actions = [e for e in events if e.get("cat") == "action"]
        if not actions:
            fail(f"{title}: there are no actions in this trace")
        first = min(e["ts"] for e in actions)
        self.ranks = max(e["tid"] for e in actions) + 1
        self.actions = [((e["ts"] - first) / 1e3, e["dur"] / 1e3, e["tid"], e["args"]) for e in actions]
        self.phases = [((e["ts"] - first) / 1e3, e["dur"] / 1e3, e["tid"], e["name"]) for e in events if e.get("cat") == "phase"]
        self.makespan = max(start + duration for start, duration, _, _ in self.actions)
        self.end = max([self.makespan] + [start + duration for start, duration, _, _ in self.phases])
        busy = sum(duration for _, duration, _, _ in self.actions) / self.ranks
        self.bubble = 1 - busy / self.makespan if self.makespan > 0 else 0
        self.stages = {rank: sorted({a["stage"] for _, _, r, a in self.actions if r == rank}) for rank in range(self.ranks)}

    def height(self):
        return TITLE + self.ranks * (ROW + GAP) + 8


def read_panels(path):
    try:
        with open(path, encoding="utf-8") as file:
            trace = json.load(file)
        events, title = trace["traceEvents"], trace.get("otherData", {}).get("title", path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        fail(f"{path}: {error}; give a trace that --trace has written")
    events = [e for e in events if e.get("ph") == "X"]
    key = lambda e: (e["pid"], e["args"].get("step", 0))
    replicas, steps = sorted({key(e)[0] for e in events}), sorted({key(e)[1] for e in events})
    if not events:
        fail(f"{path}: there are no actions in this trace")
    panels = []
    for replica in replicas:
        for step in steps:
            name = title + (f", replica {replica}" if len(replicas) > 1 else "") + (f", step {step}" if len(steps) > 1 else "")
            panels.append(Panel(name, [e for e in events if key(e) == (replica, step)]))
    return panels


def fill(kind, stage, stages):
    light, dark = KINDS[kind][1:]
    part = stages.index(stage) / (len(stages) - 1) if len(stages) > 1 else 0
    return "#" + "".join(f"{round(a + part * (b - a)):02x}" for a, b in zip(light, dark))


def text(x, y, content, size=12, anchor="start", extra=""):
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"{extra}>{escape(content)}</text>'


def ink(colour):
    """Black or white, whichever can be read on the colour."""
    red, green, blue = (int(colour[i:i + 2], 16) for i in (1, 3, 5))
    return "#fff" if 0.3 * red + 0.59 * green + 0.11 * blue < 130 else "#000"


def box(x, y, width, height, colour, label, hint):
    """A rectangle with its hint, and its label where it fits."""
    rect = f'<rect x="{x:.2f}" y="{y:.1f}" width="{max(width, 0.3):.2f}" height="{height}" fill="{colour}" stroke="#fff" stroke-width="0.6">'
    parts = [f"{rect}<title>{escape(hint)}</title></rect>"]
    size = 11
    if width >= 0.62 * size * len(label) + 2:
        parts.append(text(x + width / 2, y + height / 2 + 4, label, size, "middle", f' fill="{ink(colour)}"'))
    return parts


def draw_panel(panel, top, scale):
    parts = [text(LEFT, top + 15, f"{panel.title}: {panel.makespan:.4g} ms, bubble {100 * panel.bubble:.1f}%", 13, extra=' font-weight="bold"')]
    row_top = [top + TITLE + rank * (ROW + GAP) for rank in range(panel.ranks)]
    for rank, y in enumerate(row_top):
        parts.append(text(LEFT - 8, y + ROW / 2 + 4, f"rank {rank}", 12, "end"))
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{panel.makespan * scale:.2f}" height="{ROW}" fill="#f4f4f4"/>')
    for start, duration, rank, name in panel.phases:
        parts += box(LEFT + start * scale, row_top[rank], duration * scale, ROW, PHASE_FILL, name, f"{name}: {duration:.3f} ms")
    for start, duration, rank, action in panel.actions:
        kind, stage, micro_batch = action["op"], action["stage"], action["micro_batch"]
        hint = f"{KINDS[kind][0]} of micro-batch {micro_batch}, stage {stage}: {start:.3f} + {duration:.3f} ms"
        parts += box(LEFT + start * scale, row_top[rank], duration * scale, ROW, fill(kind, stage, panel.stages[rank]), str(micro_batch), hint)
    return parts


def round_step(span):
    """A round distance of the axis' marks: about ten of them."""
    step = 1e-6
    while True:
        for factor in (1, 2, 5):
            if step * factor * 10 >= span:
                return step * factor
        step *= 10


def draw_axis(span, top, scale):
    parts = [f'<line x1="{LEFT}" y1="{top}" x2="{LEFT + span * scale:.1f}" y2="{top}" stroke="#444"/>']
    step = round_step(span)
    for i in range(int(span / step + 1e-9) + 1):
        x = LEFT + i * step * scale
        parts.append(f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{top + 4}" stroke="#444"/>')
        parts.append(text(x, top + 16, f"{i * step:.10g}" + (" ms" if i == 0 else ""), 10, "middle"))
    return parts


def draw_legend(panels, top):
    parts, x = [], LEFT
    used = {action["op"] for panel in panels for _, _, _, action in panel.actions}
    entries = [(fill(kind, 0, [0]), KINDS[kind][0]) for kind in KINDS if kind in used]
    entries.append(("#f4f4f4", "bubble (idle)"))
    if any(panel.phases for panel in panels):
        entries.append((PHASE_FILL, "after the pipeline"))
    if any(len(stages) > 1 for panel in panels for stages in panel.stages.values()):
        entries.append((None, "darker: later stage of the rank"))
    for colour, name in entries:
        if colour:
            parts.append(f'<rect x="{x}" y="{top}" width="14" height="14" fill="{colour}" stroke="#999" stroke-width="0.5"/>')
            x += 19
        parts.append(text(x, top + 11, name))
        x += 7 * len(name) + 20
    return parts


def draw(panels):
    span = max(panel.end for panel in panels)
    scale = (WIDTH - LEFT - RIGHT) / span if span > 0 else 1
    height = 8 + sum(panel.height() for panel in panels) + AXIS + LEGEND
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" font-family="Helvetica, Arial, sans-serif">',
             '<rect width="100%" height="100%" fill="#fff"/>']
    top = 8
    for panel in panels:
        parts += draw_panel(panel, top, scale)
        top += panel.height()
    parts += draw_axis(span, top, scale) + draw_legend(panels, top + AXIS)
    return "\n".join(parts + ["</svg>"]) + "\n"


def main():
    if len(sys.argv) < 3:
        sys.exit(f"usage: {sys.argv[0]} TRACE.json [TRACE.json ...] OUT.svg")
    panels = [panel for path in sys.argv[1:-1] for panel in read_panels(path)]
    try:
        with open(sys.argv[-1], "w", encoding="utf-8") as file:
            file.write(draw(panels))
    except OSError as error:
        fail(f"{sys.argv[-1]}: {error}")


if __name__ == "__main__":
    main()

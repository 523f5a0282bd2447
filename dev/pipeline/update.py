#!/usr/bin/env python3
"""Keeps the pictures and the table of dev/pipeline.md true: they are made by `./train_gpt2 --plan`.

    dev/pipeline/update.py            rewrites dev/pipeline.md and dev/pipeline/schedules.svg
    dev/pipeline/update.py --check    says whether they are up to date (exit code 1 if not)

The text between `<!-- timeline NAME -->` or `<!-- table -->` and `<!-- end -->` is replaced. The model has equal stages: wide,
short sequences, a small vocabulary, so that embedding, head and attention cost next to nothing and F = I = W.
"""
import os
import re
import subprocess
import sys
import tempfile

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
DOCUMENT = os.path.join(ROOT, "dev/pipeline.md")
PICTURE = os.path.join(ROOT, "dev/pipeline/schedules.svg")
EQUAL = "--layers 16 --channels 4096 --heads 32 --vocab 128 --seq-len 64 --micro-batch 1 --batch-tokens 512 --pp 4 --partition even".split()
SCHEDULES = "gpipe 1f1b eager-1f1b interleaved looped-bfs zb-h1 zb-h2 zb-v dualpipe-v greedy greedy-v".split()
DRAWN = "gpipe 1f1b interleaved zb-h1 zb-v".split()


def plan(schedule, *extra):
    command = [os.path.join(ROOT, "train_gpt2"), "--plan", *EQUAL, "--schedule", schedule, *extra]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(result.stderr)
    return result.stdout


def timeline(schedule):
    rows = re.search(r"^timeline\n(.*?)^F forward", plan(schedule), re.S | re.M).group(1)
    return "```\n" + rows + "```\n"


def table():
    lines = ["| schedule | stages a rank | step | bubble, simulated | activation slots of ranks 0..3 | messages of a step |", "|---|---|---|---|---|---|"]
    for schedule in SCHEDULES:
        text = plan(schedule)
        makespan, fraction, slots = re.search(r"makespan ([0-9.e+]+), bubble [0-9.e+]+ \(([0-9.]+)%\), activation slots ([0-9,]+)", text).groups()
        slots = [int(count) for count in slots.split(",")]
        stages = len(slots) // 4
        is_v = schedule in ("zb-v", "dualpipe-v", "greedy-v")
        owner = [s if s < 4 else 7 - s for s in range(len(slots))] if is_v else [s % 4 for s in range(len(slots))]
        micro_batches = [sum(count for s, count in enumerate(slots) if owner[s] == rank) / stages for rank in range(4)]
        hops = sum(owner[s] != owner[s + 1] for s in range(len(slots) - 1))
        held = ", ".join(f"{count:g}" for count in micro_batches)
        lines.append(f"| {schedule} | {stages} | {float(makespan):.0f} | {fraction} % | {held} | {2 * 8 * hops} |")
    return "\n".join(lines) + "\n"


def renewed(text):
    def timeline_block(match):
        return f"<!-- timeline {match.group(1)} -->\n{timeline(match.group(1))}<!-- end -->"

    text = re.sub(r"<!-- timeline (\S+) -->\n.*?<!-- end -->", timeline_block, text, flags=re.S)
    return re.sub(r"<!-- table -->\n.*?<!-- end -->", lambda _: f"<!-- table -->\n{table()}<!-- end -->", text, flags=re.S)


def picture():
    with tempfile.TemporaryDirectory() as folder:
        traces = []
        for schedule in DRAWN:
            traces.append(os.path.join(folder, schedule + ".json"))
            plan(schedule, "--trace", traces[-1])
        drawn = os.path.join(folder, "out.svg")
        subprocess.run([sys.executable, os.path.join(ROOT, "scripts/plot_timeline.py"), *traces, drawn], check=True, stdout=subprocess.DEVNULL)
        with open(drawn, encoding="utf-8") as file:
            return file.read()


def main():
    with open(DOCUMENT, encoding="utf-8") as file:
        old = file.read()
    new, drawing = renewed(old), picture()
    if sys.argv[1:] == ["--check"]:
        with open(PICTURE, encoding="utf-8") as file:
            fresh = new == old and file.read() == drawing
        sys.exit(0 if fresh else "dev/pipeline.md or schedules.svg is out of date: run dev/pipeline/update.py")
    with open(DOCUMENT, "w", encoding="utf-8") as file:
        file.write(new)
    with open(PICTURE, "w", encoding="utf-8") as file:
        file.write(drawing)


if __name__ == "__main__":
    main()

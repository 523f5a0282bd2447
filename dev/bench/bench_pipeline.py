#!/usr/bin/env python3
"""Pipeline efficiency on this machine: two ranks with one thread each against one rank with one thread.

    dev/bench/bench_pipeline.py [--model 124M] [--seq-len 128] [--micro-batch 1] [--micro-batches 16] [--steps 3] [--rounds 2]

GPT-2 at the sizes of the preset, m micro-batches a step, the real program with --report-every 1. The first step of a run is left
out (it touches memory for the first time). The runs take turns, round after round, and of each the fastest step counts: a
neighbour on a shared machine only ever adds time, and not to all runs alike.

  T1          pipeline time of a step of one rank on one core, the other core idle
  T1 beside   the same with a second, independent copy of the run on the other core: what two busy cores do to each
              other (caches, memory bandwidth) without any pipeline
  efficiency  T1 / (2 x pipeline time of two ranks): measured, and as the planner promised before the run; "of busy cores":
              T1 beside / (2 x pipeline time), which leaves out what two busy cores do to each other
  bubble      measured, beside the simulation of the same plan with the times that were measured in that step
  overlap     part of the time of all messages that was hidden behind work

Ranks are bound to a core each, so that the two are not moved about.
"""
import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="124M")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--micro-batches", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--exact", default="1", help="0: one gradient buffer instead of 1 + log2 m")
    return parser.parse_args()


def command(args, folder, extra):
    return [os.path.join(ROOT, "train_gpt2"), "--load", args.model, "--seq-len", str(args.seq_len),
            "--micro-batch", str(args.micro_batch), "--batch-tokens", str(args.micro_batches * args.micro_batch * args.seq_len),
            "--steps", str(args.steps), "--val-every", "0", "--sample-every", "0", "--exact", args.exact, "--report-every", "1",
            "--train-data", os.path.join(ROOT, "data/text"), "--out", folder] + extra


def start(args, ranks, core, extra):
    folder = tempfile.mkdtemp(prefix="bench_pipeline_")
    program = command(args, folder, extra)
    if ranks == 1:
        program = ["taskset", "-c", str(core)] + program
    else:
        bind = f"exec taskset -c $((OMPI_COMM_WORLD_LOCAL_RANK % {os.cpu_count()})) \"$@\""
        program = [os.path.join(ROOT, "scripts/mpirun.sh"), "-q", "-np", str(ranks), "bash", "-c", bind, "bind"] + program
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    return subprocess.Popen(program, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True), folder


def finish(process, folder):
    output, errors = process.communicate()
    if process.returncode != 0:
        sys.exit(errors)
    with open(os.path.join(folder, "metrics.jsonl"), encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    shutil.rmtree(folder)
    reports = [line["pipeline"] for line in lines if "pipeline" in line]
    step_ms = [line["ms"] for line in lines if "ms" in line]
    plan = re.search(r"plan +pipeline ([0-9.e+]+) \w+, bubble ([0-9.]+) %, efficiency ([0-9.]+) %", output)
    layout = re.search(r"blocks ([0-9,]+)\).*?replicas, ([^,]+(?:, \d+ in flight)?)", output)
    return [{
        "pipeline": report["makespan_ms"], "step": step, "bubble": 100 * report["bubble"],
        "bubble_simulated": 100 * report["bubble_simulated"], "overlap": report["overlap"],
        "promised": float(plan.group(3)) if plan else 100.0, "layout": f"{layout.group(2)}, blocks {layout.group(1)}",
        "last": output.strip().split("\n")[-1],
    } for report, step in list(zip(reports, step_ms))[1:]]


VARIANTS = [("naive: even split", ["--schedule", "1f1b", "--partition", "even"]),
            ("planned split", ["--schedule", "1f1b", "--partition", "auto", "--plan-costs", "measured"]),
            ("auto", ["--schedule", "auto", "--partition", "auto", "--plan-costs", "measured"])]


def main():
    args = arguments()
    subprocess.run(["make", "-s", "DEVICE=cpu", "train_gpt2"], cwd=ROOT, check=True)
    steps = {name: [] for name in ["alone", "beside"] + [name for name, _ in VARIANTS]}
    for turn in range(args.rounds):
        steps["alone"] += finish(*start(args, 1, 0, []))
        if turn == 0:
            for one in [start(args, 1, core, []) for core in (0, 1)]:
                steps["beside"] += finish(*one)
        for name, extra in VARIANTS:
            steps[name] += finish(*start(args, 2, 0, ["--pp", "2"] + extra))
    best = {name: min(runs, key=lambda run: run["pipeline"]) for name, runs in steps.items()}
    t1, beside = best["alone"]["pipeline"], best["beside"]["pipeline"]
    print(f"GPT-2 {args.model}, {args.micro_batches} micro-batches of {args.micro_batch} x {args.seq_len}, one thread a rank; fastest of {len(steps['alone'])} steps")
    print(f"one rank: pipeline {t1:.0f} ms, step {best['alone']['step']:.0f} ms; beside another copy {beside:.0f} ms ({t1 / beside:.1%} of the speed); all: {spread(steps['alone'])}")
    print(f"{'two ranks':52s} {'pipeline':>9s} {'step':>8s} | {'efficiency':>10s} {'promised':>9s} {'ratio':>7s} {'of busy cores':>14s} | {'bubble':>7s} {'simulated':>9s} | {'overlap':>7s} | all steps, ms")
    for name, _ in VARIANTS:
        run = best[name]
        efficiency = 100 * t1 / (2 * run["pipeline"])
        print(f"{name + ': ' + run['layout']:52s} {run['pipeline']:7.0f}ms {run['step']:6.0f}ms | {efficiency:9.1f}% {run['promised']:8.1f}% {efficiency / run['promised'] * 100:6.1f}% {beside / (2 * run['pipeline']):14.1%} | "
              f"{run['bubble']:6.1f}% {run['bubble_simulated']:8.1f}% | {run['overlap']:7.1%} | {spread(steps[name])}")
    equal = len({run["last"] for runs in steps.values() for run in runs}) == 1
    print("all runs end with the same line" if equal else "RUNS END DIFFERENTLY")
    sys.exit(0 if equal or args.exact != "1" else 1)


def spread(runs):
    return " ".join(f"{run['pipeline']:.0f}" for run in runs)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Pipeline efficiency on this machine: two ranks with one thread each against one rank with one thread.

    dev/bench/bench_pipeline.py [--model 124M] [--seq-len 256] [--micro-batch 1] [--micro-batches 16] [--steps 4]

GPT-2 at the sizes of the preset, m micro-batches a step, the real program. Every run is `train_gpt2 --report-every 1`;
the first step of a run is left out (it touches memory for the first time), of the others the median counts.

  T1          pipeline time of a step of one rank on one core, the other core idle
  T1 beside   the same with a second, independent copy of the run on the other core: what two busy cores do to each
              other (caches, memory bandwidth) without any pipeline
  efficiency  T1 / (2 x pipeline time of two ranks): measured, and as the planner promised before the run
  bubble      measured, beside the simulation of the same plan with the times that were measured in that step
  overlap     part of the time of all messages that was hidden behind work

Ranks are bound to a core each, so that the two are not moved about.
"""
import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="124M")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--micro-batches", type=int, default=16)
    parser.add_argument("--steps", type=int, default=4)
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
    reports = [line["pipeline"] for line in lines if "pipeline" in line][1:]
    step_ms = [line["ms"] for line in lines if "ms" in line][1:]

    def median(name):
        return statistics.median(report[name] for report in reports)

    plan = re.search(r"plan +pipeline ([0-9.e+]+) \w+, bubble ([0-9.]+) %, efficiency ([0-9.]+) %", output)
    layout = re.search(r"blocks ([0-9,]+)\).*?replicas, ([^,]+(?:, \d+ in flight)?)", output)
    return {
        "pipeline": median("makespan_ms"), "simulated": median("makespan_simulated_ms"), "step": statistics.median(step_ms),
        "bubble": 100 * median("bubble"), "bubble_simulated": 100 * median("bubble_simulated"), "overlap": median("overlap"),
        "promised": float(plan.group(3)) if plan else 100.0, "layout": f"{layout.group(2)}, blocks {layout.group(1)}",
        "last": output.strip().split("\n")[-1],
    }


def main():
    args = arguments()
    subprocess.run(["make", "-s", "DEVICE=cpu", "train_gpt2"], cwd=ROOT, check=True)
    alone = finish(*start(args, 1, 0, []))
    pair = [start(args, 1, core, []) for core in (0, 1)]
    beside = [finish(*one) for one in pair]
    t1, t1_beside = alone["pipeline"], statistics.mean(run["pipeline"] for run in beside)
    print(f"GPT-2 {args.model}, {args.micro_batches} micro-batches of {args.micro_batch} x {args.seq_len}, one thread a rank; medians of {args.steps - 1} steps")
    print(f"one rank: pipeline {t1:.0f} ms, step {alone['step']:.0f} ms; beside another copy: {t1_beside:.0f} ms ({t1 / t1_beside:.1%} of the speed)")
    print(f"{'two ranks':44s} {'pipeline':>9s} {'step':>8s} | {'efficiency':>10s} {'promised':>9s} {'ratio':>7s} | {'of two busy cores':>17s} | {'bubble':>7s} {'simulated':>9s} | {'overlap':>7s}")
    variants = [("naive: even, 1f1b", ["--schedule", "1f1b", "--partition", "even"]),
                ("planned blocks, 1f1b", ["--schedule", "1f1b", "--partition", "auto", "--plan-costs", "measured"]),
                ("auto", ["--schedule", "auto", "--partition", "auto", "--plan-costs", "measured"])]
    equal = True
    for name, extra in variants:
        run = finish(*start(args, 2, 0, ["--pp", "2"] + extra))
        efficiency, beside_efficiency = 100 * t1 / (2 * run["pipeline"]), 100 * t1_beside / (2 * run["pipeline"])
        print(f"{name + ': ' + run['layout']:44s} {run['pipeline']:7.0f}ms {run['step']:6.0f}ms | {efficiency:9.1f}% {run['promised']:8.1f}% "
              f"{efficiency / run['promised']:7.1%} | {beside_efficiency:16.1f}% | {run['bubble']:6.1f}% {run['bubble_simulated']:8.1f}% | {run['overlap']:7.1%}")
        equal &= run["last"] == alone["last"]
    print("all runs end with the same line as one rank" if equal or args.exact != "1" else "RUNS DIFFER from one rank")
    sys.exit(0 if equal or args.exact != "1" else 1)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""train_gpt2 --plan: what it prints, that it needs nothing, that its schedule files run, and what it refuses.

    python3 test/test_plan_command.py        needs ./train_gpt2; some seconds
"""

import json
import os
import re
import shutil
import time
import unittest

from train_runs import TRAIN, Run, TrainTest

MODEL = ["--load", "124M", "--micro-batch", "4", "--seq-len", "1024"]
STEP = MODEL + ["--batch-tokens", str(16 * 4096)]  # 16 micro-batches
USER = 2


class PlanCommand(TrainTest):
    def plan(self, *arguments):
        """The output of a plan that succeeds, in a folder without data."""
        result = self.run_to_end(arguments=["--plan", *arguments])
        self.assertEqual(result.code, 0, result)
        self.assertEqual(result.err, "", result)
        return result.out

    def candidates(self, text):
        """(schedule, blocks, step, bubble, efficiency, GB, fits) of each row, in order."""
        rows = []
        table = text.partition("eff.")[2].partition("eff.")[2].partition("choice ")[0]
        for line in table.splitlines()[1:]:
            cells = re.split(r"\s{2,}", line[2:].strip())
            name, blocks, rest = cells[0], cells[1], " ".join(cells[2:]).split()
            rows.append((name, blocks, float(rest[1]), float(rest[2][:-1]), float(rest[3][:-1]), float(rest[4]), rest[5:]))
        return rows

    # Candidates come by time, the first is the choice; the timeline has a row a rank; every number is there once.
    def test_what_it_prints(self):
        text = self.plan(*STEP, "--pp", "4", "--schedule", "auto")
        rows = self.candidates(text)
        self.assertGreater(len(rows), 10)
        self.assertIn("* " + rows[0][0], text)
        steps = [row[2] for row in rows]
        self.assertEqual(steps[1:], sorted(steps[1:]))
        self.assertLessEqual(steps[0], steps[1] * 1.001)
        for name, _, step, bubble, efficiency, _, _ in rows:  # nothing is recomputed: idle + work = all
            self.assertAlmostEqual(bubble + efficiency, 100, delta=0.11, msg=name)
        self.assertEqual(len(re.findall(r"^rank \d+ *\|", text, re.M)), 4)
        self.assertIn("choice      %s, blocks %s, recompute 0" % (rows[0][0], rows[0][1]), text)
        self.assertIn("times are in GFLOP", text)
        totals = re.findall(r"^ +[0-3] .* ([0-9.]+)$", text.partition("memory ")[2], re.M)
        self.assertEqual(len(totals), 4, text)
        self.assertAlmostEqual(max(map(float, totals)), rows[0][5], delta=0.0011)
        self.assertRegex(text, r"bubble +simulated .*%")

    # The formula beside the simulated bubble, where there is one: equal stages give the same number. Two wide
    # blocks on each of two ranks, a tiny head.
    def test_closed_form(self):
        small = ["--layers", "4", "--channels", "8192", "--heads", "4", "--vocab", "2", "--seq-len", "64"]
        small += ["--micro-batch", "1", "--batch-tokens", "512", "--pp", "2", "--schedule"]
        for schedule in ("zb-h1", "zb-v"):
            text = self.plan(*small, schedule)
            found = re.search(r"simulated (\S+) GFLOP .*formula for equal stages (\S+) ", text)
            self.assertIsNotNone(found, text)
            self.assertAlmostEqual(float(found.group(1)) / float(found.group(2)), 1, delta=0.1)
        self.assertIn("no formula for this case", self.plan(*small, "greedy"))

    # Less than a second, no MPI, no data, no device: also where nothing of these is there.
    def test_needs_nothing(self):
        shutil.rmtree(self.path("data"))
        environment = {"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "", "HOME": self.folder}
        best = 1e9
        for _ in range(3):
            start = time.monotonic()
            run = Run([TRAIN, "--plan", *STEP, "--pp", "4", "--schedule", "auto"], self.folder, environment, 60).wait()
            best = min(best, time.monotonic() - start)
            self.assertEqual(run.code, 0, run)
        self.assertLess(best, 1.0)
        self.assertEqual(os.listdir(self.folder), [])

    # A process that no launcher has started does not initialise MPI: with an MPI that cannot start, it trains all the same.
    def test_one_process_without_mpi(self):
        broken = {"OMPI_MCA_btl": "none_of_them", "OMPI_MCA_pml": "none_of_them", "OMPI_MCA_ess": "none_of_them"}
        result = self.run_to_end(environment=broken)
        self.assertEqual(result.code, 0, result)
        self.assertEqual(len(result.final), 1)

    # --save-schedule writes what --schedule reads: the same plan again. The trace is JSON with all actions.
    def test_files(self):
        text = self.plan(*STEP, "--pp", "4", "--schedule", "zb-v", "--save-schedule", "s.csv", "--trace", "t.json")
        again = self.plan(*STEP, "--pp", "4", "--schedule", "s.csv")
        self.assertEqual(self.candidates(text)[0][1:], self.candidates(again)[0][1:])
        with open(self.path("t.json")) as file:
            events = json.load(file)["traceEvents"]
        actions = [event for event in events if event["ph"] == "X" and event["cat"] == "action"]
        self.assertGreaterEqual(len(actions), 8 * 16 * 2)
        self.assertEqual({event["tid"] for event in actions}, {0, 1, 2, 3})

    # Names with quotes and backslashes stay texts in the trace and in metrics.jsonl; a byte-order mark is no cell.
    def test_odd_names(self):
        self.plan("--layers", "4", "--pp", "2", "--seq-len", "32", "--micro-batch", "3", "--batch-tokens", "576",
                  "--save-schedule", "s.csv")
        name = 'a"b\\c.csv'
        with open(self.path("s.csv")) as source, open(self.path(name), "w", encoding="utf-8-sig") as copy:
            copy.write(source.read().replace("\n", "\r\n"))
        run = {"ranks": 2, "pp": 2, "schedule": name, "report_every": 1}
        self.train(out="odd", trace="t.json", **run)
        with open(self.path("t.json")) as file:
            self.assertIn(name, json.load(file)["otherData"]["title"])
        with open(self.path("odd/metrics.jsonl")) as file:
            lines = [json.loads(line) for line in file]
        self.assertEqual({line["pipeline"]["schedule"] for line in lines if "pipeline" in line}, {name})

    # What --trace cannot write: refused before anything starts where that can be known; else the run is completed
    # first, with its model, and then fails. What is no file is never replaced by one.
    def test_places_that_cannot_be_written(self):
        os.symlink("/dev/full", self.path("full.json"))
        for ranks in (1, 2):
            layout = {"ranks": ranks, "pp": ranks}
            for option in ("trace", "save_schedule"):
                for target, words in (("nowhere/t.csv", "there is no folder nowhere"), (".", "is a folder")):
                    if option == "save_schedule" and target == ".":
                        continue  # refused for its name
                    result = self.run_to_end(**layout, **{option: target})
                    self.assert_one_error(result, USER, words)
            result = self.run_to_end(**layout, trace="full.json", out="out%d" % ranks, save_model=1)
            self.assertEqual(result.code, 1, result)
            self.assertIn("--trace: ", result.err)
            self.assertIn("the run itself is complete", result.err)
            self.assertEqual(len(result.final), 1, result)
            self.assertTrue(os.path.exists(self.path("out%d/model.bin" % ranks)))
        self.assert_one_error(self.run_to_end(arguments=["--plan", "--trace", "full.json"]), 1, "full.json")
        self.assertTrue(os.path.islink(self.path("full.json")))

    # More replicas: fewer micro-batches each, and with ZeRO 1 less optimizer state.
    def test_replicas(self):
        layout = ["--pp", "2", "--partition", "8,4", "--zero", "1"]
        one, four = self.plan(*STEP, *layout), self.plan(*STEP, *layout, "--replicas", "4")
        self.assertIn("16 micro-batches", one)
        self.assertIn("4 micro-batches", four)

        def optimizer(text):
            return [float(row.split()[-5]) for row in re.findall(r"^ +[01] .*", text.partition("memory ")[2], re.M)]

        for a, b in zip(optimizer(one), optimizer(four)):
            self.assertAlmostEqual(a / 4, b, delta=0.002)

    # A limit: recompute where needed; the choice fits; nothing that does not fit stands before one that does.
    def test_memory_limit(self):
        free = self.candidates(self.plan(*STEP, "--pp", "4", "--schedule", "1f1b"))[0]
        limit = free[5] * 0.8
        text = self.plan(*STEP, "--pp", "4", "--schedule", "auto", "--memory-limit", "%.3f" % limit)
        rows = self.candidates(text)
        self.assertLessEqual(rows[0][5], limit)
        self.assertEqual([row[6] for row in rows], sorted((row[6] for row in rows), reverse=True))  # yes before no
        given = self.candidates(self.plan(*STEP, "--pp", "4", "--recompute", "3"))[0]
        self.assertLess(given[5], free[5])
        self.assertLess(given[4], free[4])

    # Requests that cannot be met: exit code 2, one line, the value and what would do.
    def test_refused(self):
        files = {
            "circle.csv": "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",
            "five.csv": "0F0,0F1,0F2,0F3,0F4,0B0,0B1,0B2,0B3,0B4\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3,1F4,1B4\n",
            "cell.csv": "0F0,0X0\n1F0,1B0\n",
            "single.csv": "0F0,1F0,1B0,0B0,0F1,1F1,1B1,0B1\n",
        }
        for name, text in files.items():
            with open(self.path(name), "w") as file:
                file.write(text)
        two = MODEL + ["--pp", "2", "--batch-tokens", str(2 * 4096)]
        cases = [
            (two + ["--chunks", "-1"], "--chunks -1 is out of range"),
            (two + ["--chunks", "2"], "--chunks 2: schedule 1f1b takes 1 on each rank; use --chunks 1"),
            (two + ["--chunks", "two"], '--chunks "two" is not a whole number'),
            (STEP + ["--pp", "15"], "--pp 15 is 15 stages, too many for 12 blocks: at most 14"),
            (STEP + ["--pp", "8", "--schedule", "zb-v"], "--pp 8 with 2 chunks is 16 stages, too many"),
            (STEP + ["--pp", "4", "--schedule", "interleaved", "--chunks", "4"], "use --chunks 3"),
            (two + ["--schedule", "fastest"], '--schedule "fastest" is not known; use auto, gpipe'),
            (two + ["--partition", "6,7"], "places 13 blocks, the model has 12; use --partition"),
            (two + ["--partition", "6,5,1"], "has 3 counts, --pp 2"),
            (two + ["--recompute", "4"], "use auto, 0, 1, 2 or 3"),
            (two + ["--memory-limit", "-1"], "--memory-limit -1 is out of range"),
            (two + ["--replicas", "0"], "--replicas 0 is out of range"),
            (two + ["--replicas", "3"], "2 micro-batches, too few for 3 replicas"),
            (two + ["--plan-costs", "guess"], "use auto, model or measured"),
            (two + ["--plan-costs", "measured"], "--plan has none"),
            (two + ["--save-schedule", "s"], "use --save-schedule s.csv"),
            (two + ["--save-schedule", "nowhere/s.csv"], "nowhere/s.csv"),
            (two + ["--schedule", "missing.csv"], "missing.csv"),
            (two + ["--schedule", "cell.csv"], "cell.csv:1"),
            (two + ["--schedule", "circle.csv"], "waits for"),
            (two + ["--schedule", "single.csv"], "is for 1 ranks, --pp is 2; use --pp 1"),
            (two + ["--schedule", "five.csv"], "is for 5 micro-batches, a replica has 2"),
            (STEP + ["--pp", "4", "--schedule", "five.csv"], "is for 2 ranks, --pp is 4; use --pp 2"),
            (STEP + ["--load", "nothing.bin"], "given twice"),
            (["--load", "nothing.bin"], "nothing.bin"),
            (STEP + ["--pp", "4", "--memory-limit", "1"], "--memory-limit 1 GB: rank "),
        ]
        for arguments, words in cases:
            with self.subTest(arguments=arguments):
                result = self.run_to_end(arguments=["--plan", *arguments])
                self.assertIn(result.code, (USER, 1) if "nowhere" in words else (USER,), result)
                self.assertEqual(len(result.err.splitlines()), 1, result)
                self.assertIn(words, result.err)

    # What the message of a limit that nothing fits advises does fit.
    def test_advice_works(self):
        limit = ["--memory-limit", "2"]
        base = STEP + ["--pp", "4", "--partition", "3,3,3,3", "--recompute", "0"]
        result = self.run_to_end(arguments=["--plan", *base, *limit])
        self.assertEqual(result.code, USER, result)
        advice = result.err.partition("; use ")[2].strip().split(", or ")
        self.assertGreaterEqual(len(advice), 2, result.err)
        for remedy in advice:
            options = dict(zip(base[::2], base[1::2]), **{"--memory-limit": "2"})
            words = remedy.split()
            words = words[: words.index("on")] if "on" in words else words  # --pp 8 on 8 ranks
            options.update(zip(words[::2], words[1::2]))
            with self.subTest(remedy=remedy):
                self.plan(*[word for pair in options.items() for word in pair])

    # Under mpirun it is refused once, not printed by every rank.
    def test_under_mpirun(self):
        result = self.run_to_end(ranks=2, arguments=["--plan", *STEP, "--pp", "2"])
        self.assert_one_error(result, USER, "--plan is for one process, there are 2 ranks")

    # In a run --replicas and bad layouts are refused as well.
    def test_refused_in_a_run(self):
        for options, words in (
            ({"replicas": 2}, "--replicas 2 is for --plan"),
            ({"pp": 2, "schedule": "zb-v", "layers": 1}, "--pp 2 with 2 chunks is 4 stages, too many for 1 blocks"),
            ({"pp": 2, "memory-limit": 0.0001}, "--memory-limit 0.0001 GB: rank "),
        ):
            with self.subTest(options=options):
                result = self.run_to_end(ranks=2, **{name.replace("-", "_"): value for name, value in options.items()})
                self.assert_one_error(result, USER, words)


if __name__ == "__main__":
    unittest.main()

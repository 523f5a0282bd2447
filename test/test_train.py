#!/usr/bin/env python3
"""Training from the command line: the same run on every layout, repeated, resumed, diverging, saved and loaded.

python3 test/test_train.py            needs ./train_gpt2 and mpirun; about a minute on 2 idle cores
"""

import re
import struct
import unittest

from train_runs import TINY, TrainTest, flags

HEADER = 256 * 4  # bytes of an llm.c header


def sample_text(result):
    return re.findall(r"^--- sample after step \d+ ---\n.*?\n---$", result.out, re.S | re.M)


class Layouts(TrainTest):
    RUN = {"steps": 7, "val_every": 3, "val_batches": -1, "sample_every": 7, "sample_tokens": 40, "checkpoint_every": 7}
    LAYOUTS = [
        {"ranks": 2, "pp": 2},
        {"ranks": 2, "pp": 1, "zero": 1, "partition": "even"},
        {"ranks": 3, "pp": 3, "schedule": "gpipe", "partition": "1,0,1"},
        {"ranks": 4, "pp": 4, "partition": "0,1,1,0"},
        {"ranks": 4, "pp": 2, "zero": 1, "schedule": "gpipe"},
        {"ranks": 4, "pp": 1, "zero": 0},
        {"ranks": 2, "pp": 2, "schedule": "zb-v", "recompute": 2, "report_every": 1, "timeline": 1},
        {"ranks": 4, "pp": 2, "schedule": "interleaved", "chunks": 2, "recompute": 3},
        {"ranks": 2, "pp": 2, "schedule": "auto", "plan_costs": "measured", "trace": "trace.json"},
        {"ranks": 1, "schedule": "looped-bfs", "chunks": 3, "recompute": 1},
    ]

    # Losses, norms, validation, samples, parameters and checkpoints are the same bits on stages and replicas, over
    # several epochs of shuffled data, with a number of micro-batches (6) that is no power of two.
    def test_every_layout_is_the_run_of_one_device(self):
        alone = self.train(out="alone", **self.RUN)
        self.assertEqual(len(sample_text(alone)), 1, alone)
        for number, layout in enumerate(self.LAYOUTS):
            with self.subTest(layout):
                run = "run%d" % number
                result = self.train(out=run, **layout, **self.RUN)
                self.assertEqual(result.final, alone.final)
                self.assertEqual(sample_text(result), sample_text(alone))
                self.assert_same_run(run, "alone")

    # Without --exact micro-batches are added left to right: still the same bits for every number of stages.
    def test_inexact_sums_do_not_depend_on_the_pipeline(self):
        one = self.train(exact=0)
        self.assertEqual(self.train(ranks=2, pp=2, exact=0).final, one.final)


class Repeatability(TrainTest):
    # One rank: the number of threads changes nothing that is written.
    def test_threads(self):
        for threads in ("1", "1", "2", "4"):
            run = "run%d" % len(self.tree_names())
            self.train(out=run, checkpoint_every=4, environment={"OMP_NUM_THREADS": threads})
            self.assert_same_run(run, "run0")

    # Four ranks, twice, the second time with 2 threads each.
    def test_ranks(self):
        for run, threads in (("run0", "1"), ("run1", "2")):
            self.train(ranks=4, pp=2, zero=1, out=run, checkpoint_every=4, environment={"OMP_NUM_THREADS": threads})
        self.assert_same_run("run0", "run1")

    # How often a run validates, samples and saves does not change what it learns.
    def test_training_does_not_depend_on_the_rest(self):
        def training(run):
            return [line for line in self.metrics(run) if "loss" in line]

        silent = self.train(out="silent", val_every=0, val_data=None)
        for number, rest in enumerate(
            [
                {"val_every": 1, "val_batches": -1},
                {"sample_every": 1, "temperature": 0.7, "top_k": 5},
                {"checkpoint_every": 1, "val_every": 0},
            ]
        ):
            with self.subTest(rest):
                run = "run%d" % number
                self.assertEqual(self.train(ranks=number % 2 + 1, out=run, **rest).final, silent.final)
                self.assertEqual(training(run), training("silent"))

    def tree_names(self):
        return [name for name in self.tree() if re.fullmatch(r"\./run\d+", name)]


class Resume(TrainTest):
    # The learning rate of a step must not depend on --steps here, since the first run ends after 4 of the 8 steps.
    HALVES = {"lr_schedule": "constant", "checkpoint_every": 4, "val_every": 2, "sample_every": 4}
    LAYOUTS = [
        ({"ranks": 1}, {"ranks": 4, "pp": 2, "zero": 1}),
        ({"ranks": 4, "pp": 2, "zero": 1}, {"ranks": 3, "pp": 3, "schedule": "gpipe"}),
        ({"ranks": 4, "pp": 4, "schedule": "gpipe"}, {"ranks": 2, "zero": 1}),
        ({"ranks": 2, "zero": 1}, {"ranks": 1}),
        ({"ranks": 2, "pp": 2, "schedule": "zb-v"}, {"ranks": 4, "pp": 4, "schedule": "zb-h1", "recompute": 3}),
        ({"ranks": 3, "pp": 3, "schedule": "greedy"}, {"ranks": 4, "pp": 2, "schedule": "dualpipe-v", "recompute": 1}),
    ]

    # 4 steps, then 4 more on another layout: the bits, the logs and the checkpoints of 8 steps without a break.
    def test_another_layout_goes_on_bit_for_bit(self):
        whole = self.train(out="whole", steps=8, **self.HALVES)
        for number, (before, after) in enumerate(self.LAYOUTS):
            with self.subTest((before, after)):
                run = "run%d" % number
                self.train(out=run, steps=4, **before, **self.HALVES)
                resumed = self.train(out=run, steps=8, resume=1, **after, **self.HALVES)
                self.assertIn("resumed     at step 4", resumed.out)
                self.assertEqual(resumed.final, whole.final)
                self.assert_same_run(run, "whole")

    # A run that is complete says its result again and writes nothing but its configuration.
    def test_a_finished_run_repeats_its_last_line(self):
        first = self.train(ranks=2, pp=2, out="run", checkpoint_every=4, save_model=1)
        before = self.tree("run")
        again = self.train(out="run", checkpoint_every=4, save_model=1, resume=1)
        self.assertEqual(again.final, first.final)
        after = self.tree("run")
        before.pop("./config.txt"), after.pop("./config.txt")
        self.assertTrue(before == after)

    # --resume 1 without a checkpoint starts at step 1 with new logs.
    def test_nothing_to_resume(self):
        first = self.train(out="run")
        self.assertEqual(self.train(out="run", resume=1).final, first.final)
        self.assertEqual(len(self.metrics("run")), 8 + 3)

    # Another seed would be another order of the data.
    def test_another_seed_is_refused(self):
        self.train(out="run", checkpoint_every=4)
        before = self.tree("run")
        for ranks in (1, 4):
            self.assert_one_error(
                self.run_to_end(ranks=ranks, out="run", resume=1, seed=1),
                2,
                "--seed 1 differs from that of the checkpoint, 42",
            )
        self.assertTrue(before == self.tree("run"))

    # A fresh run does not mix its checkpoints with those of another.
    def test_old_checkpoints_are_not_mixed_up(self):
        self.train(out="run", checkpoint_every=4)
        before = self.tree("run")
        for ranks in (1, 4):
            self.assert_one_error(self.run_to_end(ranks=ranks, out="run"), 2, "up to step 8; use --resume 1")
        self.assertTrue(before == self.tree("run"))


class Divergence(TrainTest):
    # A step that is not finite ends the run with its number and a tensor; nothing of it is logged or saved.
    def test_learning_rate_too_high(self):
        for ranks in (1, 4):
            run = "run%d" % ranks
            result = self.run_to_end(ranks=ranks, pp=min(ranks, 2), out=run, lr=1e30, checkpoint_every=2, val_every=0)
            self.assert_one_error(result, 1, "step 2: loss nan, the gradient of ")
            self.assertRegex(result.errors[0], r"gradient of [a-z0-9_.]+ is not finite; nothing was updated")
            self.assertEqual([line["step"] for line in self.metrics(run)], [1])
            self.assertNotIn("./ckpt", self.tree(run))

    # The same for one weight of a loaded model.
    def test_model_with_nan(self):
        self.train(out="good", steps=1, warmup=0, save_model=1)
        model = bytearray(self.read("good/model.bin"))
        struct.pack_into("<f", model, HEADER + 4 * 1000, float("nan"))  # in the token embedding
        with open(self.path("bad.bin"), "wb") as file:
            file.write(model)
        for ranks in (1, 2):
            result = self.run_to_end(
                ranks=ranks, pp=ranks, load="bad.bin", out="bad%d" % ranks, checkpoint_every=1, val_every=0
            )
            self.assert_one_error(result, 1, "step 1: loss nan, the gradient of ")
            self.assertEqual(self.read("bad%d/metrics.jsonl" % ranks), b"")


class ModelFiles(TrainTest):
    # A model written by --save-model validates as before when it is loaded; every layout writes the same file.
    def test_save_and_load(self):
        self.train(out="one", save_model=1, val_batches=-1)
        self.train(ranks=4, pp=2, zero=1, out="four", save_model=1, val_batches=-1)
        self.assertTrue(self.read("one/model.bin") == self.read("four/model.bin"))
        saved = self.metrics("one")[-1]
        self.assertEqual(saved["step"], 8)
        sizes = dict.fromkeys(["layers", "channels", "heads", "vocab"])
        for ranks, pp in ((1, 1), (2, 2)):
            self.train(
                ranks=ranks, pp=pp, load="one/model.bin", out="loaded", steps=1, warmup=0, val_batches=-1, **sizes
            )
            self.assertEqual(self.metrics("loaded")[0], {"step": 0, "val_loss": saved["val_loss"]})

    # Temperature 0 gives the same text again; it starts with the prompt; another seed gives another text only above 0.
    def test_samples(self):
        sampling = {"sample_every": 8, "sample_tokens": 30, "sample_prompt": "abc"}
        cold = [sample_text(self.train(temperature=0, **sampling)) for _ in range(2)]
        self.assertEqual(cold[0], cold[1])
        self.assertTrue(cold[0][0].startswith("--- sample after step 8 ---\nabc"), cold[0])
        self.assertNotEqual(sample_text(self.train(temperature=2, **sampling)), cold[0])

    # One batch for ever: the loss falls far below what the text allows.
    def test_overfit(self):
        self.train(out="run", overfit=1, steps=60, lr=2e-2, batch_tokens=96, val_every=0)
        losses = [line["loss"] for line in self.metrics("run")]
        self.assertLess(losses[-1], 0.15 * losses[0])

    # The saved configuration is the run.
    def test_config_file_repeats_the_run(self):
        first = self.train(
            ranks=2, pp=2, out="first", sample_every=4, sample_prompt=' "a b" ', checkpoint_every=4, keep=1
        )
        again = self.run_to_end(ranks=2, arguments=["--config", "first/config.txt", "--out", "again"])
        self.assertEqual((again.code, again.final), (0, first.final), again)
        self.assert_same_run("first", "again")
        self.assertEqual(
            self.read("again/config.txt"), self.read("first/config.txt").replace(b"out = first", b"out = again")
        )

    # llm.c's short names do what the long ones do.
    def test_short_names(self):
        self.train(out="long", checkpoint_every=2, keep=1, keep_major=4, sample_every=4, sample_tokens=9)
        short = {
            "train-data": "i",
            "val-data": "j",
            "micro-batch": "b",
            "seq-len": "t",
            "batch-tokens": "d",
            "steps": "x",
            "lr": "l",
            "lr-schedule": "k",
            "warmup": "u",
            "lr-final": "q",
            "weight-decay": "c",
            "val-every": "v",
            "val-batches": "m",
        }
        arguments = flags({name: value for name, value in TINY.items() if name not in short and name != "sample-every"})
        arguments += [word for name, alias in short.items() for word in ("-" + alias, str(TINY[name]))]
        arguments += [
            "-o",
            "short",
            "-n",
            "2",
            "-nk",
            "1",
            "-nm",
            "4",
            "-s",
            "4",
            "-g",
            "9",
            "-y",
            "0",
            "-a",
            "0",
            "-z",
            "0",
        ]
        result = self.run_to_end(arguments=arguments)
        self.assertEqual(result.code, 0, result)
        self.assert_same_run("short", "long")
        self.assertEqual(
            self.read("short/config.txt"), self.read("long/config.txt").replace(b"out = long", b"out = short")
        )

    # Output that goes to a file through mpirun has plain lines: no carriage returns, no escape sequences.
    def test_progress_in_a_file(self):
        result = self.train(ranks=2, pp=2)
        self.assertNotRegex(result.out, r"[\r\x1b]")
        self.assertEqual(len(re.findall(r"^step \d+/8 \| loss .* left$", result.out, re.M)), 8, result)


if __name__ == "__main__":
    unittest.main()

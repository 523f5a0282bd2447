#!/usr/bin/env python3
"""A small training under the address, undefined-behaviour and thread sanitizers reports nothing.

One rank and two stages, with validation, samples, checkpoints, resume and a saved model, so that most of the program
runs. The builds are the Makefile's (SANITIZE=address has both of the first two); Open MPI's own leaks and lock orders
are switched off inside the program (process.h).

    python3 test/test_sanitizers.py       half a minute on 2 idle cores, and the time to compile train_gpt2 twice
"""

import os
import re
import shutil
import subprocess
import unittest

import train_runs
from train_runs import ROOT, TrainTest

REPORT = re.compile(r"ERROR: \w+Sanitizer|WARNING: ThreadSanitizer|runtime error:|SUMMARY: \w+Sanitizer")


class Sanitizers(TrainTest):
    def small_training(self, sanitizer):
        program = "build/cpu-fp32-w1-%s/train_gpt2" % sanitizer
        made = subprocess.run(
            ["make", "-s", "DEVICE=cpu", "SANITIZE=" + sanitizer, program],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        self.assertEqual(made.returncode, 0, made.stdout + made.stderr)
        self.addCleanup(setattr, train_runs, "TRAIN", train_runs.TRAIN)
        train_runs.TRAIN = os.path.join(ROOT, program)
        run = {
            "sample_every": 4,
            "sample_tokens": 8,
            "checkpoint_every": 2,
            "keep": 1,
            "save_model": 1,
            "timeout": 400,
            "environment": {"OMP_NUM_THREADS": "2"},
        }
        for layout in ({"ranks": 1}, {"ranks": 2, "pp": 2}, {"ranks": 2, "zero": 1}):
            with self.subTest(layout):
                for steps, code in (("4", 0), ("6", 0), ("x", 2)):
                    result = self.run_to_end(out="run", steps=steps, lr_schedule="constant", resume=1, **layout, **run)
                    self.assertEqual(result.code, code, result)
                    self.assertIsNone(REPORT.search(result.err), result)
                shutil.rmtree(self.path("run"))

    # No access outside of an array, no use after free, no undefined arithmetic.
    def test_address_and_undefined(self):
        self.small_training("address")

    # No two threads touch the same memory without order: kernels, streams, the communication thread, the trainer.
    def test_thread(self):
        self.small_training("thread")


if __name__ == "__main__":
    unittest.main()

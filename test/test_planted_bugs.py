#!/usr/bin/env python3
"""Planted bugs: what the CPU device's debug and sanitizer builds must find, and what they must not report.

Each row of BUGS names an error in test/planted/planted_bugs.cu, the build and the test mode that find it, and the words
that the report must contain. The corrected twin of the same kernel, run the same way, must end with exit code 0, the
expected result and no report. The builds are those of the Makefile: SANITIZE=address, SANITIZE=thread, WARP=32.

    python3 test/test_planted_bugs.py            (about a minute on 2 cores, most of it compiling)
"""

import os
import re
import subprocess
import sys
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SOURCE = "test/planted/planted_bugs.cu"
BUILDS = {
    "address": ["SANITIZE=address", "WARP=32"],
    "thread": ["SANITIZE=thread", "WARP=32"],
    "debug": ["DEBUG=1", "WARP=32"],
}
REPORT = re.compile(r"ERROR: \w+Sanitizer|WARNING: ThreadSanitizer|runtime error:|error: CPU device")

OUT_OF_BOUNDS = r"ERROR: AddressSanitizer: use-after-poison"
BOUNDS = r"runtime error: index 128 out of bounds for type 'float \[128\]'"
RACE = r"WARNING: ThreadSanitizer: data race"
NAN = r"^result -?nan$"
HOST_ACCESS = "host code accessed device memory: byte 28 of an array of 4000 bytes"
WHO_WAITS = (r"threads 0-15: wait at __syncthreads at .*planted_bugs.cu:\d+\n"
             r" +threads 16-31: wait in warp_sum .*planted_bugs.cu:\d+")

# name, build, environment, report of the bug, further words of it, result of the corrected twin
BUGS = [
    ("write_past_global", "address", {}, OUT_OF_BOUNDS, "write_past_global<false>", "1000"),
    ("read_past_global", "address", {}, OUT_OF_BOUNDS, "read_past_global<false>", "499500"),
    ("write_past_static_shared", "address", {}, BOUNDS, "planted_bugs.cu", "8128"),
    ("read_past_static_shared", "address", {}, BOUNDS, "planted_bugs.cu", "8128"),
    ("write_past_dynamic_shared", "address", {}, OUT_OF_BOUNDS, "write_past_dynamic_shared<false>", "8128"),
    ("read_past_dynamic_shared", "address", {}, OUT_OF_BOUNDS, "read_past_dynamic_shared<false>", "8128"),
    ("use_after_free", "address", {}, "ERROR: AddressSanitizer: heap-use-after-free", "copy_kernel", "0"),
    ("missing_barrier", "thread", {}, RACE, "missing_barrier<false>", "8128"),
    ("missing_barrier", "debug", {"LLMC_ORDER": "forward"}, r"^result (?!8128$)", "", "8128"),
    ("reused_scratch", "thread", {}, RACE, "reused_scratch<false>", "130816"),
    ("blocks_race", "thread", {}, RACE, "blocks_race<false>", "8"),
    ("missing_event", "thread", {}, RACE, "copy_kernel", "999"),
    ("missing_synchronize", "thread", {}, RACE, "missing_synchronize", "999"),
    ("missing_barrier_after_async", "thread", {"LLMC_LATE_ASYNC": "1"}, RACE, "missing_barrier_after_async<false>",
     "8128"),
    ("missing_async_wait", "debug", {"LLMC_LATE_ASYNC": "1"}, NAN, "", "8128"),
    ("missing_async_wait", "thread", {"LLMC_LATE_ASYNC": "1"}, NAN, "", "8128"),
    ("uninitialised_read", "debug", {}, NAN, "", "8128"),
    ("uninitialised_read", "address", {}, NAN, "", "8128"),
    ("uninitialised_shared", "debug", {}, NAN, "", "8128"),
    ("host_access", "debug", {"LLMC_GUARD": "1"}, HOST_ACCESS, "", "7"),
    ("host_access", "address", {"LLMC_GUARD": "1"}, HOST_ACCESS, "", "7"),
    ("divergent_barrier", "debug", {}, r"deadlock in kernel .*divergent_barrier<false>, block \(0,0,0\)",
     WHO_WAITS, "260096"),
    ("divergent_barrier", "thread", {}, "deadlock in kernel", "wait at __syncthreads", "260096"),
]


def make(build, *arguments):
    command = ["make", "--no-print-directory", "MPI=0", "DEVICE=cpu", *BUILDS[build], *arguments]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def program(build):
    """Path of the built program: the folder is the Makefile's own, the rule is given here."""
    info = make(build, "print-config")
    folder = re.search(r"build (\S+)", info.stdout).group(1)
    target = folder + "/planted_bugs"
    rule = f"{target}: {SOURCE}\n\t$(COMPILE) $(CPP_AS) $< -o $@ $(LINK)"
    result = make(build, f"--eval={rule}", target)
    if result.returncode != 0:
        raise AssertionError(f"{target} does not build:\n{result.stdout}")
    return os.path.join(ROOT, target)


def run(path, *arguments, environment=None):
    settings = {key: value for key, value in os.environ.items() if not key.startswith("LLMC_")}
    settings.update(environment or {})
    settings.update(ASAN_OPTIONS="", UBSAN_OPTIONS="print_stacktrace=1", TSAN_OPTIONS="", OMP_NUM_THREADS="2")
    result = subprocess.run([path, *arguments], env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            text=True, errors="replace", timeout=60)
    return result.returncode, result.stdout


class PlantedBugs(unittest.TestCase):
    """One test for each row of BUGS: found with the error in, silent without it."""

    programs = {}

    @classmethod
    def setUpClass(cls):
        for build in BUILDS:
            cls.programs[build] = program(build)

    def check_found(self, path, name, environment, report, words):
        code, output = run(path, name, environment=environment)
        self.assertRegex(output, re.compile(report, re.MULTILINE), f"{name} was not found")
        self.assertRegex(output, re.compile(words, re.MULTILINE), f"the report of {name} does not say where")
        if not report.startswith("^result"):
            self.assertNotEqual(code, 0, f"{name} was reported, but the exit code is 0")

    def check_clean(self, path, name, environment, result):
        code, output = run(path, name, "fixed", environment=environment)
        self.assertIsNone(REPORT.search(output), f"false report on the corrected {name}:\n{output}")
        self.assertRegex(output, re.compile(f"^result {result}$", re.MULTILINE))
        self.assertEqual(code, 0)


def add_tests():
    for name, build, environment, report, words, result in BUGS:
        def test(self, name=name, build=build, environment=environment, report=report, words=words, result=result):
            self.check_found(self.programs[build], name, environment, report, words)
            self.check_clean(self.programs[build], name, environment, result)
        test.__doc__ = f"{name} is found by the {build} build, its corrected twin is clean"
        setattr(PlantedBugs, f"test_{name}_{build}", test)

    def plain_delay(self):
        """A missing event gives old data at once when streams are delayed, without any sanitizer."""
        for seed in range(1, 4):
            environment = {"LLMC_STREAM_DELAY": str(seed)}
            outputs = [run(self.programs["debug"], "missing_event", environment=environment)[1] for _ in range(3)]
            self.check_clean(self.programs["debug"], "missing_event", environment, "999")
            if any("result 0" in output for output in outputs):
                return
        self.fail("LLMC_STREAM_DELAY did not show the missing event in any of three seeds")

    def shuffled_order(self):
        """Reused scratch gives a wrong sum in a shuffled thread order, without any sanitizer."""
        wrong = 0
        for seed in range(1, 9):
            environment = {"LLMC_ORDER": f"shuffle:{seed}"}
            wrong += "result 130816" not in run(self.programs["debug"], "reused_scratch", environment=environment)[1]
            self.check_clean(self.programs["debug"], "reused_scratch", environment, "130816")
        self.assertGreater(wrong, 0)

    PlantedBugs.test_missing_event_delay = plain_delay
    PlantedBugs.test_reused_scratch_shuffled = shuffled_order


add_tests()

if __name__ == "__main__":
    sys.exit(unittest.main(verbosity=1))

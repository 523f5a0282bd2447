#!/usr/bin/env python3
"""What a run survives: killed and stopped ranks, interrupted launchers, damaged checkpoints, full disks.

python3 test/test_failures.py         needs ./train_gpt2 and mpirun; about a minute on 2 idle cores
"""

import glob
import os
import shutil
import signal
import subprocess
import time
import unittest

from train_runs import TrainTest, is_alive

ENDLESS = {"steps": 1000000, "val_every": 0}
SECONDS_TO_END = 10  # for the ranks that are left, after one of them is gone


class Killed(TrainTest):
    def until_step(self, run, folder, step):
        """Waits until `step` lines of training are in the log of a run."""

        def reached():
            try:
                return sum("loss" in line for line in self.metrics(folder)) >= step
            except (OSError, ValueError):
                return False

        run.until(reached, "step %d" % step)

    def assert_all_end(self, run, pids, since):
        """All processes of the run are gone within SECONDS_TO_END; returns the Result."""
        while any(is_alive(pid) for pid in pids) and time.monotonic() - since < SECONDS_TO_END:
            run.process.poll()
            time.sleep(0.02)
        left = [pid for pid in pids if is_alive(pid)]
        self.addCleanup(run.end)
        self.assertEqual(left, [], "still there after %d s" % SECONDS_TO_END)
        if run.process.pid not in pids:
            run.timeout = time.monotonic() - run.start + 5
            return run.wait(end=True)
        return run.wait()

    def kill_rank(self, victim, moment, **options):
        """Goes on with the run `killed` and kills -9 one rank: at its start, while it trains, or while it saves."""
        for unfinished in glob.glob(self.path("killed/ckpt/*.tmp")):
            shutil.rmtree(unfinished)  # of the kill before: the next one that is seen must be new
        before = len(self.read("killed/metrics.jsonl").splitlines()) if os.path.exists(self.path("killed")) else 0
        run = self.start(ranks=4, out="killed", resume=1, **options)
        self.addCleanup(run.end)
        run.until(lambda: len(run.rank_pids()) == 4, "the start of 4 ranks")
        pid, pids = run.rank_pids()[victim], run.pids()
        if moment == "training":
            self.until_step(run, "killed", before + 1 + victim)
        elif moment == "saving":
            run.until(lambda: glob.glob(self.path("killed/ckpt/*.tmp")), "a save")
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        # Open MPI 4.1.4: when a rank dies while it connects, mpirun says so, ends the others, and then in 2 of 100
        # cases waits for ever for a lock in its own clean-up. Ours are the ranks.
        ours = pids if moment != "starting" else [pid for pid in pids if pid != run.process.pid]
        result = self.assert_all_end(run, ours, killed)
        self.assertNotEqual(result.code, 0, result)
        self.assertNotEqual(result.err.strip(), "", result)
        self.assertEqual(result.final, [], result)

    # Each rank is killed at its start, in training and in a save, on two layouts, one after the other in one run. The
    # next start goes on; in the end everything is as without a break.
    def test_kill_each_rank_at_each_moment(self):
        run = {"steps": 150, "checkpoint_every": 2, "keep": 3, "val_every": 50}
        whole = self.train(out="whole", **run)
        for moment in ("starting", "training", "saving"):
            for victim in range(4):
                with self.subTest(moment=moment, victim=victim):
                    self.kill_rank(victim, moment, pp=2 if victim % 2 else 4, zero=victim % 2, **run)
        resumed = self.train(ranks=2, pp=2, out="killed", resume=1, **run)
        self.assertRegex(resumed.out, r"resumed +at step \d+")
        self.assertEqual(resumed.final, whole.final)
        self.assert_same_run("killed", "whole")

    # A rank that neither works nor ends: the others wait as long as they were told, then say for which operation, and
    # end.
    def test_stopped_rank(self):
        run = self.start(ranks=4, pp=2, out="run", comm_timeout=4, **ENDLESS)
        self.until_step(run, "run", 3)
        pids = run.pids()
        os.kill(run.rank_pids()[1], signal.SIGSTOP)
        result = self.assert_all_end(run, pids, time.monotonic() + 4)
        self.assertEqual(result.code, 1, result)
        # the launcher wakes the stopped rank to end it, and that one may then find itself late, too
        waiting = [line for line in result.errors if not line.startswith("error: rank 1:")]
        self.assertNotEqual(waiting, [], result)
        for line in waiting:
            self.assertRegex(
                line,
                r"^error: rank [023]: (send|receive|all_to_all|all_gather|sum|broadcast|barrier)\b.*"
                r"--comm-timeout 4\)",
            )
        self.assertRegex("\n".join(waiting), r"(from|to|for|with) rank 1\b")

    # Ctrl-C, a batch system's SIGTERM, and a launcher that is killed itself: nothing is left running.
    def test_launcher_ends(self):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            with self.subTest(number):
                folder = "run%d" % number
                run = self.start(ranks=3, out=folder, **ENDLESS)
                self.until_step(run, folder, 3)
                pids = run.pids()
                self.assertGreaterEqual(len(pids), 4)
                os.kill(run.process.pid, number)
                self.assertNotEqual(self.assert_all_end(run, pids, time.monotonic()).code, 0)


class DamagedCheckpoints(TrainTest):
    RUN = {"steps": 12, "checkpoint_every": 4, "val_every": 0}

    def setUp(self):
        super().setUp()
        self.whole = self.train(out="whole", **self.RUN)
        shutil.copytree(self.path("whole"), self.path("run"))
        shutil.rmtree(self.path("run/ckpt/step-00000012"))
        self.newest = self.path("run/ckpt/step-00000008")

    def flip(self, name, byte):
        with open(os.path.join(self.newest, name), "r+b") as file:
            file.seek(byte)
            value = file.read(1)[0]
            file.seek(byte)
            file.write(bytes([value ^ 4]))

    def write(self, name, text):
        with open(os.path.join(self.newest, name), "w") as file:
            file.write(text)

    # Whatever has happened to the newest checkpoint: one warning names it and the reason, the one before it is used,
    # and the run ends as if nothing had been.
    def test_the_one_before_is_used(self):
        damages = [
            (lambda: os.truncate(self.newest + "/m.bin", 1000), "m.bin has 1000 bytes"),
            (lambda: self.flip("parameters.bin", 70000), "parameters.bin is damaged"),
            (lambda: self.flip("v.bin", 3), "v.bin is damaged"),
            (lambda: os.unlink(self.newest + "/v.bin"), "v.bin is missing"),
            (lambda: os.unlink(self.newest + "/meta.txt"), "meta.txt is missing"),
            (lambda: os.truncate(self.newest + "/meta.txt", 0), "meta.txt is not that of a checkpoint"),
            (lambda: os.truncate(self.newest + "/meta.txt", 300), "meta.txt is cut off"),
            (lambda: self.flip("meta.txt", 20), "meta.txt was changed or damaged"),
            (lambda: self.write("meta.txt", "Dear diary,\n"), "meta.txt is not that of a checkpoint"),
            (
                lambda: [shutil.rmtree(self.newest), shutil.copytree(self.path("run/ckpt/step-00000004"), self.newest)],
                "it is a checkpoint of step 4",
            ),
        ]
        shutil.copytree(self.path("run"), self.path("clean"))
        for number, (damage, words) in enumerate(damages):
            with self.subTest(words):
                shutil.rmtree(self.path("run"))
                shutil.copytree(self.path("clean"), self.path("run"))
                damage()
                result = self.run_to_end(
                    ranks=(1, 4)[number % 2], pp=(1, 2)[number % 2], out="run", resume=1, **self.RUN
                )
                self.assertEqual((result.code, result.final), (0, self.whole.final), result)
                self.assertEqual(len(result.warnings), 1, result)
                self.assertTrue(
                    result.warnings[0].startswith(
                        "warning: checkpoint run/ckpt/step-00000008 cannot be used: " + words
                    ),
                    result,
                )
                self.assertIn("trying the one before it", result.warnings[0])
                self.assert_same_run("run", "whole")

    # When none is left the run does not silently start afresh.
    def test_none_is_usable(self):
        for name in ("step-00000004", "step-00000008"):
            os.truncate(self.path("run/ckpt/%s/v.bin" % name), 8)
        before = self.tree("run")
        for ranks in (1, 4):
            result = self.run_to_end(ranks=ranks, out="run", resume=1, **self.RUN)
            self.assert_one_error(result, 1, "run/ckpt: none of the 2 checkpoints can be used")
            self.assertEqual(len(result.warnings), 2, result)
        self.assertTrue(before == self.tree("run"))

    # Files that are none of ours, and folders of a save that was interrupted, are no checkpoints.
    def test_other_names(self):
        os.rename(self.newest, self.newest + ".tmp")
        for name in ("notes.txt", "step-9", "step-00000099x"):
            os.mkdir(self.path("run/ckpt/" + name))
        result = self.train(out="run", resume=1, **self.RUN)
        self.assertIn("resumed     at step 4", result.out)
        self.assertEqual(result.final, self.whole.final)
        self.assertNotIn("./step-00000008.tmp", self.tree("run/ckpt"))

    # A checkpoint of another model is refused with the difference, and nothing is touched.
    def test_another_model(self):
        before = self.tree("run")
        for ranks, change, words in (
            (1, {"layers": 3}, "layers 2 (this run: 3)"),
            (4, {"heads": 4}, "heads 2 (this run: 4)"),
            (1, {"seq_max": 64}, "max_seq_len 32 (this run: 64)"),
        ):
            result = self.run_to_end(ranks=ranks, out="run", resume=1, **change, **self.RUN)
            self.assert_one_error(result, 2, "run/ckpt/step-00000008 is of another model: " + words)
        self.assertTrue(before == self.tree("run"))

    # --keep 2 --keep-major 3: the newest two and the multiples of three stay.
    def test_keep(self):
        for ranks in (1, 2):
            run = "keep%d" % ranks
            self.train(ranks=ranks, out=run, steps=8, checkpoint_every=1, keep=2, keep_major=3, val_every=0)
            self.assertEqual(
                sorted(os.listdir(self.path(run + "/ckpt"))), ["step-%08d" % step for step in (3, 6, 7, 8)]
            )


class FullDisk(TrainTest):
    def mount(self, size):
        """A file system of so many KiB at disk/."""
        os.mkdir(self.path("disk"))
        command = ["mount", "-t", "tmpfs", "-o", "size=%dk" % size, "none", self.path("disk")]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
            self.skipTest("mounting a small file system needs root")

    def unmount(self):
        subprocess.run(["umount", "-l", self.path("disk")], check=True)
        os.rmdir(self.path("disk"))

    def enlarge(self, size):
        subprocess.run(["mount", "-o", "remount,size=%dk" % size, self.path("disk")], check=True)

    # There is no room for the next line of a log: one line names the file and the reason.
    def test_log(self):
        for ranks in (1, 4):
            with self.subTest(ranks):
                self.mount(20)  # five pages: config.txt, main.log, metrics.jsonl, and one or two to grow
                try:
                    result = self.run_to_end(ranks=ranks, out="disk/run", **ENDLESS)
                    self.assert_one_error(
                        result, 1, "writing failed: No space left on device; free some space and start again"
                    )
                    self.assertRegex(result.errors[0], r"disk/run/(main\.log|metrics\.jsonl): ")
                finally:
                    self.unmount()

    # There is no room for the next checkpoint: one line says which; those before are as they were, nothing half is
    # left, and with more room the run goes on from them.
    def test_checkpoint(self):
        run = {"steps": 12, "checkpoint_every": 4, "val_every": 0}
        whole = self.train(out="whole", **run)
        for ranks in (1, 4):
            with self.subTest(ranks):
                self.mount(1100)  # two checkpoints of 412 KiB, and the logs
                try:
                    result = self.run_to_end(ranks=ranks, pp=min(ranks, 2), out="disk/run", **run)
                    self.assert_one_error(
                        result, 1, "error: checkpoint of step 12 not written: disk/run/ckpt/step-00000012.tmp/"
                    )
                    self.assertRegex(
                        result.errors[0],
                        r"/(parameters|m|v)\.bin: writing failed: No space left on device; free some space",
                    )
                    self.assertEqual(sorted(os.listdir(self.path("disk/run/ckpt"))), ["step-00000004", "step-00000008"])
                    self.enlarge(4000)
                    resumed = self.train(ranks=ranks, out="disk/run", resume=1, **run)
                    self.assertIn("resumed     at step 8", resumed.out)
                    self.assertEqual(resumed.final, whole.final)
                    self.assert_same_run("disk/run", "whole")
                finally:
                    self.unmount()

    # The same without root: /dev/full in the place of a log, and as standard output.
    def test_device_that_is_always_full(self):
        for name in ("main.log", "metrics.jsonl"):
            os.mkdir(self.path(name + ".run"))
            os.symlink("/dev/full", self.path(name + ".run/" + name))
            for ranks in (1, 4):
                result = self.run_to_end(ranks=ranks, out=name + ".run", val_every=0)
                self.assert_one_error(result, 1, "%s.run/%s: writing failed: No space left on device" % (name, name))
        to_full = ("bash", "-c", 'exec "$@" >/dev/full', "bash")
        for arguments in (None, ["--help"]):
            result = self.run_to_end(wrapper=to_full, arguments=arguments)
            self.assert_one_error(result, 1, "standard output: writing failed: No space left on device")


if __name__ == "__main__":
    unittest.main()

"""Shared by the end-to-end tests of train_gpt2: small data, runs with and without mpirun, what a run left behind.

Every run has a time limit; one that reaches it is ended, with all its ranks, and fails the test. LLMC_TRAIN=PATH tests
another program than ./train_gpt2.
"""

import json
import os
import random
import signal
import struct
import subprocess
import tempfile
import time
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TRAIN = os.path.abspath(os.environ.get("LLMC_TRAIN", os.path.join(ROOT, "train_gpt2")))
TIMES = ("ms", "tokens_per_second")  # what differs between two equal runs

# A model and a training that take about a second: 36 samples, 18 of them a step, so an epoch is 2 steps.
TINY = {
    "train-data": "data",
    "val-data": "data",
    "layers": 2,
    "channels": 32,
    "heads": 2,
    "vocab": 256,
    "seq-len": 32,
    "micro-batch": 3,
    "batch-tokens": 576,
    "steps": 8,
    "lr": 1e-2,
    "lr-schedule": "cosine",
    "lr-final": 0.1,
    "warmup": 2,
    "weight-decay": 0.1,
    "val-every": 4,
    "val-batches": 1,
    "sample-every": 0,
}


def mpi_environment():
    """The environment that scripts/mpi_env.sh makes."""
    text = subprocess.run(
        ["bash", "-c", ". scripts/mpi_env.sh; env -0"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    return dict(entry.split("=", 1) for entry in text.decode().split("\0") if "=" in entry)


def write_tokens(path, tokens, magic=20240520, version=1, count=None):
    """A token file of llm.c: 256 int32 of header, then uint16."""
    with open(path, "wb") as file:
        file.write(struct.pack("<256i", magic, version, len(tokens) if count is None else count, *[0] * 253))
        file.write(struct.pack("<%dH" % len(tokens), *tokens))


def words(count, seed):
    """Tokens of a text in which there is something to learn: words from a small list, with blanks between."""
    rng = random.Random(seed)
    vocabulary = [bytes(rng.choice(b"abcdefghij") for _ in range(rng.randint(2, 6))) for _ in range(12)]
    text = b""
    while len(text) < count:
        text += rng.choice(vocabulary) + b" "
    return list(text[:count])


def write_tokenizer(path, tokens, end_of_text=0):
    """A tokenizer file of llm.c, version 2."""
    with open(path, "wb") as file:
        file.write(struct.pack("<256I", 20240328, 2, len(tokens), end_of_text, *[0] * 252))
        for token in tokens:
            file.write(bytes([len(token)]) + token)


def flags(options):
    """Command line of a dict; an option that is None is left out."""
    return [word for name, value in options.items() if value is not None for word in ("--" + name, str(value))]


def process_table():
    """{pid: parent pid} of all processes that are not zombies."""
    parents = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open("/proc/%s/stat" % name) as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
        except OSError:
            continue  # it has just ended
        if state != "Z":
            parents[int(name)] = int(parent)
    return parents


def is_alive(pid):
    return pid in process_table()


class Result:
    """How a run ended."""

    def __init__(self, code, out, err, seconds):
        self.code, self.out, self.err, self.seconds = code, out, err, seconds
        self.final = [line for line in out.splitlines() if line.startswith("final step ")]
        self.errors = [line for line in err.splitlines() if line.startswith("error:")]
        self.warnings = [line for line in err.splitlines() if line.startswith("warning:")]

    def __str__(self):
        return "exit code %d after %.1f s\n%s\n%s" % (self.code, self.seconds, self.out[-2000:], self.err[-4000:])


class Run:
    """A run that is going on. `wait` gives its Result."""

    def __init__(self, command, folder, environment, timeout):
        self.out_path, self.err_path = tempfile.mkstemp()[1], tempfile.mkstemp()[1]
        self.timeout, self.start = timeout, time.monotonic()
        with open(self.out_path, "wb") as out, open(self.err_path, "wb") as err:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def pids(self):
        """The process that was started and all below it."""
        parents = process_table()
        found = [self.process.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return [pid for pid in found if pid in parents]

    def rank_pids(self):
        """{rank: pid} of the ranks that have started."""
        ranks = {}
        for pid in self.pids():
            try:
                with open("/proc/%d/environ" % pid, "rb") as file:
                    variables = dict(entry.split(b"=", 1) for entry in file.read().split(b"\0") if b"=" in entry)
                if b"OMPI_COMM_WORLD_RANK" in variables and os.path.samefile("/proc/%d/exe" % pid, TRAIN):
                    ranks[int(variables[b"OMPI_COMM_WORLD_RANK"])] = pid
            except OSError:
                continue  # it has just ended
        return ranks

    def until(self, condition, what):
        """Polls until the condition holds; the run must still be going on."""
        while not condition():
            if self.process.poll() is not None:
                raise AssertionError("the run ended before %s: %s" % (what, self.wait()))
            if time.monotonic() - self.start > self.timeout:
                self.end()
                raise AssertionError("%s did not happen within %d s" % (what, self.timeout))
            time.sleep(0.001)

    def end(self):
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()

    def wait(self, end=False):
        """The Result. A run that reaches its time limit fails the test, or is ended if `end`."""
        left = self.timeout - (time.monotonic() - self.start)
        try:
            code = self.process.wait(max(left, 0.1))
        except subprocess.TimeoutExpired:
            self.end()
            if not end:
                raise AssertionError("still running after %d s: %s" % (self.timeout, self.read(-1))) from None
            code = self.process.returncode
        return self.read(code)

    def read(self, code):
        texts = []
        for path in (self.out_path, self.err_path):
            with open(path, "rb") as file:
                texts.append(file.read().decode(errors="replace").replace("\r\n", "\n"))
        return Result(code, texts[0], texts[1], time.monotonic() - self.start)

    def __del__(self):
        for path in (self.out_path, self.err_path):
            os.unlink(path)


class TrainTest(unittest.TestCase):
    """A test with a folder of its own (self.folder, with the token files in data/)."""

    maxDiff = None

    @classmethod
    def setUpClass(cls):
        if not os.access(TRAIN, os.X_OK):
            raise RuntimeError("%s is not there: make DEVICE=cpu train_gpt2" % TRAIN)
        cls.environment = mpi_environment()

    def setUp(self):
        holder = tempfile.TemporaryDirectory(prefix="llmc_")
        self.addCleanup(holder.cleanup)
        self.folder = holder.name
        os.mkdir(self.path("data"))
        write_tokens(self.path("data/a_train.bin"), words(32 * 20 + 9, 1))
        write_tokens(self.path("data/b_train.bin"), words(32 * 16 + 1, 2))
        write_tokens(self.path("data/a_val.bin"), words(32 * 10 + 1, 3))

    def path(self, name):
        return os.path.join(self.folder, name)

    def start(self, ranks=1, arguments=None, environment=None, timeout=120, wrapper=(), **options):
        """Starts train_gpt2 with TINY, changed by `options` (seq_len=8 is --seq-len 8), or with `arguments` alone.

        One rank runs without mpirun. `wrapper`: a command that runs the command after it."""
        changed = dict(TINY, **{name.replace("_", "-"): value for name, value in options.items()})
        command = [TRAIN] + (flags(changed) if arguments is None else list(arguments))
        if ranks > 1:
            command = ["mpirun", "-np", str(ranks)] + command
        return Run([*wrapper, *command], self.folder, dict(self.environment, **(environment or {})), timeout)

    def run_to_end(self, **arguments):
        return self.start(**arguments).wait()

    def train(self, **arguments):
        """A run that must succeed. Returns its Result; `.final[0]` is the final line."""
        result = self.run_to_end(**arguments)
        self.assertEqual(result.code, 0, result)
        self.assertEqual(len(result.final), 1, result)
        self.assertEqual(result.errors + result.warnings, [], result)
        return result

    def metrics(self, run):
        """The lines of metrics.jsonl as dicts, without times and pipeline reports."""
        with open(self.path(run + "/metrics.jsonl")) as file:
            lines = [line for line in map(json.loads, file) if "pipeline" not in line]
        return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]

    def read(self, name):
        with open(self.path(name), "rb") as file:
            return file.read()

    def tree(self, name="."):
        """{path: content} of a folder; folders have None."""
        content = {}
        for folder, folders, files in os.walk(self.path(name)):
            relative = os.path.relpath(folder, self.path(name))
            content.update({os.path.join(relative, sub): None for sub in folders})
            content.update({os.path.join(relative, file): self.read(os.path.join(folder, file)) for file in files})
        return content

    def assert_same_run(self, one, other):
        """Two runs wrote the same main.log, metrics (without times) and checkpoints."""
        self.assertEqual(self.read(one + "/main.log"), self.read(other + "/main.log"))
        self.assertEqual(self.metrics(one), self.metrics(other))
        self.assertTrue(self.tree(one + "/ckpt") == self.tree(other + "/ckpt"), "checkpoints differ")

    def assert_one_error(self, result, code, words):
        """The run ended with this exit code and one error line that contains the words."""
        self.assertEqual(result.code, code, result)
        self.assertEqual(len(result.errors), 1, result)
        self.assertIn(words, result.errors[0])
        self.assertEqual(result.final, [], result)

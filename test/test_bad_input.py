#!/usr/bin/env python3
"""Requests that cannot be met: one line, the right exit code, on one rank and on four, and nothing is touched.

The options come from --help, so a new one is tested without a change here. Runs go on side by side.

    python3 test/test_bad_input.py        needs ./train_gpt2 and mpirun; about a minute on 2 idle cores
"""

import os
import re
import struct
import unittest
from concurrent.futures import ThreadPoolExecutor

from train_runs import TINY, TrainTest, flags, words, write_tokenizer, write_tokens

RANKS = (1, 4)
USER, ENVIRONMENT = 2, 1  # exit codes


class BadInput(TrainTest):
    def check(self, cases):
        """Each case: (ranks, options or list of arguments, exit code, words of the error line)."""

        def run(case):
            ranks, options, _, _ = case
            if isinstance(options, list):
                return self.run_to_end(ranks=ranks, arguments=options)
            return self.run_to_end(ranks=ranks, **options)

        before = self.tree()
        with ThreadPoolExecutor(3) as pool:
            results = list(pool.map(run, cases))
        for case, result in zip(cases, results):
            with self.subTest(ranks=case[0], options=case[1]):
                self.assert_one_error(result, case[2], case[3])
                self.assertNotIn("step 1", result.out)
        self.assertEqual(sorted(before), sorted(self.tree()), "something was created or deleted")
        self.assertTrue(before == self.tree(), "something was overwritten")

    def on_all(self, *cases):
        """The cases on one rank and on four."""
        self.check([(ranks, *case) for case in cases for ranks in RANKS])

    def options_of_help(self):
        """(name, placeholder, legal range) of every option but --config and --help; the range may be empty."""
        text = self.run_to_end(arguments=["--help"]).out
        found = []
        for entry in re.split(r"^  (?=--)", text, flags=re.M)[1:]:
            head = re.match(
                r"--([a-z0-9-]+)(?:, -[a-z]+)? (\S+) .*\[([^\[]*)\]$", " ".join(entry.partition("\n\n")[0].split())
            )
            if head:
                found.append((head.group(1), head.group(2), head.group(3).partition("; ")[2]))
        self.assertEqual(len(found) + 2, len(re.findall(r"^  --", text, re.M)), text)
        return found

    # Every option of --help: values just outside its range, text that is no number, and nothing at all.
    def test_every_option(self):
        cases = []
        for name, placeholder, legal in self.options_of_help():
            option = "--" + name
            if placeholder == "0|1" and not legal:  # a switch
                wrong = ["2", "yes", ""]
            elif placeholder in ("NAME", "HOW"):
                wrong = ["nonsense", ""]
            elif legal:
                low = re.match(r"(?:>= |> )?(-?\d+)", legal)
                wrong = ["12abc", "", "nan", "0x10", "1e999"]
                if placeholder != "X":
                    wrong.append("9" * 30)
                wrong.append(low.group(1) if legal.startswith("> ") else str(int(low.group(1)) - 1))
                if ".." in legal:
                    wrong.append(str(int(legal.partition("..")[2]) + 1))
                if "< " in legal:
                    wrong.append(legal.partition("< ")[2])
            else:
                continue  # any text is legal; files are tested below
            changed = {key: value for key, value in TINY.items() if key != name}
            for value in wrong:
                cases.append((1, flags(changed) + [option, value], USER, option))
            cases.append((4, flags(changed) + [option, wrong[0]], USER, option))
            cases.append((1, flags(changed) + [option], USER, option + " needs a value"))
        self.assertGreater(len(cases), 250)
        self.check(cases)

    # Words that are no option, with the nearest name where there is one; doubled options, also under the short name.
    def test_command_line(self):
        self.on_all(
            (["--learning-rate", "1"], USER, "unknown option --learning-rate"),
            (["--sedd", "1"], USER, "unknown option --sedd; did you mean --seed?"),
            (["--step=1"], USER, "unknown option --step; did you mean --steps?"),
            (["-lr", "1"], USER, "unknown option -lr"),
            (["train"], USER, '"train" is not an option; options start with --'),
            (["--"], USER, '"--" is not an option'),
            ([""], USER, '"" is not an option'),
            (["--steps", "1", "--seed", "1", "--steps", "2"], USER, "--steps is given twice"),
            (["--steps", "1", "-x", "1"], USER, "--steps is given twice"),
            (["--steps", "--seed", "1"], USER, "--steps needs a value"),
            (["--help=1"], USER, "--help takes no value"),
        )

    # Configuration files: missing, a folder, a bad line, unknown and doubled names, values out of range, an open quote;
    # the message has file and line.
    def test_config_files(self):
        texts = {
            "line": "steps = 1\nsteps 2\n",
            "unknown": "\n# a comment\nsteos = 1\n",
            "twice": "seed = 1\nseed = 2\n",
            "range": "seed = -1\n",
            "quote": 'sample-prompt = "abc\n',
            "empty": "seed =\n",
            "binary": "\x7fELF\0\1\2",
        }
        for name, text in texts.items():
            with open(self.path(name), "w") as file:
                file.write(text)
        cases = [
            (["--config", name], USER, start)
            for name, start in [
                ("line", 'line:2: "steps 2" is not `name = value`'),
                ("unknown", "unknown:3: unknown option steos; did you mean steps?"),
                ("twice", "twice:2: seed is given twice"),
                ("range", "range:1: seed -1 is out of range"),
                ("quote", "quote:1: sample-prompt"),
                ("empty", "empty:1: seed has no value"),
                ("binary", "binary:1: "),
                ("nowhere", "cannot open configuration file nowhere"),
                ("data", "data is a folder"),
                ("", "names no file"),
            ]
        ]
        self.on_all(*cases)

    # Token files, for training and validation.
    def test_token_files(self):
        text = words(400, 5)
        write_tokens(self.path("magic.bin"), text, magic=20240521)
        write_tokens(self.path("version.bin"), text, version=7)
        write_tokens(self.path("cut.bin"), text, count=401)
        write_tokens(self.path("long.bin"), text, count=300)
        write_tokens(self.path("none.bin"), [])
        write_tokens(self.path("one.bin"), [1])
        write_tokens(self.path("short.bin"), text[:32])
        write_tokens(self.path("id.bin"), text[:100] + [256] + text[100:])
        write_tokens(self.path("ok.bin"), text)
        for name, content in (
            ("empty.bin", b""),
            ("header.bin", self.read("ok.bin")[:1000]),
            ("text.bin", b"Once upon a time " * 99),
        ):
            with open(self.path(name), "wb") as file:
                file.write(content)
        os.mkdir(self.path("hollow"))
        expected = [
            ("nowhere.bin", "no file matches nowhere.bin"),
            ("nowhere/*.bin", "no file matches nowhere/*.bin"),
            ("", "names no file"),
            ("hollow", "the folder hollow holds no file *"),
            ("empty.bin", "empty.bin is empty"),
            ("header.bin", "header.bin is cut short"),
            ("text.bin", "text.bin is not a token file"),
            ("magic.bin", "magic.bin is not a token file"),
            ("version.bin", "version.bin is a token file of version 7"),
            ("cut.bin", "cut.bin is cut short"),
            ("long.bin", "long.bin is longer than its header says"),
            ("none.bin", "none.bin holds no token"),
            ("one.bin", "the 2 tokens of the shortest sample"),
            ("short.bin", "a sample needs --seq-len + 1 = 33"),
            ("id.bin", "id.bin: token 100 is 256, but ids must be below the vocabulary of 256"),
        ]
        cases = [({"train_data": name, "out": "run"}, USER, text) for name, text in expected]
        cases += [
            ({"val_data": name, "out": "run"}, USER, text if name else "--val-every 4 needs --val-data")
            for name, text in expected[::3]
        ]
        self.on_all(*cases)

    # Model files, and options that contradict them.
    def test_model_files(self):
        self.train(steps=1, warmup=0, out="made", save_model=1)
        model = self.read("made/model.bin")
        header = list(struct.unpack("<256i", model[:1024]))

        def with_header(place, value):
            return struct.pack("<256i", *(header[:place] + [value] + header[place + 1 :])) + model[1024:]

        files = {
            "empty": b"",
            "header": model[:500],
            "cut": model[:-4],
            "long": model + b"1234",
            "magic": with_header(0, 1),
            "version": with_header(1, 99),
            "layers": with_header(4, 3),
            "negative": with_header(4, -2),
            "heads": with_header(5, 3),
        }
        for name, content in files.items():
            with open(self.path(name + ".bin"), "wb") as file:
                file.write(content)
        free = dict.fromkeys(["layers", "channels", "heads", "vocab"])
        cases = [(dict(free, load=name + ".bin", out="run"), USER, name + ".bin") for name in files]
        cases += [
            (dict(free, load="nowhere.bin"), USER, "no model file nowhere.bin"),
            (dict(free, load="d13"), USER, "no model file d13"),
            (dict(free, load="data"), USER, "data is a folder"),
            (dict(free, load="data/a_val.bin"), USER, "a_val.bin is not a model file of llm.c"),
            (dict(free, load="made/model.bin", layers=3), USER, "--layers 3 differs from made/model.bin, which has 2"),
            (dict(free, load="made/model.bin", vocab=300), USER, "--vocab 300 differs"),
            (
                dict(free, load="made/model.bin", seq_len=64, batch_tokens=768),
                USER,
                "--seq-len 64 is longer than the model's --seq-max 32",
            ),
        ]
        self.on_all(*cases)

    # Tokenizer files and prompts.
    def test_tokenizers(self):
        letters = [bytes([byte]) for byte in range(97, 123)] + [b" "]
        write_tokenizer(self.path("letters.bin"), letters + [b"token%d" % n for n in range(229)])
        whole = self.read("letters.bin")
        files = {
            "empty": b"",
            "header": whole[:100],
            "cut": whole[:-3],
            "long": whole + b"1",
            "foreign": b"PK\3\4" + whole[4:],
        }
        for name, content in files.items():
            with open(self.path(name), "wb") as file:
                file.write(content)
        write_tokenizer(self.path("small"), letters)
        cases = [
            ({"tokenizer": name, "out": "run"}, USER, text)
            for name, text in [
                ("nowhere", "cannot open tokenizer file nowhere"),
                ("data", "data is a folder"),
                ("empty", "empty is empty"),
                ("header", "header is cut short"),
                ("cut", "cut is cut short"),
                ("long", "after its last token"),
                ("foreign", "foreign is not a tokenizer file"),
                ("small", "small holds 27 tokens, the model has 256"),
            ]
        ]
        cases += [
            ({"tokenizer": "letters.bin", "sample_prompt": "ABC"}, USER, 'the tokenizer has no token for "A"'),
            ({"vocab": 300, "sample_prompt": "1 2 x"}, USER, 'prompt "x" is not a whole number'),
            ({"vocab": 300, "sample_prompt": "1 300"}, USER, "prompt: 300 must be a token from 0 to 299"),
        ]
        self.on_all(*cases)

    # Sizes, layouts and rules between options.
    def test_combinations(self):
        one, four = (lambda *case: (1, *case)), (lambda *case: (4, *case))
        self.check(
            [
                one({"pp": 2}, USER, "--pp 2 needs at least 2 ranks, there is 1"),
                four({"pp": 5}, USER, "--pp 5 needs at least 5 ranks, there are 4"),
                four({"pp": 3}, USER, "--pp 3 does not divide 4 ranks"),
                four(
                    {"pp": 4, "layers": 1},
                    USER,
                    "--pp 4 is 4 stages, too many for 1 blocks: at most 3 (embedding, blocks, head); use --pp 3",
                ),
                four({"batch_tokens": 288}, USER, "--batch-tokens 288 is 3 micro-batches, too few for 4 replicas"),
                four({"pp": 2, "partition": "1,1,0"}, USER, "--partition 1,1,0 has 3 counts, --pp 2"),
                four({"pp": 2, "partition": "2,1"}, USER, "--partition 2,1 places 3 blocks, the model has 2"),
                four({"pp": 2, "partition": "3,-1"}, USER, '--partition 3,-1: "-1" is not a number of blocks'),
            ]
        )
        self.on_all(
            (
                {"batch_tokens": 100},
                USER,
                "--batch-tokens 100 is not a multiple of --micro-batch 3 x --seq-len 32 = 96",
            ),
            ({"batch_tokens": 2**63 - 1, "micro_batch": 1, "seq_len": 1}, USER, "a step takes at most 65536"),
            ({"micro_batch": 2**31 - 1}, USER, "do not fit one micro-batch"),
            (
                {"seq_len": 64, "seq_max": 32, "batch_tokens": 0},
                USER,
                "--seq-len 64 is longer than the model's --seq-max 32",
            ),
            ({"heads": 3}, USER, "--heads 3 does not divide --channels 32"),
            ({"warmup": 9}, USER, "--warmup 9 is longer than --steps 8"),
            ({"steps": -1, "batch_tokens": 96 * 100}, USER, "--steps -1 (one epoch) is no step"),
            ({"val_batches": 0}, USER, "--val-batches 0 validates on nothing"),
            ({"checkpoint_every": 2}, USER, "--checkpoint-every needs a run folder"),
            ({"resume": 1}, USER, "--resume needs a run folder"),
            ({"save_model": 1}, USER, "--save-model needs a run folder"),
            ({"comm": "nccl"}, USER, "--comm nccl needs a CUDA build with NCCL"),
            ({"layers": 4096, "channels": 65536, "heads": 64}, ENVIRONMENT, "MiB of device memory"),
        )

    # Run folders that cannot be written.
    def test_output(self):
        os.mkdir(self.path("log"))
        os.mkdir(self.path("log/metrics.jsonl"))
        os.mkdir(self.path("saves"))
        with open(self.path("saves/ckpt"), "w"):
            pass
        self.on_all(
            ({"out": "data/a_val.bin"}, ENVIRONMENT, "data/a_val.bin: creating the folder failed: File exists"),
            ({"out": "data/a_val.bin/run"}, ENVIRONMENT, "data/a_val.bin: creating the folder failed"),
            ({"out": "/proc/run"}, ENVIRONMENT, "/proc/run: creating the folder failed"),
            ({"out": "saves", "checkpoint_every": 4}, USER, "cannot read the folder saves/ckpt"),
            ({"out": "saves", "resume": 1}, USER, "cannot read the folder saves/ckpt"),
        )
        # the folder is there, and one of its files cannot be: the other one has been made by then
        self.assert_one_error(
            self.run_to_end(ranks=4, out="log"), ENVIRONMENT, "log/metrics.jsonl: creating it failed: Is a directory"
        )

    # Data that turns out to be bad in the middle of a run ends it on every rank with one line; the steps before stay in
    # the log.
    def test_bad_token_found_while_training(self):
        text = words(32 * 200 + 1, 4)
        text[32 * 150 + 3] = 999
        write_tokens(self.path("data/a_train.bin"), text)
        for ranks in RANKS:
            run = "run%d" % ranks
            result = self.run_to_end(
                ranks=ranks, pp=min(ranks, 2), train_data="data/a_train.bin", shuffle=0, out=run, val_every=0, steps=20
            )
            self.assert_one_error(
                result, USER, "a_train.bin: token 4803 is 999, but ids must be below the vocabulary of 256"
            )
            self.assertEqual([line["step"] for line in self.metrics(run)], list(range(1, 9)))


if __name__ == "__main__":
    unittest.main()

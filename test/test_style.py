#!/usr/bin/env python3
"""The structure that the README promises: layers point one way, files stay small, no device questions outside the device layer."""
import os
import re
import subprocess
import unittest

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")

# Lower layers first; a file includes only files of its own layer or below.
LAYERS = [
    ("base", """check json numeric norm_block random file option_text options train_options train_option_rules logger learning_rate shuffle token_shards
                tokenizer sampler element_hash parameter_table gpt2_config llmc_file grid schedule schedules greedy_schedule schedule_csv closed_form plan plan_timer model_cost partition
                pipeline_layout layout_search planner timeline model_options
                stage_layout process control clock step_times telemetry telemetry_text trace together"""),
    ("device", "device select_device mma memory blas start_device doorbell"),
    ("kernels", "reduce embedding layernorm gelu matmul attention attention_tile classifier adamw global_norm accumulate"),
    ("model", "gpt2_activations gpt2_block gpt2_workspace gradient_tree gpt2_stage"),
    ("parallel", """comm comm_backend comm_mpi comm_mpi_engine comm_mpi_wire comm_nccl recorder pipeline zero checkpoint checkpoint_files
                    checkpoint_folder batch_loader gpt2_memory gpt2_plan plan_report plan_command measure_costs parallel_gpt2 parallel_gpt2_steps"""),
    ("trainer", "pipeline_reporter trainer trainer_setup trainer_steps"),
]
DEVICE_FILES = {"device.h", "select_device.h", "mma.h", "random.h", "blas.h"}  # may ask which device they are built for


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        return file.read()


def source_files():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    names = listed.stdout.split("\n") if listed.returncode == 0 else []
    if not names:  # an unpacked archive
        names = [os.path.relpath(os.path.join(folder, name), ROOT) for folder, _, files in os.walk(ROOT) for name in files]
    return [n for n in names if re.search(r"\.(cu|cuh|h|cpp|py|sh)$", n) and not n.startswith("build/") and os.path.exists(os.path.join(ROOT, n))]


class Style(unittest.TestCase):
    def layer_of(self, name):
        stem = os.path.splitext(name)[0]
        for level, (_, members) in enumerate(LAYERS):
            if stem in members.split():
                return level
        return None

    # Every header of llmc/ has a layer, and no include points to a higher one; the CPU device includes itself and the base only.
    def test_layers_point_one_way(self):
        for path in source_files():
            if not path.startswith("llmc/"):
                continue
            own = 1 if path.startswith("llmc/cpu/") else self.layer_of(os.path.basename(path))
            self.assertIsNotNone(own, f"{path} is in no layer of test_style.py")
            for included in re.findall(r'#include "(llmc/[^"]+)"', read(path)):
                other = 1 if included.startswith("llmc/cpu/") else self.layer_of(os.path.basename(included))
                self.assertIsNotNone(other, f"{path} includes {included}, which is in no layer")
                self.assertLessEqual(other, own, f"{path} ({LAYERS[own][0]}) includes {included} ({LAYERS[other][0]})")

    # At most 500 lines a file, 120 columns a line of code.
    def test_size_of_files(self):
        for path in source_files():
            lines = read(path).split("\n")
            self.assertLessEqual(len(lines), 501, path)
            if re.search(r"\.(cu|cuh|h|cpp)$", path):
                for number, line in enumerate(lines, 1):
                    self.assertLessEqual(len(line), 120, f"{path}:{number}")

    # Which device it is built for is asked in the device layer only.
    def test_device_questions_stay_in_the_device_layer(self):
        for path in source_files():
            if not path.startswith("llmc/") or path.startswith("llmc/cpu/") or os.path.basename(path) in DEVICE_FILES:
                continue
            if os.path.basename(path) in ("comm_nccl.h", "comm_backend.h"):  # NCCL exists in CUDA builds only
                continue
            self.assertNotIn("__CUDACC__", read(path), path)

    # Launches go through launch<>(), and no build turns asserts or strict arithmetic off.
    def test_banned_words(self):
        for path in source_files():
            if path.startswith(("llmc/", "train_")) and path != "llmc/device.h":
                self.assertIsNone(re.search(r"<<<|atomicAdd\(\(?float", read(path)), path)
        self.assertIsNone(re.search(r"NDEBUG|-ffast-math|-Ofast", read("Makefile")))


if __name__ == "__main__":
    unittest.main()

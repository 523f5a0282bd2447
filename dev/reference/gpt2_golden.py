"""Writes the golden values of a tiny GPT-2 to test/golden/ (what they hold, how to compare: dev/reference/README.md).

    /usr/bin/python3 dev/reference/gpt2_golden.py            write the files
    /usr/bin/python3 dev/reference/gpt2_golden.py --check    compute everything again and compare with the files

Needs PyTorch and numpy (Debian: python3-torch python3-numpy). The committed files come from PyTorch 1.13.0a0 (Debian
1.13.1+dfsg-4), numpy 1.24.2, Python 3.11.2. One thread, float64, seeds from numpy's frozen RandomState: two runs give
the same bytes; another BLAS may change the last bit of a few values, which --check allows for.
"""
import argparse
import os
import sys

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # before BLAS is loaded: its threads change last bits
    os.environ[variable] = "1"

import numpy as np
import torch

from golden_file import bf16_round, golden_bytes, llmc_model_bytes, read_golden
from gpt2_model import (AdamW, RoundToBf16, forward, gelu, gradient_norm, identity, layernorm, loss_and_gradients,
                        parameter_shapes)

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "test", "golden")
CONFIG = {"layers": 3, "heads": 3, "channels": 48, "vocab": 97, "padded_vocab": 128, "max_seq_len": 40}
B, T = 3, 33
STEPS, MICRO_BATCHES = 10, 2
# clip is below every gradient norm of the ten steps, so clipping is always active
SETTINGS = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1, "clip": 0.5}
ROUNDING_SEEDS = 8


def make_weights():
    """Float32 weights, larger than at the start of a training: attention is far from uniform, no bias is zero."""
    random = np.random.RandomState(20240326)
    scales = {"wte": 0.15, "wpe": 0.1, "qkv.weight": 0.15, "attn.proj.weight": 0.1, "fc.weight": 0.12,
              "mlp.proj.weight": 0.08}
    weights = {}
    for name, shape in parameter_shapes(CONFIG).items():
        values = random.standard_normal(shape)
        if "ln_" in name:
            values = 1.0 + 0.1 * values if name.endswith("weight") else 0.05 * values
        else:
            values *= next((scale for key, scale in scales.items() if key in name), 0.05)
        weights[name] = values.astype(np.float32)
    weights["wte.weight"][CONFIG["vocab"]:] = 0.0
    return weights


def make_tokens():
    """(STEPS, MICRO_BATCHES, B, T+1) tokens with something to learn: mostly a fixed successor, else a random one."""
    random = np.random.RandomState(20240520)
    shape = (STEPS, MICRO_BATCHES, B, T + 1)
    jump, uniform = random.random_sample(shape) < 0.3, random.randint(0, CONFIG["vocab"], shape)
    tokens = uniform.copy()
    for t in range(1, T + 1):
        tokens[..., t] = np.where(jump[..., t], uniform[..., t], (7 * tokens[..., t - 1] + 3) % CONFIG["vocab"])
    return tokens


def mask_targets(targets):
    """Some targets ignored: single ones, the start of a sequence, and all but two of the last sequence."""
    masked = targets.copy()
    masked[0, ::5] = -1
    masked[1, :20] = -1
    masked[2, :] = -1
    masked[2, [3, 31]] = targets[2, [3, 31]]
    return masked


def to_double(weights):
    return {name: torch.from_numpy(value.astype(np.float64)) for name, value in weights.items()}


def relative_error(values, exact):
    scale = float(torch.linalg.vector_norm(exact))
    return float(torch.linalg.vector_norm(values - exact)) / scale if scale > 0 else 0.0


def batch_entries(prefix, weights, inputs, targets, with_logits):
    """Everything about one batch: tokens, losses, gradients of the mean loss. Also returns the exact tensors."""
    x, y = torch.from_numpy(inputs), torch.from_numpy(targets)
    logits, losses, loss, gradients = loss_and_gradients(weights, CONFIG, x, y)
    entries = {prefix + ".inputs": inputs.astype(np.int32), prefix + ".targets": targets.astype(np.int32),
               prefix + ".target_count": np.array([(targets >= 0).sum()], np.int32),
               prefix + ".losses": losses.numpy(), prefix + ".loss": np.array([loss])}
    if with_logits:
        entries[prefix + ".logits"] = logits.numpy().astype(np.float32)
    entries[prefix + ".gradient_norm"] = np.array([gradient_norm(gradients)])
    for name, gradient in gradients.items():
        entries[prefix + ".gradient." + name] = gradient.numpy().astype(np.float32)
    return entries, (logits, losses, gradients)


def train(weights, tokens, store=identity, to_stored=identity):
    """Ten optimizer steps on `weights` (changed in place). `to_stored` makes the stored weights from the masters.
    Returns losses, gradient norms before clipping, and the gradients of the first step."""
    optimizer, losses, norms, first = AdamW(weights, SETTINGS), [], [], None
    stored = dict(weights)
    for step in range(STEPS):
        batch = torch.from_numpy(tokens[step].reshape(MICRO_BATCHES * B, T + 1))
        _, _, loss, gradients = loss_and_gradients(stored, CONFIG, batch[:, :-1], batch[:, 1:], store)
        first = first or gradients
        losses.append(loss)
        norms.append(optimizer.update(weights, gradients))
        stored = {name: to_stored(value) for name, value in weights.items()}
    return np.array(losses), np.array(norms), first


def train_entries(weights, tokens, with_tensors):
    losses, norms, first = train(weights, tokens)
    assert norms.min() > SETTINGS["clip"], "clipping must be active in every step: %s" % norms
    entries = {"train.inputs": tokens[..., :-1].astype(np.int32), "train.targets": tokens[..., 1:].astype(np.int32)}
    entries.update({"train." + key: np.array([value]) for key, value in SETTINGS.items()})
    entries.update({"train.losses": losses, "train.gradient_norms": norms})
    if with_tensors:
        entries.update({"train.first_gradient." + n: g.numpy().astype(np.float32) for n, g in first.items()})
        entries.update({"train.final." + n: w.numpy().astype(np.float32) for n, w in weights.items()})
    return entries


def stochastic_rounding(seed):
    """Rounds to one of the two bf16 neighbours so that the mean is exact, as AdamW does with the stored weights."""
    random = np.random.RandomState(seed)

    def round_tensor(value):
        bits = value.numpy().astype(np.float32).view(np.uint32)
        bits = (bits + random.randint(0, 1 << 16, bits.shape).astype(np.uint32)) & np.uint32(0xFFFF0000)
        return torch.from_numpy(bits.view(np.float32).astype(np.float64))

    return round_tensor


def rounding_entries(weights, tokens, exact, exact_train):
    """How far bf16 storage alone takes the results from the exact ones: the yardstick of the bf16 tests."""
    logits, losses, gradients = exact
    x, y = torch.from_numpy(tokens[0, 0, :, :-1]), torch.from_numpy(tokens[0, 0, :, 1:])
    store = RoundToBf16.apply
    rounded = loss_and_gradients(weights, CONFIG, x, y, store)
    norm_error = abs(gradient_norm(rounded[3]) / gradient_norm(gradients) - 1.0)
    entries = {"rounding_error.logits": np.array([relative_error(rounded[0], logits)]),
               "rounding_error.losses": np.array([relative_error(rounded[1], losses)]),
               "rounding_error.gradient_norm": np.array([norm_error])}
    for name, gradient in gradients.items():
        entries["rounding_error.gradient." + name] = np.array([relative_error(rounded[3][name], gradient)])
    loss_errors, norm_errors = np.zeros(STEPS), np.zeros(STEPS)
    for seed in range(ROUNDING_SEEDS):
        own = {name: value.clone() for name, value in weights.items()}
        run_losses, run_norms, _ = train(own, tokens, store, stochastic_rounding(seed))
        loss_errors = np.maximum(loss_errors, np.abs(run_losses - exact_train["train.losses"]))
        norm_errors = np.maximum(norm_errors, np.abs(run_norms / exact_train["train.gradient_norms"] - 1.0))
    entries["rounding_error.train.losses"] = loss_errors
    entries["rounding_error.train.gradient_norms"] = norm_errors
    return entries


def self_check(weights, tokens):
    """The model and optimizer against PyTorch's own layers, in float64."""
    x, y = torch.from_numpy(tokens[0, 0, :, :-1]), torch.from_numpy(tokens[0, 0, :, 1:])
    z = torch.from_numpy(np.random.RandomState(0).standard_normal((5, 48)))
    w, b = weights["ln_f.weight"], weights["ln_f.bias"]
    assert torch.allclose(layernorm(z, w, b), torch.nn.functional.layer_norm(z, (48,), w, b), rtol=1e-12, atol=1e-13)
    assert torch.allclose(gelu(z), torch.nn.functional.gelu(z, approximate="tanh"), rtol=1e-12, atol=1e-13)
    logits, losses = forward(weights, CONFIG, x, y)
    theirs = torch.nn.functional.cross_entropy(logits.reshape(-1, CONFIG["vocab"]), y.reshape(-1))
    assert abs(float(losses.mean() - theirs)) < 1e-12
    own = {name: value.clone() for name, value in weights.items()}
    leaves = {name: torch.nn.Parameter(value.clone()) for name, value in weights.items()}
    groups = [{"params": [p for p in leaves.values() if p.dim() == 2], "weight_decay": SETTINGS["weight_decay"]},
              {"params": [p for p in leaves.values() if p.dim() != 2], "weight_decay": 0.0}]
    betas = (SETTINGS["beta1"], SETTINGS["beta2"])
    theirs = torch.optim.AdamW(groups, SETTINGS["learning_rate"], betas, SETTINGS["epsilon"])
    ours = AdamW(own, SETTINGS)
    for _ in range(3):
        _, _, _, gradients = loss_and_gradients(own, CONFIG, x, y)
        norm = ours.update(own, gradients)
        for name, leaf in leaves.items():
            leaf.grad = gradients[name] * (SETTINGS["clip"] / norm)
        theirs.step()
    for name, value in own.items():
        assert torch.allclose(value, leaves[name].data, rtol=1e-12, atol=1e-14), "AdamW differs from PyTorch's"


def make_files():
    weights, tokens = make_weights(), make_tokens()
    self_check(to_double(weights), tokens)
    config = {"config": np.array(list(CONFIG.values()), np.int32), "batch": np.array([B, T], np.int32)}
    inputs, targets = tokens[0, 0, :, :-1], tokens[0, 0, :, 1:]
    exact = dict(config)
    exact.update(batch_entries("single", to_double(weights), inputs, targets, True)[0])
    exact.update(batch_entries("masked", to_double(weights), inputs, mask_targets(targets), False)[0])
    exact.update(train_entries(to_double(weights), tokens, True))

    rounded = {name: bf16_round(value) for name, value in weights.items()}
    half, tensors = dict(config), None
    entries, tensors = batch_entries("single", to_double(rounded), inputs, targets, True)
    half.update(entries)
    half.update(train_entries(to_double(rounded), tokens, False))
    half.update(rounding_entries(to_double(rounded), tokens, tensors, half))
    return {"gpt2_tiny_fp32.bin": llmc_model_bytes(CONFIG, weights, 3), "gpt2_tiny_fp32.golden": golden_bytes(exact),
            "gpt2_tiny_bf16.bin": llmc_model_bytes(CONFIG, weights, 5), "gpt2_tiny_bf16.golden": golden_bytes(half)}


def differences(name, new, old):
    """What differs between a computed and a committed file, beyond the last bits of a float; [] if nothing does."""
    if new == old:
        return []
    if not name.endswith(".golden"):
        return ["%s: bytes differ" % name]
    new, old = read_golden(new), read_golden(old)
    if list(new) != list(old):
        return ["%s: other entries" % name]
    # rounding errors are themselves made of roundings, which another BLAS may tip over
    limits = {key: 0.2 if key.startswith("rounding_error") else 1e-6 for key in new}
    return ["%s: %s" % (name, key) for key in new if new[key].shape != old[key].shape or
            np.linalg.norm((new[key] - old[key]).ravel()) > limits[key] * np.linalg.norm(old[key].ravel())]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the committed files, write nothing")
    parser.add_argument("--out", default=FOLDER, help="folder (default: test/golden)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    problems = []
    for name, content in make_files().items():
        path = os.path.join(arguments.out, name)
        if arguments.check:
            with open(path, "rb") as file:
                problems += differences(name, content, file.read())
        else:
            os.makedirs(arguments.out, exist_ok=True)
            with open(path, "wb") as file:
                file.write(content)
            print("%9d bytes  %s" % (len(content), name))
    for problem in problems:
        print("differs: " + problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

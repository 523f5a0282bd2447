"""GPT-2 written once more, in PyTorch and float64, from the papers and not from the C++ code.

forward() returns logits and per-token losses. `store` is applied wherever the C++ program writes a tensor of its
activation type to memory: the identity for the exact result, RoundToBf16 to see what that rounding alone does.
"""
import math

import torch

from golden_file import LAYER_TENSORS


class RoundToBf16(torch.autograd.Function):
    """Value and gradient pass through bf16 (nearest, ties to even)."""

    @staticmethod
    def forward(_, x):
        return x.to(torch.float32).to(torch.bfloat16).to(x.dtype)

    @staticmethod
    def backward(_, gradient):
        return gradient.to(torch.float32).to(torch.bfloat16).to(gradient.dtype)


def identity(x):
    return x


def parameter_shapes(config):
    """name -> shape in canonical order (llmc/gpt2_config.h)."""
    C, L = config["channels"], config["layers"]
    block = [(C,), (C,), (3 * C, C), (3 * C,), (C, C), (C,), (C,), (C,), (4 * C, C), (4 * C,), (C, 4 * C), (C,)]
    shapes = {"wte.weight": (config["padded_vocab"], C), "wpe.weight": (config["max_seq_len"], C)}
    for layer in range(L):
        shapes.update({"h.%d.%s" % (layer, name): shape for name, shape in zip(LAYER_TENSORS, block)})
    shapes.update({"ln_f.weight": (C,), "ln_f.bias": (C,)})
    return shapes


def layernorm(x, weight, bias):
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    return centred / torch.sqrt(variance + 1e-5) * weight + bias


def gelu(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


def attention(qkv, heads, store):
    B, T, three_channels = qkv.shape
    C = three_channels // 3
    q, k, v = (part.reshape(B, T, heads, C // heads).transpose(1, 2) for part in qkv.split(C, dim=2))
    scores = q @ k.transpose(2, 3) / math.sqrt(C // heads)
    future = torch.triu(torch.ones(T, T, dtype=torch.bool), diagonal=1)
    weights = torch.softmax(scores.masked_fill(future, -math.inf), dim=3)
    return (store(weights) @ v).transpose(1, 2).reshape(B, T, C)


def forward(weights, config, inputs, targets, store=identity):
    """inputs, targets (B,T) int64; target -1 is ignored (loss 0). Returns logits (B,T,V), losses (B,T)."""
    T = inputs.shape[1]
    x = store(weights["wte.weight"][inputs] + weights["wpe.weight"][:T])
    for layer in range(config["layers"]):
        w = {name: weights["h.%d.%s" % (layer, name)] for name in LAYER_TENSORS}
        ln1 = store(layernorm(x, w["ln_1.weight"], w["ln_1.bias"]))
        qkv = store(ln1 @ w["attn.qkv.weight"].T + w["attn.qkv.bias"])
        mixed = store(attention(qkv, config["heads"], store))
        x = store(x + store(mixed @ w["attn.proj.weight"].T + w["attn.proj.bias"]))
        ln2 = store(layernorm(x, w["ln_2.weight"], w["ln_2.bias"]))
        fc = store(ln2 @ w["mlp.fc.weight"].T + w["mlp.fc.bias"])
        x = store(x + store(store(gelu(fc)) @ w["mlp.proj.weight"].T + w["mlp.proj.bias"]))
    hidden = store(layernorm(x, weights["ln_f.weight"], weights["ln_f.bias"]))
    logits = store(hidden @ weights["wte.weight"][:config["vocab"]].T)
    flat, wanted = logits.reshape(-1, config["vocab"]), targets.reshape(-1)
    chosen = flat.gather(1, wanted.clamp(min=0)[:, None])[:, 0]
    losses = torch.where(wanted >= 0, torch.logsumexp(flat, 1) - chosen, torch.zeros_like(chosen))
    return logits, losses.reshape(targets.shape)


def loss_and_gradients(weights, config, inputs, targets, store=identity):
    """Loss = mean over the targets that are not ignored. Returns logits, losses (B,T), loss, name -> gradient."""
    leaves = {name: value.detach().clone().requires_grad_(True) for name, value in weights.items()}
    logits, losses = forward(leaves, config, inputs, targets, store)
    count = int((targets >= 0).sum())
    # the classifier makes the gradient of the sum, so bf16 rounds that one; the division by the count comes last
    total = losses.sum()
    total.backward()
    gradients = {name: leaf.grad / count for name, leaf in leaves.items()}
    return logits.detach(), losses.detach(), float(total.detach()) / count, gradients


def gradient_norm(gradients):
    return math.sqrt(sum(float((g * g).sum()) for g in gradients.values()))


class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019) on 2-D tensors; gradients clipped by their norm."""

    def __init__(self, weights, settings):
        self.settings, self.steps = settings, 0
        self.m = {name: torch.zeros_like(value) for name, value in weights.items()}
        self.v = {name: torch.zeros_like(value) for name, value in weights.items()}

    def update(self, weights, gradients):
        """In place. Returns the norm before clipping."""
        s = self.settings
        self.steps += 1
        norm = gradient_norm(gradients)
        scale = s["clip"] / norm if norm > s["clip"] else 1.0
        for name, value in weights.items():
            g = gradients[name] * scale
            self.m[name] = s["beta1"] * self.m[name] + (1.0 - s["beta1"]) * g
            self.v[name] = s["beta2"] * self.v[name] + (1.0 - s["beta2"]) * g * g
            m_hat = self.m[name] / (1.0 - s["beta1"] ** self.steps)
            v_hat = self.v[name] / (1.0 - s["beta2"] ** self.steps)
            decay = s["weight_decay"] if value.dim() == 2 else 0.0
            value -= s["learning_rate"] * (m_hat / (torch.sqrt(v_hat) + s["epsilon"]) + decay * value)
        return norm

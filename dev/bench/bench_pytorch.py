#!/usr/bin/env python3
"""One optimizer step of GPT-2 124M in PyTorch on the CPU, fp32: CPU-seconds and wall time, to set beside bench_step.

    OMP_NUM_THREADS=2 /usr/bin/python3 dev/bench/bench_pytorch.py 4 64 5        B T STEPS; needs PyTorch (Debian: python3-torch)

The model is the plain one: LayerNorm, one product for q, k and v, softmax of the masked scores, tanh GELU, tied head, AdamW, clipping."""
import math
import resource
import sys
import time

import torch
from torch import nn
from torch.nn import functional

LAYERS, HEADS, CHANNELS, VOCAB, POSITIONS = 12, 12, 768, 50257, 1024


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(CHANNELS), nn.LayerNorm(CHANNELS)
        self.qkv, self.proj = nn.Linear(CHANNELS, 3 * CHANNELS), nn.Linear(CHANNELS, CHANNELS)
        self.fc, self.fc_proj = nn.Linear(CHANNELS, 4 * CHANNELS), nn.Linear(4 * CHANNELS, CHANNELS)

    def forward(self, x, mask):
        B, T, C = x.shape
        q, k, v = (part.view(B, T, HEADS, C // HEADS).transpose(1, 2) for part in self.qkv(self.ln_1(x)).split(C, dim=2))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(C // HEADS)
        attention = functional.softmax(scores.masked_fill(mask[:T, :T], float("-inf")), dim=-1) @ v
        x = x + self.proj(attention.transpose(1, 2).reshape(B, T, C))
        h = self.fc(self.ln_2(x))
        h = 0.5 * h * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (h + 0.044715 * h * h * h)))
        return x + self.fc_proj(h)


class GPT2(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, CHANNELS), nn.Embedding(POSITIONS, CHANNELS)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(CHANNELS)
        self.register_buffer("mask", torch.triu(torch.ones(POSITIONS, POSITIONS, dtype=torch.bool), 1))

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, self.mask)
        logits = self.ln_f(x) @ self.wte.weight.t()
        return functional.cross_entropy(logits.view(-1, VOCAB), targets.view(-1))


def cpu_seconds():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main():
    if len(sys.argv) != 4:
        sys.exit(f"usage: {sys.argv[0]} B T STEPS")
    B, T, steps = (int(argument) for argument in sys.argv[1:])
    torch.manual_seed(1)
    model = GPT2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    cpu, wall = [], []
    for _ in range(steps + 1):
        tokens, targets = torch.randint(VOCAB, (B, T)), torch.randint(VOCAB, (B, T))
        start_cpu, start_wall = cpu_seconds(), time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        model(tokens, targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        cpu.append(cpu_seconds() - start_cpu)
        wall.append(time.perf_counter() - start_wall)
    cpu, wall = sorted(cpu[1:]), sorted(wall[1:])  # the first step touches its memory for the first time
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"PyTorch {torch.__version__}, GPT-2 124M, B={B} T={T}, fp32, {torch.get_num_threads()} threads")
    print(f"  step          {wall[len(wall) // 2]:.3f} s wall, {cpu[len(cpu) // 2]:.3f} CPU-seconds (median of {steps}), peak {peak:.0f} MiB")


if __name__ == "__main__":
    main()

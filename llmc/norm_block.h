// norm_block.h -- the unit in which gradients are squared and added for the global norm.
#pragma once

#include <cstddef>

/// Elements of a norm block. Every block's sum of squares is one double, made in a fixed order; the doubles are added
/// in the order of their numbers. 1024 elements keep the table small (124M parameters: 122k doubles, 1 MB) and a warp
/// busy.
constexpr size_t kNormBlock = 1024;

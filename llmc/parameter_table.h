// parameter_table.h -- the one list of a model's parameter tensors; everything that walks over parameters walks over
// this.
//
// A row says what a tensor is called, its shape, how it starts, whether it decays and which block it belongs to.
// Allocation, initialisation, sharding, weight decay, norm blocks, checkpoints and reports follow from the rows; there
// is no other index arithmetic over parameters. `offset` is the tensor's place in the canonical order (all tensors back
// to back, no padding between them): the global number of an element is offset + element, whatever stage, replica or
// file it is in.
//
// Initial values are keyed by (seed, tensor, element), so each rank makes exactly its own ranges and all layouts agree.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "llmc/check.h"
#include "llmc/numeric.h"
#include "llmc/random.h"

enum class Initialization { kZeros, kOnes, kNormal };

struct ParameterTensor {
  std::string name;            // "h.3.attn.qkv.weight"
  std::vector<int64_t> shape;  // row-major
  size_t elements = 0;         // product of the shape
  size_t offset = 0;           // canonical global number of element 0
  Initialization init = Initialization::kZeros;
  double std = 0.0;  // of kNormal
  bool weight_decay = false;
  int block = -1;            // -1 embeddings, 0..L-1 blocks, L what follows them
  size_t padding_begin = 0;  // elements from here on are padding: they start as zero and their gradient is zero
  // Highest recompute level (StageRange) at which its weight gradient is an action of its own; beyond, what that action
  // would read is not kept, and the gradient is made together with the input gradient. -1: always together.
  int split_up_to = -1;
};

struct ParameterTable {
  std::vector<ParameterTensor> tensors;  // canonical order
  size_t total = 0;                      // elements of all tensors
};

/// Appends a tensor: fills in elements, offset and padding_begin (the end, or `rows_used` * row length where that is >=
/// 0).
inline void add_tensor(ParameterTable& table, ParameterTensor tensor, int64_t rows_used = -1) {
  assert(!tensor.shape.empty() && "add_tensor: a tensor needs a shape");
  tensor.elements = 1;
  for (int64_t extent : tensor.shape) {
    assert(extent > 0 && "add_tensor: extents are positive");
    tensor.elements *= static_cast<size_t>(extent);
  }
  const int64_t rows = rows_used < 0 ? tensor.shape[0] : rows_used;
  assert(rows <= tensor.shape[0] && "add_tensor: more rows used than there are");
  tensor.padding_begin = tensor.elements / static_cast<size_t>(tensor.shape[0]) * static_cast<size_t>(rows);
  tensor.offset = table.total;
  table.total += tensor.elements;
  table.tensors.push_back(std::move(tensor));
}

/// Row with this name, or -1. Linear search: for tests and set-up.
inline int find_tensor(const ParameterTable& table, const std::string& name) {
  for (size_t i = 0; i < table.tensors.size(); ++i) {
    if (table.tensors[i].name == name) return static_cast<int>(i);
  }
  return -1;
}

/// Initial values of elements [first, first + count) of a tensor: 0, 1 or std * z(seed, tensor_index, element) with z
/// standard normal (random.h); padding is 0. Overwrites out[0 .. count). `tensor_index` is the tensor's row in the
/// table. Host function; the result is a pure function of its arguments: any partition into ranges and any number of
/// threads give the same bits. Requires first + count <= elements (asserted). Cost: about 50 ns of one core per normal
/// value.
inline void initial_values(float* out, const ParameterTensor& tensor, int tensor_index, uint64_t seed, size_t first,
                           size_t count) {
  assert(first <= tensor.elements && count <= tensor.elements - first && "initial_values: range outside the tensor");
  constexpr uint64_t kUse = 0x494e4954;  // "INIT": high half of the random stream, keeps other uses of the seed apart
  const uint64_t stream = kUse << 32 | static_cast<uint32_t>(tensor_index);
  const int64_t n = static_cast<int64_t>(count);
#pragma omp parallel for schedule(static) if (kParallelHostLoops && n >= 4096)
  for (int64_t i = 0; i < n; ++i) {
    const size_t element = first + static_cast<size_t>(i);
    double value = 0.0;
    if (element < tensor.padding_begin) {
      if (tensor.init == Initialization::kOnes) value = 1.0;
      if (tensor.init == Initialization::kNormal) value = tensor.std * random_normal(seed, stream, element);
    }
    out[i] = static_cast<float>(value);
  }
}

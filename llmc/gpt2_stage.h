// gpt2_stage.h -- a pipeline stage of GPT-2: maybe the token embedding, a run of blocks, maybe the loss head.
//
// The whole model on one device is one stage with everything. The pipeline executor calls forward, backward_input and
// backward_weight with a slot (activation memory) and a micro-batch number; input(slot) and output(slot) are what
// travels between stages. The stage's recompute level changes what a slot holds and which weight gradients
// backward_input makes, but no bit of any result; a level costs the same slots in a forward-only run. The loss head is
// the tail of the last stage's forward pass:
//   hidden = LN(y), logits = hidden wte^T, losses, d(logits), d(wte.head) += d(logits)^T hidden, d(hidden) = d(logits)
//   wte, d(y) over y
// so that afterwards the last stage looks like any other whose output gradient has arrived. Logits exist for a chunk of
// rows only (kLogitsChunkElements), never for the whole micro-batch: B=4 T=256 V=50304 would be 206 MB. All gradients
// are of the SUM of the losses; they are divided once, after reduction, by the number of targets of the step.
#pragma once

#include <algorithm>
#include <vector>

#include "llmc/classifier.cuh"
#include "llmc/embedding.cuh"
#include "llmc/gpt2_workspace.h"
#include "llmc/gradient_tree.h"

/// What a stage is built from. The referenced objects outlive it.
struct GPT2StageSetup {
  const GPT2Config& config;
  const ParameterTable& table;
  const StageLayout& layout;
  int stage;  // index in layout.stages
  MemoryLedger& ledger;
  Blas& blas;
  GPT2Workspace& workspace;
  GradientTree* gradients;   // of the rank; null: never trained
  const floatX* parameters;  // flat buffer of `layout`
  BatchShape shape;          // largest micro-batch
  int slots;
  int micro_batches;  // most micro-batches of one run: token and loss buffers
  cudaStream_t stream;
};

class GPT2Stage {
 public:
  explicit GPT2Stage(const GPT2StageSetup& setup)
      : s_(setup),
        shape_(setup.shape),
        tokens_("tokens", token_ints() * setup.micro_batches, &setup.ledger),
        staging_(token_ints() * setup.micro_batches),
        losses_("losses", loss_floats(range(), shape_) * setup.micro_batches, &setup.ledger) {
    const int blocks = range().blocks(), recompute = range().recompute;
    const BlockActivations unkept = setup.workspace.unkept(recompute);
    for (int i = 0; i < setup.slots; ++i) {
      memory_.push_back(
          {DeviceArray<floatX>("activations", slot_value_elements(setup.config, blocks, shape_, recompute),
                               &setup.ledger),
           DeviceArray<float>("activations", slot_statistic_elements(setup.config, blocks, shape_, recompute),
                              &setup.ledger)});
      slots_.push_back(carve_slot(memory_.back(), setup.config, blocks, shape_, recompute, unkept));
    }
  }

  /// Device memory for the tokens and losses of one micro-batch: exactly what a stage of that range allocates.
  static size_t token_bytes(const StageRange& range, const BatchShape& shape) {
    return token_ints(range, shape) * sizeof(int) + loss_floats(range, shape) * sizeof(float);
  }

  const StageRange& range() const { return s_.layout.stages[s_.stage]; }
  floatX* input(int slot) { return slots_[slot].input; }
  floatX* output(int slot) { return slots_[slot].output; }
  int slots() const { return static_cast<int>(slots_.size()); }
  size_t boundary_bytes() const { return static_cast<size_t>(shape_.rows()) * s_.config.channels * sizeof(floatX); }

  /// Shape of the micro-batches that follow; at most the one the stage was built for.
  void set_shape(const BatchShape& shape) {
    assert(shape.rows() <= s_.shape.rows());
    shape_ = shape;
  }

  /// Copies the tokens of a micro-batch, (B,T) each, to the device; -1 in `targets` = not counted. The host arrays may
  /// be reused at once; nothing of the previous run may still be in flight.
  void load_tokens(int micro_batch, const int* inputs, const int* targets) {
    assert(micro_batch < s_.micro_batches && "load_tokens: more micro-batches than the stage has buffers for");
    if (token_ints() == 0) return;
    const int rows = shape_.rows();
    int* host = staging_.data() + token_ints() * micro_batch;
    std::copy(inputs, inputs + rows, host);
    std::copy(targets, targets + rows, host + rows);
    if (range().embedding) order_[micro_batch_slot(micro_batch)] = write_order(inputs, rows, host + 2 * rows);
    CUDA_CHECK(cudaMemcpyAsync(device_tokens(micro_batch), host, token_ints() * sizeof(int), cudaMemcpyHostToDevice,
                               s_.stream));
  }

  /// Forward pass of a micro-batch whose input is in the slot (first stage: made here from the tokens). On the last
  /// stage also the losses, and with `train` everything up to d(output).
  void forward(int slot, int micro_batch, bool train) {
    const ActivationSlot& a = slots_[slot];
    if (range().embedding) {
      embedding_forward(a.input, device_tokens(micro_batch), parameter(0), parameter(1), shape_.B, shape_.T,
                        s_.config.channels, s_.stream);
    }
    const floatX* x = a.input;
    for (int l = 0; l < range().blocks(); ++l) {
      block_forward(call(), a.blocks[l], block_parameters(l), x);
      x = a.blocks[l].output;
    }
    if (range().head) loss_head(a.output, micro_batch, train);
  }

  /// output(slot) holds d(output); afterwards input(slot) holds d(input). First stage: adds to the embedding gradients
  /// instead of leaving something to send.
  void backward_input(int slot, int micro_batch) {
    const ActivationSlot& a = slots_[slot];
    float* base = s_.gradients->leaf(s_.stage, GradientPhase::kInputGradient);
    const bool accumulate = s_.gradients->accumulate(s_.stage, GradientPhase::kInputGradient);
    for (int l = range().blocks() - 1; l >= 0; --l) {
      floatX* x = l > 0 ? a.blocks[l - 1].output : a.input;
      block_backward_input(call(), a.blocks[l], block_parameters(l), block_gradients(base, l), x, accumulate);
    }
    if (range().embedding) {
      const int C = s_.config.channels;
      embedding_backward_token(gradient(base, 0), a.input, device_order(micro_batch), s_.config.padded_vocab, C,
                               accumulate, s_.stream);
      embedding_backward_position(gradient(base, 1), a.input, shape_.B, shape_.T, C, s_.config.max_seq_len, accumulate,
                                  s_.stream);
    }
    s_.gradients->finish_leaf(s_.stage, GradientPhase::kInputGradient, s_.stream);
  }

  /// Weight gradients of the matrices that backward_input leaves out, after backward_input of the same slot.
  void backward_weight(int slot, int) {
    const ActivationSlot& a = slots_[slot];
    float* base = s_.gradients->leaf(s_.stage, GradientPhase::kWeightGradient);
    const bool accumulate = s_.gradients->accumulate(s_.stage, GradientPhase::kWeightGradient);
    for (int l = range().blocks() - 1; l >= 0; --l) {
      block_backward_weight(call(), a.blocks[l], block_gradients(base, l), accumulate);
    }
    s_.gradients->finish_leaf(s_.stage, GradientPhase::kWeightGradient, s_.stream);
  }

  /// Per-token losses (B,T) of a micro-batch, device memory of the last stage.
  const float* losses(int micro_batch) const {
    return losses_.data() + static_cast<size_t>(s_.shape.rows()) * micro_batch;
  }

  /// Logits (Vp) of one row of the slot's output, after forward on the last stage; overwrites scratch. Device memory.
  const floatX* row_logits(int slot, int row) {
    const int C = s_.config.channels;
    floatX* hidden = s_.workspace.scratch().wide;
    float* statistics = s_.workspace.statistics();
    const floatX* y = slots_[slot].output + static_cast<size_t>(row) * C;
    layernorm_forward(hidden, statistics, statistics + 1, y, final_weight(), final_bias(), 1, C, s_.stream);
    matmul_forward(s_.blas, s_.workspace.logits(), hidden, head_weight(), nullptr, 1, C, s_.config.padded_vocab,
                   s_.stream);
    return s_.workspace.logits();
  }

 private:
  // inputs, targets, and for the embedding's backward pass positions, segment starts (+1) and segment tokens
  static size_t token_ints(const StageRange& range, const BatchShape& shape) {
    return range.embedding || range.head ? 5 * static_cast<size_t>(shape.rows()) + 1 : 0;
  }
  size_t token_ints() const { return token_ints(range(), s_.shape); }
  static size_t loss_floats(const StageRange& range, const BatchShape& shape) { return range.head ? shape.rows() : 0; }
  int* device_tokens(int micro_batch) { return tokens_.data() + token_ints() * micro_batch; }
  size_t micro_batch_slot(int micro_batch) {
    if (order_.size() <= static_cast<size_t>(micro_batch)) order_.resize(micro_batch + 1);
    return micro_batch;
  }

  static int write_order(const int* inputs, int rows, int* host) {
    const EmbeddingOrder order = embedding_order(inputs, rows);
    std::copy(order.positions.begin(), order.positions.end(), host);
    std::copy(order.segment_starts.begin(), order.segment_starts.end(), host + rows);
    std::copy(order.segment_tokens.begin(), order.segment_tokens.end(), host + 2 * rows + 1);
    return order.segments();
  }
  EmbeddingSegments device_order(int micro_batch) {
    const int rows = shape_.rows();
    const int* base = device_tokens(micro_batch) + 2 * rows;
    return {base, base + rows, base + 2 * rows + 1, order_[micro_batch]};
  }

  BlockCall call() { return {s_.blas, s_.config, shape_, s_.workspace.scratch(), range().recompute, s_.stream}; }
  const floatX* parameter(int tensor) const { return s_.parameters + s_.layout.by_tensor[tensor].begin; }
  float* gradient(float* base, int tensor) const { return base + s_.layout.by_tensor[tensor].begin; }
  const floatX* head_weight() const { return s_.parameters + s_.layout.head_weight.begin; }
  int final_tensor() const { return static_cast<int>(s_.table.tensors.size()) - 2; }
  const floatX* final_weight() const { return parameter(final_tensor()); }
  const floatX* final_bias() const { return parameter(final_tensor() + 1); }

  // Twelve rows of the table per block, after the two embeddings, in the order of BlockTensors.
  template <class T, class Pointer>
  BlockTensors<T> block_tensors(int local_block, Pointer at) const {
    const int first = 2 + 12 * (range().first_block + local_block);
    return {at(first),     at(first + 1), at(first + 2), at(first + 3), at(first + 4),  at(first + 5),
            at(first + 6), at(first + 7), at(first + 8), at(first + 9), at(first + 10), at(first + 11)};
  }
  BlockTensors<const floatX> block_parameters(int local_block) const {
    return block_tensors<const floatX>(local_block, [&](int tensor) { return parameter(tensor); });
  }
  BlockTensors<float> block_gradients(float* base, int local_block) const {
    return block_tensors<float>(local_block, [&](int tensor) { return gradient(base, tensor); });
  }

  void loss_head(floatX* y, int micro_batch, bool train) {
    const int N = shape_.rows(), C = s_.config.channels, V = s_.config.vocab, Vp = s_.config.padded_vocab;
    const BlockScratch scratch = s_.workspace.scratch();
    floatX *hidden = scratch.wide, *d_hidden = scratch.narrow, *logits = s_.workspace.logits();
    float *mean = s_.workspace.statistics(), *rstd = mean + N;
    float* base = train ? s_.gradients->leaf(s_.stage, GradientPhase::kLossHead) : nullptr;
    const bool accumulate = train && s_.gradients->accumulate(s_.stage, GradientPhase::kLossHead);
    layernorm_forward(hidden, mean, rstd, y, final_weight(), final_bias(), N, C, s_.stream);
    const int chunk = logits_chunk_rows(s_.config, N);
    for (int first = 0; first < N; first += chunk) {
      const int rows = std::min(chunk, N - first);
      const floatX* h = hidden + static_cast<size_t>(first) * C;
      matmul_forward(s_.blas, logits, h, head_weight(), nullptr, rows, C, Vp, s_.stream);
      float* losses = losses_.data() + static_cast<size_t>(s_.shape.rows()) * micro_batch + first;
      fused_classifier(losses, logits, device_tokens(micro_batch) + N + first, rows, V, Vp, train, s_.stream);
      if (!train) continue;
      float* d_weight = base + s_.layout.head_gradient.begin;
      matmul_backward_weight(s_.blas, d_weight, logits, h, rows, C, Vp, accumulate || first > 0, s_.stream);
      matmul_backward_input(s_.blas, d_hidden + static_cast<size_t>(first) * C, logits, head_weight(), rows, C, Vp,
                            s_.stream);
    }
    if (!train) return;
    layernorm_backward({y, gradient(base, final_tensor()), gradient(base, final_tensor() + 1), scratch.floats, d_hidden,
                        y, final_weight(), mean, rstd, nullptr, N, C, accumulate},
                       s_.stream);
    s_.gradients->finish_leaf(s_.stage, GradientPhase::kLossHead, s_.stream);
  }

  GPT2StageSetup s_;
  BatchShape shape_;
  DeviceArray<int> tokens_;
  PinnedArray<int> staging_;
  DeviceArray<float> losses_;
  std::vector<int> order_;  // number of distinct tokens of each micro-batch
  std::vector<SlotMemory> memory_;
  std::vector<ActivationSlot> slots_;
};

// test_recompute.cu -- a stage with a recompute level computes what a stage without one computes, bit for bit, in the
// memory that the level promises.
//
// A Rank holds one or two stages of a small GPT-2 and runs micro-batches through them in a given order of actions. What
// would come from other ranks (inputs, output gradients) is random and the same for every level. The reference is level
// 0 with each backward pass in one piece; losses, the gradient of the stage's input and all parameter gradients must
// have its bits.
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "llmc/gpt2_stage.h"
#include "test/kernel_test.h"

namespace {

constexpr int kMicroBatches = kWarpSize == 1 ? 5 : 3;  // faithful warps are slow
const BatchShape kShape = {2, 9};

GPT2Config small_gpt2(int channels = 24) { return make_gpt2_config(4, 3, channels, 61, 12); }

/// What a rank does next with a micro-batch, in all its stages.
struct Action {
  char what;  // F forward, I input gradient, W weight gradient
  int micro_batch;
};
struct Order {
  const char* name;
  std::vector<Action> actions;
};

/// B: both halves of a backward pass at once. Apart: every I before the first W. Mixed: as a zero-bubble schedule.
std::vector<Order> orders() {
  Order together = {"together", {}}, apart = {"apart", {}}, mixed = {"mixed", {}};
  for (int j = 0; j < kMicroBatches; ++j) {
    for (char what : {'F', 'I', 'W'}) together.actions.push_back({what, j});
  }
  for (char what : {'F', 'I', 'W'}) {
    for (int j = 0; j < kMicroBatches; ++j) apart.actions.push_back({what, j});
  }
  for (int time = 0; time < kMicroBatches + 3; ++time) {
    if (time < kMicroBatches) mixed.actions.push_back({'F', time});
    if (time >= 1 && time - 1 < kMicroBatches) mixed.actions.push_back({'I', time - 1});
    if (time >= 3) mixed.actions.push_back({'W', time - 3});
  }
  return {together, apart, mixed};
}

/// Everything that a run leaves behind.
struct Outcome {
  std::vector<float> losses;
  std::vector<float> input_gradients;  // of the first stage's input, all micro-batches
  std::vector<float> gradients;        // the whole buffer
};

double sum_of_squares(const std::vector<float>& values) {
  double sum = 0.0;
  for (float value : values) sum += static_cast<double>(value) * value;
  return sum;
}

class Rank {
 public:
  Rank(const std::vector<StageRange>& ranges, bool exact, int slots = kMicroBatches, int channels = 24)
      : config_(small_gpt2(channels)),
        table_(gpt2_parameter_table(config_)),
        layout_(make_stage_layout(table_, ranges, 1)),
        parameters_("parameters", layout_.parameter_elements, &ledger_) {
    require_device();
    set_kernel_threads(1);  // the sizes are too small for more
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    for (const Bucket& bucket : layout_.buckets) {
      for (const Segment& segment : bucket.segments) {
        if (bucket.has_parameters) set_parameter(segment);
      }
    }
    tree_ = std::make_unique<GradientTree>(ledger_, layout_, kMicroBatches, exact, stream_);
    workspace_ = std::make_unique<GPT2Workspace>(ledger_, config_, kShape, ranges);
    for (int s = 0; s < static_cast<int>(ranges.size()); ++s) {
      stages_.push_back(std::make_unique<GPT2Stage>(GPT2StageSetup{config_, table_, layout_, s, ledger_, blas_,
                                                                   *workspace_, tree_.get(), parameters_.data(), kShape,
                                                                   slots, kMicroBatches, stream_}));
    }
    set_shape(kShape);
  }
  ~Rank() {
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }

  const MemoryLedger& ledger() const { return ledger_; }
  const StageLayout& layout() const { return layout_; }
  const ParameterTable& table() const { return table_; }

  /// Shape of the micro-batches that follow, and their tokens.
  void set_shape(const BatchShape& shape) {
    shape_ = shape;
    for (auto& stage : stages_) stage->set_shape(shape);
    for (int j = 0; j < kMicroBatches; ++j) {
      const std::vector<int> inputs = random_integers(shape.rows(), 100 + j, config_.vocab);
      std::vector<int> targets = random_integers(shape.rows(), 200 + j, config_.vocab);
      targets[j] = -1;
      for (auto& stage : stages_) stage->load_tokens(j, inputs.data(), targets.data());
      CUDA_CHECK(cudaStreamSynchronize(stream_));
    }
  }

  Outcome train(const Order& order) {
    tree_->begin_step(kMicroBatches, stream_);
    Outcome outcome;
    for (const Action& action : order.actions) {
      if (action.what == 'F') forward(action.micro_batch, true);
      if (action.what == 'W') backward_weight(action.micro_batch);
      if (action.what != 'I') continue;
      backward_input(action.micro_batch);
      append(outcome.input_gradients, stages_.front()->input(action.micro_batch), shape_.rows() * config_.channels);
    }
    outcome.losses = losses();
    outcome.gradients = download(tree_->finish(), layout_.gradient_elements, stream_);
    return outcome;
  }

  /// Losses of a forward-only run that reuses one slot.
  std::vector<float> validate() {
    for (int j = 0; j < kMicroBatches; ++j) forward(j, false, 0);
    return losses();
  }

  void forward(int j, bool train) { forward(j, train, j); }
  void backward_input(int j) {
    for (int s = last(); s >= 0; --s) {
      const StageRange& range = stages_[s]->range();
      if (s < last()) copy(stages_[s]->output(j), stages_[s + 1]->input(j));
      if (s == last() && !range.head) fill(stages_[s]->output(j), 400 + j, 0.1);
      stages_[s]->backward_input(j, j);
    }
  }
  void backward_weight(int j) {
    for (int s = last(); s >= 0; --s) stages_[s]->backward_weight(j, j);
  }

  /// Starts a step of one micro-batch with all gradients 0, and reads a gradient of it.
  void begin_single() {
    CUDA_CHECK(cudaMemsetAsync(tree_->leaf(0, GradientPhase::kInputGradient), 0,
                               layout_.gradient_elements * sizeof(float), stream_));
    tree_->begin_step(1, stream_);
  }
  std::vector<float> gradient(int tensor) {
    const Segment& segment = layout_.by_tensor[tensor];
    return download(tree_->leaf(0, GradientPhase::kInputGradient) + segment.begin, segment.elements, stream_);
  }

 private:
  int last() const { return static_cast<int>(stages_.size()) - 1; }

  void forward(int j, bool train, int slot) {
    for (int s = 0; s <= last(); ++s) {
      if (s > 0) copy(stages_[s]->input(slot), stages_[s - 1]->output(slot));
      if (s == 0 && !stages_[s]->range().embedding) fill(stages_[s]->input(slot), 300 + j, 1.0);
      stages_[s]->forward(slot, j, train);
    }
  }

  std::vector<float> losses() {
    std::vector<float> all;
    if (!stages_.back()->range().head) return all;
    for (int j = 0; j < kMicroBatches; ++j) append(all, stages_.back()->losses(j), shape_.rows());
    return all;
  }

  // Nothing is 0 or 1, so that every gradient depends on every array.
  void set_parameter(const Segment& segment) {
    const ParameterTensor& tensor = table_.tensors[segment.tensor];
    const double mean = tensor.init == Initialization::kOnes ? 1.0 : 0.0;
    std::vector<float> values = random_values(segment.elements, 1 + segment.tensor, 0.2, mean);
    std::fill(values.begin() + static_cast<std::ptrdiff_t>(tensor.padding_begin), values.end(), 0.0f);
    upload(parameters_.data() + segment.begin, values);
  }

  void fill(floatX* device, uint64_t seed, double scale) {
    upload(device, random_values(static_cast<size_t>(shape_.rows()) * config_.channels, seed, scale));
  }
  void upload(floatX* device, const std::vector<float>& values) {
    const std::vector<floatX> rounded = convert<floatX>(values);
    copy_to_device(device, rounded.data(), rounded.size(), stream_);
    CUDA_CHECK(cudaStreamSynchronize(stream_));
  }
  void copy(floatX* to, const floatX* from) {
    const size_t bytes = static_cast<size_t>(shape_.rows()) * config_.channels * sizeof(floatX);
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_));
  }
  template <class T>
  void append(std::vector<float>& all, const T* device, size_t count) {
    const std::vector<float> values = convert<float>(download(device, count, stream_));
    all.insert(all.end(), values.begin(), values.end());
  }

  cudaStream_t stream_ = nullptr;
  GPT2Config config_;
  ParameterTable table_;
  StageLayout layout_;
  MemoryLedger ledger_;
  Blas blas_;
  DeviceArray<floatX> parameters_;
  std::unique_ptr<GradientTree> tree_;
  std::unique_ptr<GPT2Workspace> workspace_;
  std::vector<std::unique_ptr<GPT2Stage>> stages_;
  BatchShape shape_;
};

struct Kind {
  const char* name;
  StageRange range;
};
const Kind kKinds[] = {{"first", {0, 3, true, false, 0}},
                       {"middle", {1, 3, false, false, 0}},
                       {"last", {1, 4, false, true, 0}},
                       {"whole model", {0, 4, true, true, 0}},
                       {"last without blocks", {4, 4, false, true, 0}}};

StageRange with_level(StageRange range, int level) {
  range.recompute = level;
  return range;
}

void expect_same(const Outcome& reference, const Outcome& other, const std::string& what) {
  EXPECT_TRUE(same_bits(reference.losses, other.losses)) << what << ": losses";
  EXPECT_TRUE(same_bits(reference.input_gradients, other.input_gradients)) << what << ": input gradients";
  ASSERT_EQ(reference.gradients.size(), other.gradients.size()) << what;
  EXPECT_TRUE(same_bits(reference.gradients, other.gradients)) << what << ": parameter gradients";
}

// The reference is worth comparing with: finite and not zero.
void expect_sound(const Outcome& reference, const StageRange& last) {
  for (const std::vector<float>* values : {&reference.input_gradients, &reference.gradients}) {
    EXPECT_TRUE(std::isfinite(sum_of_squares(*values)) && sum_of_squares(*values) > 0.0);
  }
  EXPECT_EQ(reference.losses.empty(), !last.head);
  EXPECT_TRUE(std::isfinite(sum_of_squares(reference.losses)));
}

class Recompute : public testing::TestWithParam<bool> {};  // parameter: exact tree, or one accumulator

// Every level, kind of stage and order of the two halves of the backward pass: same losses, input gradients, gradients.
TEST_P(Recompute, every_level_has_the_bits_of_level_0) {
  for (const Kind& kind : kKinds) {
    const Outcome reference = Rank({kind.range}, GetParam()).train(orders()[0]);
    expect_sound(reference, kind.range);
    for (int level = 0; level <= 3; ++level) {
      Rank rank({with_level(kind.range, level)}, GetParam());
      for (const Order& order : orders()) {
        expect_same(reference, rank.train(order),
                    std::string(kind.name) + " level " + std::to_string(level) + " " + order.name);
      }
    }
  }
}

// Two stages with different levels share one rank's workspace and gradient buffers.
TEST_P(Recompute, two_levels_on_one_rank) {
  const StageRange first = {0, 2, true, false, 0}, second = {2, 4, false, true, 0};
  const Outcome reference = Rank({first, second}, GetParam()).train(orders()[0]);
  expect_sound(reference, second);
  const std::pair<int, int> levels[] = {{0, 3}, {3, 2}, {1, 3}, {2, 1}, {3, 3}};
  for (const auto& [a, b] : levels) {
    Rank rank({with_level(first, a), with_level(second, b)}, GetParam());
    for (const Order& order : orders()) {
      expect_same(reference, rank.train(order),
                  "levels " + std::to_string(a) + " " + std::to_string(b) + " " + order.name);
    }
  }
}

// ln2 is made first by the kernel with the residual addition, and again by the one without: the same bits.
TEST(RecomputeLayernorm, both_kernels_agree) {
  TestStream stream;
  const int N = 5;
  for (const int C : {1, 7, 51, 257, 768, 1600}) {
    const auto operand = [&](int seed) { return convert<floatX>(random_values(static_cast<size_t>(N) * C, seed)); };
    TestArray<floatX> a(stream, operand(1)), b(stream, operand(2)), weight(stream, operand(3)),
        bias(stream, operand(4));
    TestArray<floatX> residual(stream, N * C), first(stream, N * C), again(stream, N * C);
    TestArray<float> statistics(stream, 2 * N), statistics_again(stream, 2 * N);
    residual_layernorm_forward(residual.data(), first.data(), statistics.data(), statistics.data() + N, a.data(),
                               b.data(), weight.data(), bias.data(), N, C, stream);
    layernorm_forward(again.data(), statistics_again.data(), statistics_again.data() + N, residual.data(),
                      weight.data(), bias.data(), N, C, stream);
    EXPECT_TRUE(same_bits(first.read(), again.read())) << "C " << C;
    EXPECT_TRUE(same_bits(statistics.read(), statistics_again.read())) << "C " << C;
  }
}

// The same in a block, for rows that are no whole number of vectors.
TEST_P(Recompute, odd_number_of_channels) {
  const StageRange range = {0, 2, true, false, 0};
  const Outcome reference = Rank({range}, GetParam(), kMicroBatches, 51).train(orders()[0]);
  for (int level = 1; level <= 3; ++level) {
    expect_same(reference, Rank({with_level(range, level)}, GetParam(), kMicroBatches, 51).train(orders()[1]),
                "51 channels, level " + std::to_string(level));
  }
}

INSTANTIATE_TEST_SUITE_P(Tree, Recompute, testing::Bool(),
                         [](const auto& info) { return info.param ? "exact" : "one_buffer"; });

// A forward-only run, with one slot and afterwards with smaller micro-batches, gives the losses of level 0.
TEST(RecomputeValidation, losses) {
  const StageRange whole = {0, 4, true, true, 0};
  Rank plain({whole}, true);
  const std::vector<float> losses = plain.validate();
  plain.set_shape({1, 5});
  const std::vector<float> small_losses = plain.validate();
  EXPECT_EQ(small_losses.size(), 5u * kMicroBatches);
  for (int level = 1; level <= 3; ++level) {
    Rank rank({with_level(whole, level)}, true, 1);
    EXPECT_TRUE(same_bits(losses, rank.validate())) << "level " << level;
    rank.set_shape({1, 5});
    EXPECT_TRUE(same_bits(small_losses, rank.validate())) << "level " << level << ", small";
  }
}

// Which half of the backward pass makes a matrix's gradient: as stated for each level, and as the layout says.
TEST(RecomputePhases, each_gradient_is_made_in_the_phase_of_the_layout) {
  const std::vector<std::string> weight_phase[] = {
      {"h.1.attn.qkv.weight", "h.1.attn.proj.weight", "h.1.mlp.fc.weight", "h.1.mlp.proj.weight"},
      {"h.1.attn.qkv.weight", "h.1.attn.proj.weight", "h.1.mlp.fc.weight"},
      {"h.1.attn.proj.weight"},
      {}};
  for (int level = 0; level <= 3; ++level) {
    Rank rank({{1, 2, false, false, level}}, true);
    rank.begin_single();
    rank.forward(0, true);
    rank.backward_input(0);
    std::vector<std::string> left;
    for (const bool after : {false, true}) {
      if (after) rank.backward_weight(0);
      for (int t = gpt2_block_tensor(1, 0); t < gpt2_block_tensor(2, 0); ++t) {
        const bool zero = sum_of_squares(rank.gradient(t)) == 0.0;
        const bool late = rank.layout().by_tensor[t].phase == GradientPhase::kWeightGradient;
        EXPECT_EQ(zero, late && !after) << "level " << level << " " << rank.table().tensors[t].name;
        if (zero && !after) left.push_back(rank.table().tensors[t].name);
      }
    }
    EXPECT_EQ(left, weight_phase[level]) << "level " << level;
  }
}

// Slots and workspace take what the header states, and the forecast is what is allocated.
TEST(RecomputeMemory, slots_and_workspace) {
  const GPT2Config config = small_gpt2();
  const size_t rows = kShape.rows(), C = config.channels, blocks = 3, slots = 2;
  const size_t width[] = {16, 12, 10, 1}, statistics[] = {4 + 3, 4 + 3, 4 + 3, 0};
  for (int level = 0; level <= 3; ++level) {
    const std::vector<StageRange> ranges = {{0, 3, true, false, level}};
    const Rank rank(ranges, true, slots);
    const size_t slot =
        rows * C * (1 + blocks * width[level]) * sizeof(floatX) + rows * blocks * statistics[level] * sizeof(float);
    EXPECT_EQ(slot_bytes(config, blocks, kShape, level), slot) << "level " << level;
    EXPECT_EQ(rank.ledger().allocated("activations"), slots * slot) << "level " << level;
    const size_t block = level < 3 ? 0 : rows * (15 * C * sizeof(floatX) + 7 * sizeof(float));
    EXPECT_EQ(rank.ledger().allocated("recomputed block"), block) << "level " << level;
    EXPECT_EQ(GPT2Workspace::bytes(config, kShape, ranges), rank.ledger().allocated("scratch") + block);
    EXPECT_EQ(GPT2Stage::token_bytes(ranges[0], kShape) * kMicroBatches, rank.ledger().allocated("tokens"));
  }
}

// One block is shared however many stages of level 3 the rank has, and the loss head's part is counted once.
TEST(RecomputeMemory, workspace_of_two_stages) {
  const GPT2Config config = small_gpt2();
  const std::vector<StageRange> ranges = {{0, 2, true, false, 3}, {2, 4, false, true, 3}};
  const Rank rank(ranges, true, 1);
  const MemoryLedger& ledger = rank.ledger();
  const size_t block = kShape.rows() * (15 * config.channels * sizeof(floatX) + 7 * sizeof(float));
  EXPECT_EQ(ledger.allocated("recomputed block"), block);
  EXPECT_EQ(GPT2Workspace::bytes(config, kShape, ranges),
            ledger.allocated("scratch") + ledger.allocated("logits") + block);
  size_t tokens = 0;
  for (const StageRange& range : ranges) tokens += GPT2Stage::token_bytes(range, kShape) * kMicroBatches;
  EXPECT_EQ(tokens, ledger.allocated("tokens") + ledger.allocated("losses"));
}

}  // namespace

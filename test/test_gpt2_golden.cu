// test_gpt2_golden.cu -- the whole model against PyTorch in float64 (test/golden, made by
// dev/reference/gpt2_golden.py): logits, losses, every gradient, and ten AdamW steps with clipping, weight decay and
// two micro-batches a step.
//
// fp32: losses within 1e-5, logits and gradients within 1e-5 relative (Euclidean norm).
// bf16: within 2 x the error that rounding every stored activation to bf16 makes by itself, which the golden file
// states.
#include <cmath>

#include <gtest/gtest.h>

#include "llmc/llmc_file.h"
#include "llmc/parallel_gpt2.h"
#include "llmc/start_device.h"
#include "test/golden_file.h"

namespace {

constexpr bool kBf16 = sizeof(floatX) != sizeof(float);

std::string golden_path(const char* end) {
  return std::string("test/golden/gpt2_tiny_") + (kBf16 ? "bf16" : "fp32") + end;
}

double relative_error(const std::vector<float>& mine, const std::vector<float>& exact) {
  double difference = 0.0, size = 0.0;
  for (size_t i = 0; i < exact.size(); ++i) {
    difference += (static_cast<double>(mine[i]) - exact[i]) * (static_cast<double>(mine[i]) - exact[i]);
    size += static_cast<double>(exact[i]) * exact[i];
  }
  return std::sqrt(difference / size);
}

/// One process, one stage with everything: the pieces of the model without pipeline, communication and trainer.
class Golden : public testing::Test {
 protected:
  Golden()
      : control_(start()),
        device_(control_),
        golden_(golden_path(".golden")),
        file_(LlmcModelFile::open(golden_path(".bin"))),
        config_(file_.config()),
        table_(gpt2_parameter_table(config_)),
        shape_{golden_.ints("batch")[0], golden_.ints("batch")[1]},
        layout_(make_stage_layout(table_, {{0, config_.layers, true, true, 0}}, 1)),
        optimizer_(ledger_, table_, layout_, 0, nullptr, device_.compute()),
        gradients_(ledger_, layout_, 1, true, device_.compute()),
        workspace_(ledger_, config_, shape_, layout_.stages),
        stage_({config_, table_, layout_, 0, ledger_, device_.blas(), workspace_, &gradients_, optimizer_.parameters(),
                shape_, 1, 1, device_.compute()}) {
    optimizer_.set_parameters(reader(), 1, 0);
  }

  // MPI starts once per process.
  static Control start() {
    static Control control(nullptr, nullptr);
    return control;
  }
  std::function<void(const OwnedRange&, float*)> reader() {
    return [this](const OwnedRange& range, float* out) { file_.read(out, range.tensor, range.first, range.count); };
  }

  // Forward and backward of the micro-batch PREFIX.inputs, PREFIX.targets.
  void run(const std::string& prefix, bool train) {
    stage_.load_tokens(0, golden_.ints(prefix + ".inputs").data(), golden_.ints(prefix + ".targets").data());
    gradients_.begin_step(1, device_.compute());
    stage_.forward(0, 0, train);
    if (!train) return;
    stage_.backward_input(0, 0);
    stage_.backward_weight(0, 0);
  }

  std::vector<float> losses() {
    std::vector<float> values(shape_.rows());
    device_.copy_to_host(values.data(), stage_.losses(0), values.size() * sizeof(float));
    return values;
  }

  // Gradient of the mean loss with respect to one tensor; of wte the two parts together.
  std::vector<float> gradient(const std::string& name, double targets) {
    const int tensor = find_tensor(table_, name);
    std::vector<float> values = read_gradient(layout_.by_tensor[tensor]);
    if (tensor == 0) {
      const std::vector<float> head = read_gradient(layout_.head_gradient);
      for (size_t i = 0; i < values.size(); ++i) values[i] += head[i];
    }
    for (float& value : values) value = static_cast<float>(value / targets);
    return values;
  }
  std::vector<float> read_gradient(const Segment& segment) {
    std::vector<float> values(segment.elements);
    device_.copy_to_host(values.data(), gradients_.finish() + segment.begin, values.size() * sizeof(float));
    return values;
  }

  double limit(const std::string& what, double fp32) {
    return kBf16 ? 2.0 * golden_.number("rounding_error." + what) : fp32;
  }

  // Limit of the relative error of the whole gradient, from those of its tensors. It also bounds the error of the norm
  // (triangle inequality). The golden file's own figure for the norm of one step is a single draw of a scalar that may
  // come out near zero.
  double gradient_limit() {
    double error = 0.0, size = 0.0;
    for (const ParameterTensor& tensor : table_.tensors) {
      double squares = 0.0;
      for (float value : golden_.floats("single.gradient." + tensor.name))
        squares += static_cast<double>(value) * value;
      const double relative = limit("gradient." + tensor.name, 1e-5);
      error += relative * relative * squares;
      size += squares;
    }
    return std::sqrt(error / size);
  }

  void expect_gradients(const std::string& prefix) {
    run(prefix, true);
    const double targets = golden_.integer(prefix + ".target_count");
    for (const ParameterTensor& tensor : table_.tensors) {
      const double error =
          relative_error(gradient(tensor.name, targets), golden_.floats(prefix + ".gradient." + tensor.name));
      EXPECT_LE(error, limit("gradient." + tensor.name, 1e-5)) << prefix << " " << tensor.name;
    }
  }

  Control control_;
  Device device_;
  GoldenFile golden_;
  LlmcModelFile file_;
  GPT2Config config_;
  ParameterTable table_;
  BatchShape shape_;
  MemoryLedger ledger_;
  StageLayout layout_;
  StageOptimizer optimizer_;
  GradientTree gradients_;
  GPT2Workspace workspace_;
  GPT2Stage stage_;
};

// Logits of every position, through the path that sampling uses.
TEST_F(Golden, logits) {
  run("single", false);
  const int V = config_.vocab;
  std::vector<float> logits;
  std::vector<floatX> row(V);
  for (int i = 0; i < shape_.rows(); ++i) {
    device_.copy_to_host(row.data(), stage_.row_logits(0, i), V * sizeof(floatX));
    for (floatX value : row) logits.push_back(static_cast<float>(value));
  }
  EXPECT_LE(relative_error(logits, golden_.floats("single.logits")), limit("logits", 1e-5));
}

// Losses per token: the training and the validation variant of the classifier give the same bits, and both are right.
TEST_F(Golden, losses) {
  run("single", false);
  const std::vector<float> validation = losses();
  run("single", true);
  EXPECT_EQ(validation, losses());
  std::vector<float> exact;
  for (double loss : golden_.doubles("single.losses")) exact.push_back(static_cast<float>(loss));
  EXPECT_LE(relative_error(validation, exact), limit("losses", 1e-5));
}

// Every gradient of every tensor.
TEST_F(Golden, gradients) { expect_gradients("single"); }

// Targets of -1 count for nothing.
TEST_F(Golden, gradients_with_ignored_targets) {
  if (!golden_.has("masked.inputs")) GTEST_SKIP() << "the bf16 file has no masked batch";
  expect_gradients("masked");
}

// Ten steps of the training that users run: loss and norm of each, and the parameters at the end.
TEST_F(Golden, ten_adamw_steps) {
  ParallelSettings settings;
  settings.model = config_;
  settings.shape = shape_;
  settings.micro_batches = 2;
  settings.layout = one_stage_layout(gpt2_model_cost(config_, shape_.B, shape_.T));
  ParallelGPT2 model(settings, Grid{}, control_, nullptr, device_.blas(), device_.compute());
  model.set_parameters(reader(), 1);
  const std::vector<int> inputs = golden_.ints("train.inputs"), targets = golden_.ints("train.targets");
  const std::vector<double> losses = golden_.doubles("train.losses"), norms = golden_.doubles("train.gradient_norms");
  const auto number = [&](const char* name) {
    return static_cast<float>(golden_.number(std::string("train.") + name));
  };
  const size_t per_step = 2 * shape_.rows();
  for (size_t step = 0; step < losses.size(); ++step) {
    TokenBatch batch;
    batch.micro_batches = 2;
    batch.inputs.assign(&inputs[step * per_step], &inputs[step * per_step] + per_step);
    batch.targets.assign(&targets[step * per_step], &targets[step * per_step] + per_step);
    const AdamW adamw{number("learning_rate"),
                      number("beta1"),
                      number("beta2"),
                      number("epsilon"),
                      number("weight_decay"),
                      static_cast<int>(step) + 1,
                      0.0f,
                      1};
    const StepResult result = model.train_step(batch, adamw, golden_.number("train.clip"));
    const double loss_limit = kBf16 ? 2.0 * golden_.doubles("rounding_error.train.losses")[step] : 1e-5;
    const double drift = kBf16 ? 2.0 * golden_.doubles("rounding_error.train.gradient_norms")[step] : 0.0;
    const double norm_limit = kBf16 ? gradient_limit() + drift : 1e-5;
    EXPECT_NEAR(result.loss, losses[step], loss_limit) << "step " << step;
    EXPECT_NEAR(result.norm, norms[step], norm_limit * norms[step]) << "step " << step;
  }
  if (!golden_.has("train.final.wte.weight")) return;
  for (const OwnedRange& range : model.optimizer().updated()) {
    const std::string& name = table_.tensors[range.tensor].name;
    std::vector<float> mine(range.count), exact = golden_.floats("train.final." + name);
    device_.copy_to_host(mine.data(), model.optimizer().master(range), range.count * sizeof(float));
    if (name.find("attn.qkv.bias") != std::string::npos) {
      // softmax does not see a shift of the keys: their bias has a gradient of rounding noise, which AdamW normalises
      for (int i = config_.channels; i < 2 * config_.channels; ++i) mine[i] = exact[i] = 0.0f;
    }
    EXPECT_LE(relative_error(mine, exact), 1e-5) << name;
  }
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}

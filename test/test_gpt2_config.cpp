// test_gpt2_config.cpp -- sizes, presets, parameter table and initial values of GPT-2.
#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <string>
#include <vector>

#include "llmc/gpt2_config.h"

static std::string message_of(int layers, int heads, int channels, int vocab, int positions) {
  try {
    make_gpt2_config(layers, heads, channels, vocab, positions);
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), 2);
    return error.what();
  }
  return "";
}

static std::vector<float> values(const ParameterTable& table, int tensor, uint64_t seed, size_t first, size_t count) {
  std::vector<float> out(count, NAN);
  initial_values(out.data(), table.tensors[tensor], tensor, seed, first, count);
  return out;
}

// The four published models have the published numbers of parameters (OpenAI's, without the padding rows).
TEST(GPT2Config, PublishedParameterCounts) {
  const struct {
    const char* name;
    int64_t parameters;
  } published[] = {{"124M", 124439808}, {"350M", 354823168}, {"774M", 774030080}, {"1558M", 1557611200}};
  for (const auto& model : published) {
    const GPT2Config config = *gpt2_preset(model.name);
    const int64_t padding = int64_t{config.padded_vocab - config.vocab} * config.channels;
    EXPECT_EQ(gpt2_parameter_count(config) - padding, model.parameters) << model.name;
    EXPECT_EQ(static_cast<int64_t>(gpt2_parameter_table(config).total), gpt2_parameter_count(config)) << model.name;
  }
  EXPECT_EQ(gpt2_parameter_count(*gpt2_preset("124M")), 124475904);  // as llm.c prints it
}

// Every depth of llm.c has its sizes, under each spelling; other names are no presets.
TEST(GPT2Config, Presets) {
  const int sizes[][3] = {{6, 384, 6},    {12, 768, 12},  {24, 1024, 16}, {36, 1280, 20},
                          {48, 1600, 25}, {60, 1920, 30}, {72, 2880, 30}, {84, 3456, 36}};
  for (const auto& size : sizes) {
    for (const std::string prefix : {"d", "gpt2:d"}) {
      const auto config = gpt2_preset(prefix + std::to_string(size[0]));
      ASSERT_TRUE(config.has_value()) << prefix << size[0];
      EXPECT_EQ(config->layers, size[0]);
      EXPECT_EQ(config->channels, size[1]);
      EXPECT_EQ(config->heads, size[2]);
      EXPECT_EQ(config->vocab, 50257);
      EXPECT_EQ(config->padded_vocab, 50304);
      EXPECT_EQ(config->max_seq_len, 1024);
    }
  }
  EXPECT_EQ(gpt2_preset("gpt2-1558M")->layers, 48);
  for (const char* name : {"", "d", "d7", "d012", "d12 ", "124m", "gpt2-", "gpt2:d", "gpt2_124M.bin", "1558"}) {
    EXPECT_FALSE(gpt2_preset(name).has_value()) << name;
  }
}

// A request that makes no model is refused with the value and a remedy, and the limits themselves are accepted.
TEST(GPT2Config, RefusesInWords) {
  EXPECT_EQ(message_of(4, 6, 64, 256, 128),
            "model: 6 heads do not divide 64 channels; use for example 4 heads or 66 channels");
  EXPECT_EQ(message_of(0, 4, 64, 256, 128), "model: layers 0 is outside 1..4096");
  EXPECT_EQ(message_of(-3, 4, 64, 256, 128), "model: layers -3 is outside 1..4096");
  EXPECT_EQ(message_of(4, 0, 64, 256, 128), "model: heads 0 is outside 1..65536");
  EXPECT_EQ(message_of(4, 4, 0, 256, 128), "model: channels 0 is outside 1..65536");
  EXPECT_EQ(message_of(4, 4, 64, 65537, 128), "model: vocabulary 65537 is outside 1..65536");
  EXPECT_EQ(message_of(4, 4, 64, 2147483647, 128), "model: vocabulary 2147483647 is outside 1..65536");
  EXPECT_EQ(message_of(4, 4, 64, 256, 0), "model: longest sequence 0 is outside 1..16777216");
  EXPECT_EQ(message_of(1, 1, 1, 1, 1), "");
  EXPECT_EQ(message_of(4096, 65536, 65536, 65536, 1 << 24), "");
  EXPECT_EQ(message_of(4, 64, 32, 256, 128),
            "model: 64 heads do not divide 32 channels; use for example 32 heads or 64 channels");
}

// The vocabulary is padded to a multiple of 128, never by a whole multiple too much.
TEST(GPT2Config, PaddedVocabulary) {
  const int expected[][2] = {{1, 128}, {128, 128}, {129, 256}, {256, 256}, {50257, 50304}, {65536, 65536}};
  for (const auto& pair : expected) EXPECT_EQ(make_gpt2_config(1, 1, 8, pair[0], 8).padded_vocab, pair[1]);
}

// Canonical order, names, shapes, blocks and decay of all 4 + 12 L tensors; offsets are contiguous.
TEST(GPT2Config, TableInCanonicalOrder) {
  const GPT2Config config = make_gpt2_config(2, 3, 48, 97, 40);
  const ParameterTable table = gpt2_parameter_table(config);
  using Shape = std::vector<int64_t>;
  std::vector<std::pair<std::string, Shape>> expected = {{"wte.weight", {128, 48}}, {"wpe.weight", {40, 48}}};
  for (const std::string h : {"h.0.", "h.1."}) {
    for (const auto& tensor : std::vector<std::pair<std::string, Shape>>{{"ln_1.weight", {48}},
                                                                         {"ln_1.bias", {48}},
                                                                         {"attn.qkv.weight", {144, 48}},
                                                                         {"attn.qkv.bias", {144}},
                                                                         {"attn.proj.weight", {48, 48}},
                                                                         {"attn.proj.bias", {48}},
                                                                         {"ln_2.weight", {48}},
                                                                         {"ln_2.bias", {48}},
                                                                         {"mlp.fc.weight", {192, 48}},
                                                                         {"mlp.fc.bias", {192}},
                                                                         {"mlp.proj.weight", {48, 192}},
                                                                         {"mlp.proj.bias", {48}}}) {
      expected.push_back({h + tensor.first, tensor.second});
    }
  }
  expected.push_back({"ln_f.weight", {48}});
  expected.push_back({"ln_f.bias", {48}});
  ASSERT_EQ(table.tensors.size(), expected.size());
  size_t end = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const ParameterTensor& tensor = table.tensors[i];
    EXPECT_EQ(tensor.name, expected[i].first);
    EXPECT_EQ(tensor.shape, expected[i].second) << tensor.name;
    EXPECT_EQ(tensor.offset, end) << tensor.name;
    EXPECT_EQ(tensor.weight_decay, tensor.shape.size() == 2) << tensor.name;
    EXPECT_EQ(tensor.block, i < 2 ? -1 : static_cast<int>((i - 2) / kGpt2BlockTensors)) << tensor.name;
    EXPECT_EQ(tensor.padding_begin, i == 0 ? size_t{97 * 48} : tensor.elements) << tensor.name;
    EXPECT_EQ(find_tensor(table, tensor.name), static_cast<int>(i));
    end += tensor.elements;
  }
  EXPECT_EQ(table.total, end);
  EXPECT_EQ(find_tensor(table, "h.2.ln_1.weight"), -1);
  EXPECT_EQ(table.tensors[gpt2_block_tensor(1, 2)].name, "h.1.attn.qkv.weight");
}

// Mean and standard deviation of every matrix are those of GPT-2 (5 sigma), layernorm weights are 1, biases and padding
// 0.
TEST(GPT2Config, InitialDistribution) {
  const GPT2Config config = make_gpt2_config(3, 4, 64, 300, 128);
  const ParameterTable table = gpt2_parameter_table(config);
  for (int i = 0; i < static_cast<int>(table.tensors.size()); ++i) {
    const ParameterTensor& tensor = table.tensors[i];
    const std::vector<float> all = values(table, i, 42, 0, tensor.elements);
    const bool projection = tensor.name.find("proj.weight") != std::string::npos;
    const double std = 0.02 / (projection ? std::sqrt(6.0) : 1.0);
    const size_t used = i == 0 ? size_t{300 * 64} : tensor.elements;
    if (tensor.shape.size() == 1) {
      const float expected = tensor.name.find("ln_") != std::string::npos && tensor.name.back() == 't' ? 1.0f : 0.0f;
      for (float value : all) ASSERT_EQ(value, expected) << tensor.name;
      continue;
    }
    double sum = 0.0, squares = 0.0;
    for (size_t k = 0; k < used; ++k) {
      sum += all[k];
      squares += double{all[k]} * all[k];
    }
    const double n = static_cast<double>(used);
    EXPECT_LT(std::fabs(sum / n), 5.0 * std / std::sqrt(n)) << tensor.name;
    EXPECT_LT(std::fabs(std::sqrt(squares / n) / std - 1.0), 5.0 / std::sqrt(2.0 * n)) << tensor.name;
    for (size_t k = used; k < all.size(); ++k) ASSERT_EQ(all[k], 0.0f) << tensor.name << " padding " << k;
  }
}

// Any range, made by itself, has the bits of the same range of the whole tensor: ranks need nothing but their own part.
TEST(GPT2Config, AnyRangeByItself) {
  const ParameterTable table = gpt2_parameter_table(make_gpt2_config(2, 4, 64, 97, 128));
  for (int tensor : {0, 1, 2, 4, 5, 13}) {
    const size_t n = table.tensors[tensor].elements;
    const std::vector<float> all = values(table, tensor, 7, 0, n);
    for (size_t first = 0; first < n; first += 1 + n / 7) {
      const size_t count = std::min(n - first, n / 5 + 3);
      const std::vector<float> part = values(table, tensor, 7, first, count);
      for (size_t k = 0; k < count; ++k) ASSERT_EQ(part[k], all[first + k]) << tensor << " " << first + k;
    }
    EXPECT_TRUE(values(table, tensor, 7, n, 0).empty());
  }
}

// Seed, tensor and element are all in the key: no two tensors or seeds share values, and a value seldom comes twice.
TEST(GPT2Config, KeyedBySeedTensorAndElement) {
  const ParameterTable table = gpt2_parameter_table(make_gpt2_config(2, 4, 64, 256, 64));
  const int same_shape[] = {gpt2_block_tensor(0, 2), gpt2_block_tensor(1, 2)};
  std::set<float> seen;
  size_t drawn = 0;
  for (uint64_t seed : {1ull, 2ull, 1ull << 32}) {
    for (int tensor : same_shape) {
      for (float value : values(table, tensor, seed, 0, 1000)) seen.insert(value);
      drawn += 1000;
    }
  }
  EXPECT_GT(seen.size(), drawn - 30);  // floats of this size repeat now and then by chance
  EXPECT_EQ(values(table, 0, 5, 0, 100), values(table, 0, 5, 0, 100));
}

// FLOPs per token are llm.c's.
TEST(GPT2Config, FlopsPerToken) {
  EXPECT_DOUBLE_EQ(gpt2_flops_per_token(*gpt2_preset("124M"), 1024), 6.0 * 124475904 + 6.0 * 12 * 768 * 1024);
}

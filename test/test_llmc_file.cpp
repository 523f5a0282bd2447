// test_llmc_file.cpp -- model files of llm.c: places, values, ranges, and what is said about files that are no model.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "llmc/llmc_file.h"
#include "test/golden_file.h"

// A folder of its own for each test, removed with everything in it.
class LlmcFile : public ::testing::Test {
 protected:
  LlmcFile() {
    char name[] = "/tmp/llmc_file_XXXXXX";
    folder_ = mkdtemp(name);
  }
  ~LlmcFile() override {
    for (const std::string& name : list_folder(folder_)) unlink((folder_ + "/" + name).c_str());
    rmdir(folder_.c_str());
  }
  std::string path(const std::string& name) const { return folder_ + "/" + name; }
  std::string write_bytes(const std::string& name, const std::string& content) const {
    File file = File::create(path(name));
    file.write_all(content);
    file.close();
    return path(name);
  }
  std::string folder_;
};

static const GPT2Config kSmall{3, 4, 48, 97, 128, 40};

// A value that says where it belongs, exact in bf16: a small integer times a power of two.
static float value_at(int tensor, size_t element) {
  return std::ldexp(static_cast<float>((element * 31 + static_cast<size_t>(tensor) * 7) % 255) - 127.0f, tensor % 8);
}

static std::vector<float> tensor_values(const ParameterTable& table, int tensor) {
  std::vector<float> values(table.tensors[tensor].elements);
  for (size_t i = 0; i < values.size(); ++i) values[i] = value_at(tensor, i);
  return values;
}

static void write_model(const std::string& path, const GPT2Config& config, LlmcPrecision precision) {
  LlmcModelWriter writer = LlmcModelWriter::create(path, config, precision);
  const ParameterTable& table = writer.layout().table();
  for (int i = 0; i < static_cast<int>(table.tensors.size()); ++i) {
    const std::vector<float> values = tensor_values(table, i);
    writer.write(values.data(), i, 0, values.size());
  }
  writer.commit();
}

static std::string message_of(const std::function<void()>& body, int exit_code) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), exit_code) << error.what();
    return error.what();
  }
  return "no error";
}
static std::string open_message(const std::string& path) {
  return message_of([&] { LlmcModelFile::open(path); }, 2);
}
static void expect_contains(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) EXPECT_NE(text.find(part), std::string::npos) << text << "\n lacks: " << part;
}

static std::string header_bytes(std::vector<int32_t> header) {
  header.resize(kLlmcHeaderInts);
  return std::string(reinterpret_cast<const char*>(header.data()), kLlmcHeaderBytes);
}

// The header and the order of the 16 arrays are llm.c's: checked against places worked out by hand from its
// documentation.
TEST_F(LlmcFile, PlacesAreThoseOfLlmc) {
  const uint64_t C = 48, L = 3;
  const LlmcModelLayout layout(kSmall, LlmcPrecision::kFloat32);
  const uint64_t arrays[] = {128 * C, 40 * C, L * C,         L * C,     L * 3 * C * C, L * 3 * C, L * C * C, L * C,
                             L * C,   L * C,  L * 4 * C * C, L * 4 * C, L * 4 * C * C, L * C,     C,         C};
  uint64_t begin = 1024;
  for (int array = 0; array < 16; ++array) {
    const int layers = array >= 2 && array < 14 ? 3 : 1;
    for (int layer = 0; layer < layers; ++layer) {
      const int tensor = array < 2 ? array : array < 14 ? gpt2_block_tensor(layer, array - 2) : 38 + array - 14;
      EXPECT_EQ(layout.offset(tensor), begin + arrays[array] / layers * layer * 4) << array << " layer " << layer;
    }
    begin += arrays[array] * 4;
  }
  EXPECT_EQ(layout.file_bytes(), begin);
  EXPECT_EQ(LlmcModelLayout(kSmall, LlmcPrecision::kBfloat16).file_bytes(), 1024 + (begin - 1024) / 2);

  write_model(path("model.bin"), kSmall, LlmcPrecision::kBfloat16);
  const std::string content = read_whole_file(path("model.bin"), "model");
  EXPECT_EQ(content.substr(0, 1024), header_bytes({20240326, 5, 40, 97, 3, 4, 48, 128}));
}

// Offsets of the largest presets are 64 bits wide.
TEST_F(LlmcFile, OffsetsBeyondFourGigabytes) {
  const GPT2Config config = *gpt2_preset("d84");
  const LlmcModelLayout layout(config, LlmcPrecision::kFloat32);
  const int last = static_cast<int>(layout.table().tensors.size()) - 1;
  const uint64_t C = 3456;
  EXPECT_EQ(layout.offset(last, C - 1), layout.file_bytes() - 4);
  EXPECT_EQ(layout.file_bytes(), 1024 + 4 * static_cast<uint64_t>(gpt2_parameter_count(config)));
  EXPECT_GT(layout.file_bytes(), uint64_t{45} << 30);
}

// What is written comes back, whole tensors and odd ranges, in both precisions; the temporary file is gone.
TEST_F(LlmcFile, RoundTripAnyRange) {
  for (LlmcPrecision precision : {LlmcPrecision::kFloat32, LlmcPrecision::kBfloat16}) {
    write_model(path("model.bin"), kSmall, precision);
    EXPECT_EQ(list_folder(folder_), std::vector<std::string>{"model.bin"});
    const LlmcModelFile file = LlmcModelFile::open(path("model.bin"));
    EXPECT_EQ(file.precision(), precision);
    EXPECT_EQ(file.config().layers, 3);
    EXPECT_EQ(file.config().heads, 4);
    EXPECT_EQ(file.config().channels, 48);
    EXPECT_EQ(file.config().vocab, 97);
    EXPECT_EQ(file.config().padded_vocab, 128);
    EXPECT_EQ(file.config().max_seq_len, 40);
    for (int i = 0; i < static_cast<int>(file.table().tensors.size()); ++i) {
      const std::vector<float> expected = tensor_values(file.table(), i);
      std::vector<float> read(expected.size(), NAN);
      file.read(read.data(), i, 0, read.size());
      EXPECT_EQ(read, expected) << file.table().tensors[i].name;
      std::vector<float> part(7, NAN);
      file.read(part.data(), i, 11, 7);
      EXPECT_EQ(part, std::vector<float>(expected.begin() + 11, expected.begin() + 18)) << file.table().tensors[i].name;
    }
  }
}

// A tensor longer than the conversion buffer is converted to its end (V = 65536 makes wte 524,288 values).
TEST_F(LlmcFile, LongTensorInBf16) {
  const GPT2Config config = make_gpt2_config(1, 1, 8, 65536, 8);
  write_model(path("model.bin"), config, LlmcPrecision::kBfloat16);
  const LlmcModelFile file = LlmcModelFile::open(path("model.bin"));
  const std::vector<float> expected = tensor_values(file.table(), 0);
  std::vector<float> read(expected.size() - 5, NAN);
  file.read(read.data(), 0, 5, read.size());
  EXPECT_EQ(read, std::vector<float>(expected.begin() + 5, expected.end()));
}

// Several writers of one file, each with its own ranges, make the same bytes as one writer.
TEST_F(LlmcFile, ManyWritersOneFile) {
  write_model(path("one.bin"), kSmall, LlmcPrecision::kFloat32);
  LlmcModelWriter first = LlmcModelWriter::create(path("many.bin"), kSmall, LlmcPrecision::kFloat32);
  LlmcModelWriter second = LlmcModelWriter::join(path("many.bin"), kSmall, LlmcPrecision::kFloat32);
  const ParameterTable& table = first.layout().table();
  for (int i = static_cast<int>(table.tensors.size()) - 1; i >= 0; --i) {
    const std::vector<float> values = tensor_values(table, i);
    const size_t cut = values.size() / 3;
    second.write(values.data() + cut, i, cut, values.size() - cut);
    first.write(values.data(), i, 0, cut);
  }
  second.sync();
  first.sync();
  EXPECT_FALSE(path_exists(path("many.bin")));
  first.commit();
  EXPECT_EQ(read_whole_file(path("many.bin"), "model"), read_whole_file(path("one.bin"), "model"));
}

// A writer that ends without commit() leaves the old file as it was and no temporary file.
TEST_F(LlmcFile, AbandonedWriterChangesNothing) {
  write_bytes("model.bin", "old");
  {
    LlmcModelWriter writer = LlmcModelWriter::create(path("model.bin"), kSmall, LlmcPrecision::kFloat32);
    EXPECT_TRUE(path_exists(path("model.bin.tmp")));
  }
  EXPECT_EQ(list_folder(folder_), std::vector<std::string>{"model.bin"});
  EXPECT_EQ(read_whole_file(path("model.bin"), "model"), "old");
}

// The files that the Python reference wrote on its own: every tensor is in its place (ten AdamW steps move a value by
// about 10 * learning rate at most, much less than tensors or layers differ), and the bf16 file is the float file,
// rounded.
TEST_F(LlmcFile, ReadsTheReferenceFiles) {
  const LlmcModelFile exact = LlmcModelFile::open("test/golden/gpt2_tiny_fp32.bin");
  const LlmcModelFile rounded = LlmcModelFile::open("test/golden/gpt2_tiny_bf16.bin");
  const GoldenFile golden("test/golden/gpt2_tiny_fp32.golden");
  const GPT2Config& c = exact.config();
  EXPECT_EQ(golden.ints("config"),
            (std::vector<int>{c.layers, c.heads, c.channels, c.vocab, c.padded_vocab, c.max_seq_len}));
  for (int i = 0; i < static_cast<int>(exact.table().tensors.size()); ++i) {
    const ParameterTensor& tensor = exact.table().tensors[i];
    std::vector<float> values(tensor.elements), bf16_values(tensor.elements);
    exact.read(values.data(), i, 0, values.size());
    rounded.read(bf16_values.data(), i, 0, values.size());
    const std::vector<float> final_values = golden.floats("train.final." + tensor.name);
    EXPECT_EQ(golden.shape("single.gradient." + tensor.name), tensor.shape) << tensor.name;
    ASSERT_EQ(final_values.size(), values.size()) << tensor.name;
    for (size_t k = 0; k < values.size(); ++k) {
      ASSERT_NEAR(values[k], final_values[k], 0.015) << tensor.name << " " << k;
      ASSERT_LE(std::fabs(bf16_values[k] - values[k]), std::fabs(values[k]) / 256) << tensor.name << " " << k;
    }
  }
}

// A golden file that is damaged, or an entry that is not there or of another type, is said in words.
TEST_F(LlmcFile, GoldenFileErrors) {
  const std::string golden = read_whole_file("test/golden/gpt2_tiny_fp32.golden", "golden file");
  const auto message = [&](const std::string& content) {
    write_bytes("x.golden", content);
    return message_of([&] { GoldenFile file(path("x.golden")); }, 2);
  };
  EXPECT_EQ(message(golden), "no error");
  expect_contains(message(golden.substr(0, golden.size() - 1)), {"truncated", "gpt2_golden.py"});
  expect_contains(message(golden + "x"), {"bytes left over"});
  expect_contains(message("abc"), {"wrong magic"});
  const GoldenFile file("test/golden/gpt2_tiny_fp32.golden");
  expect_contains(message_of([&] { file.floats("nothing"); }, 2), {"no entry nothing"});
  expect_contains(message_of([&] { file.floats("batch"); }, 2), {"entry batch has type 1"});
  expect_contains(message_of([&] { file.integer("batch"); }, 2), {"has 2 values"});
  EXPECT_TRUE(file.has("batch"));
  EXPECT_FALSE(file.has("nothing"));
  EXPECT_DOUBLE_EQ(file.number("train.clip"), 0.5);
  EXPECT_EQ(file.integer("masked.target_count"), 41);
  // the mean of the losses per token is the loss, ignored tokens have none
  const std::vector<double> losses = file.doubles("masked.losses");
  const std::vector<int> targets = file.ints("masked.targets");
  double sum = 0.0;
  for (size_t i = 0; i < losses.size(); ++i) {
    sum += losses[i];
    EXPECT_EQ(losses[i] == 0.0, targets[i] == -1) << i;
  }
  EXPECT_NEAR(sum / 41, file.number("masked.loss"), 1e-12);
}

// Rounding to bf16: nearest, ties to even, infinities stay, no NaN becomes infinity.
TEST_F(LlmcFile, RoundsToNearestEven) {
  using llmc_file_detail::bf16_from_float;
  const auto from_bits = [](uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
  };
  EXPECT_EQ(bf16_from_float(from_bits(0x3f807fff)), 0x3f80);
  EXPECT_EQ(bf16_from_float(from_bits(0x3f808000)), 0x3f80);  // tie: down to even
  EXPECT_EQ(bf16_from_float(from_bits(0x3f818000)), 0x3f82);  // tie: up to even
  EXPECT_EQ(bf16_from_float(from_bits(0x3f808001)), 0x3f81);
  EXPECT_EQ(bf16_from_float(from_bits(0xbf808001)), 0xbf81);
  EXPECT_EQ(bf16_from_float(std::numeric_limits<float>::infinity()), 0x7f80);
  EXPECT_EQ(bf16_from_float(std::numeric_limits<float>::max()), 0x7f80);
  for (uint32_t bits : {0x7f800001u, 0x7fffffffu, 0xff800001u, 0xffffffffu}) {
    EXPECT_GT(bf16_from_float(from_bits(bits)) & 0x7fff, 0x7f80) << bits;
  }
}

// Missing, a folder, empty, cut in the header, foreign: named as what it is.
TEST_F(LlmcFile, NamesWhatIsNoModel) {
  expect_contains(open_message(path("none.bin")), {"no model file", "none.bin", "124M"});
  expect_contains(open_message(folder_), {"is a folder"});
  expect_contains(open_message(write_bytes("empty.bin", "")), {"empty.bin is empty", "again"});
  expect_contains(open_message(write_bytes("text.bin", "Call me Ishmael.")),
                  {"is not a model file", "expected 20240326", "124M"});
  expect_contains(open_message(write_bytes("tokens.bin", header_bytes({20240520, 1, 7}))),
                  {"a token file", "20240520", "20240326"});
  expect_contains(open_message(write_bytes("tok.bin", header_bytes({20240328, 2}))), {"a tokenizer"});
  expect_contains(open_message(write_bytes("cut.bin", header_bytes({20240326, 3}).substr(0, 1000))),
                  {"truncated", "1000 bytes", "1024"});
  expect_contains(open_message(write_bytes("two.bin", "ab")), {"truncated", "2 bytes"});
}

// Wrong version, absurd sizes, too short, too long: what was found, what was expected.
TEST_F(LlmcFile, ChecksHeaderAndLength) {
  expect_contains(open_message(write_bytes("v1.bin", header_bytes({20240326, 1, 40, 97, 3, 3, 48, 128}))),
                  {"version 1", "expected 3 (fp32) or 5 (bf16)"});
  expect_contains(open_message(write_bytes("zero.bin", header_bytes({20240326, 3}))), {"layers 0", "damaged"});
  expect_contains(open_message(write_bytes("heads.bin", header_bytes({20240326, 3, 40, 97, 3, 5, 48, 128}))),
                  {"5 heads do not divide 48"});
  expect_contains(open_message(write_bytes("huge.bin", header_bytes({20240326, 3, 40, 97, 3, 3, 2147483647, 128}))),
                  {"channels 2147483647"});
  expect_contains(open_message(write_bytes("vp.bin", header_bytes({20240326, 3, 40, 97, 3, 3, 48, 96}))),
                  {"padded vocabulary 96"});
  write_model(path("good.bin"), kSmall, LlmcPrecision::kBfloat16);
  const std::string good = read_whole_file(path("good.bin"), "model");
  expect_contains(open_message(write_bytes("short.bin", good.substr(0, good.size() - 1))),
                  {"has 186975 bytes, expected 186976", "layers 3, heads 4, channels 48", "bf16", "truncated"});
  expect_contains(open_message(write_bytes("long.bin", good + "x")),
                  {"has 186977 bytes, expected 186976", "not the file that its header"});
}

// A folder that cannot be written, and a rank that does not see the first rank's file: environment errors, exit code 1.
TEST_F(LlmcFile, WriterErrors) {
  expect_contains(
      message_of([&] { LlmcModelWriter::create(path("no/model.bin"), kSmall, LlmcPrecision::kFloat32); }, 1),
      {"no/model.bin.tmp", "No such file"});
  expect_contains(message_of([&] { LlmcModelWriter::join(path("model.bin"), kSmall, LlmcPrecision::kFloat32); }, 1),
                  {"model.bin.tmp", "shared by all nodes"});
  write_bytes("other.bin.tmp", "xyz");
  expect_contains(message_of([&] { LlmcModelWriter::join(path("other.bin"), kSmall, LlmcPrecision::kFloat32); }, 1),
                  {"has 3 bytes, expected 372928"});
  if (path_exists("/dev/full")) {
    File full = File::open_to_update("/dev/full");
    expect_contains(message_of([&] { full.pwrite_all("x", 1, 0); }, 1), {"No space left"});
  }
}

// A range outside the tensor is a programmer error.
TEST_F(LlmcFile, RangeOutsideTheTensorAsserts) {
  write_model(path("model.bin"), kSmall, LlmcPrecision::kFloat32);
  const LlmcModelFile file = LlmcModelFile::open(path("model.bin"));
  float value;
  EXPECT_DEATH(file.read(&value, 2, 48, 1), "range outside the tensor");
  EXPECT_DEATH(file.read(&value, 2, 0, std::numeric_limits<size_t>::max()), "range outside the tensor");
}

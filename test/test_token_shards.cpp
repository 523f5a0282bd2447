// test_token_shards.cpp -- token files, samples over uneven shards, the order of the samples, and what is said of bad
// files.
#include "llmc/token_shards.h"

#include <cmath>
#include <map>
#include <numeric>
#include <set>

#include <gtest/gtest.h>

#include "llmc/shuffle.h"
#include "test/host_test.h"

namespace {

std::string token_file(const std::vector<uint16_t>& tokens, int32_t magic = kTokenFileMagic, int32_t version = 1,
                       int64_t promised = -1) {
  int32_t header[256] = {magic, version, static_cast<int32_t>(promised < 0 ? tokens.size() : promised)};
  std::string content(reinterpret_cast<const char*>(header), sizeof(header));
  return content.append(reinterpret_cast<const char*>(tokens.data()), tokens.size() * 2);
}
/// `count` tokens counting up from `first`.
std::vector<uint16_t> counting(size_t count, int first) {
  std::vector<uint16_t> tokens(count);
  std::iota(tokens.begin(), tokens.end(), static_cast<uint16_t>(first));
  return tokens;
}
TokenData open(const std::string& pattern, int T = 4, int vocab = 1000) {
  return TokenData::open(pattern, T, vocab, DataSplit::kTrain);
}
std::string open_error(const std::string& pattern, int T = 4, int vocab = 1000) {
  return user_error_text([&] { open(pattern, T, vocab); });
}
/// Inputs and the last target of a sample: T + 1 tokens; checks that targets are the inputs shifted by one.
std::vector<int> sample(TokenData& data, uint64_t index, int T) {
  std::vector<int> inputs(static_cast<size_t>(T)), targets(static_cast<size_t>(T));
  data.read(index, inputs.data(), targets.data());
  for (size_t t = 0; t + 1 < inputs.size(); t++) EXPECT_EQ(inputs[t + 1], targets[t]);
  inputs.push_back(targets.back());
  return inputs;
}
std::vector<uint64_t> epoch_order(uint64_t seed, uint64_t epoch, uint64_t n) {
  std::vector<uint64_t> order;
  for (uint64_t i = 0; i < n; i++) order.push_back(permuted_index(seed, epoch, i, n));
  return order;
}

}  // namespace

// Samples of uneven shards: floor((tokens - 1) / T) each, T + 1 tokens at stride T, never across files, in order of
// names; shards that are too short for one sample give none, wherever they stand.
TEST(TokenShards, UnevenShards) {
  const TemporaryFolder folder;
  const std::vector<size_t> sizes = {4, 13, 1, 5, 12, 2};  // with T = 4: 0, 3, 0, 1, 2, 0 samples
  for (size_t i : {3, 0, 5, 1, 4, 2}) {
    folder.write(format_text("train_%zu.bin", i), token_file(counting(sizes[i], static_cast<int>(100 * i))));
  }
  TokenData data = open(folder / "train_*.bin");
  EXPECT_EQ(data.files(), 6u);
  EXPECT_EQ(data.tokens(), 37u);
  ASSERT_EQ(data.samples(), 6u);
  const int first[] = {100, 104, 108, 300, 400, 404};
  for (uint64_t i : {5, 0, 3, 1, 4, 2, 2, 5}) {
    const int token = first[i];
    EXPECT_EQ(sample(data, i, 4), (std::vector<int>{token, token + 1, token + 2, token + 3, token + 4})) << i;
  }
}

// The number of samples and the last sample are right for every shard size around multiples of T.
TEST(TokenShards, SampleCounts) {
  const TemporaryFolder folder;
  for (int T : {1, 2, 3, 7}) {
    for (size_t tokens = static_cast<size_t>(T) + 1; tokens < 30; tokens++) {
      TokenData data = open(folder.write("t.bin", token_file(counting(tokens, 0))), T);
      EXPECT_EQ(data.samples(), (tokens - 1) / static_cast<size_t>(T));
      EXPECT_EQ(sample(data, data.samples() - 1, T).back(), static_cast<int>(data.samples()) * T);
    }
  }
}

// More shards than are kept open at a time are all read, in any order.
TEST(TokenShards, ManyShards) {
  const TemporaryFolder folder;
  for (int i = 0; i < 150; i++) {
    folder.write(format_text("train_%03d.bin", i), token_file({static_cast<uint16_t>(i), 7}));
  }
  TokenData data = open(folder.path(), 1);
  ASSERT_EQ(data.samples(), 150u);
  for (uint64_t i = 0; i < 300; i++) {
    const uint64_t index = i * 64 % 150 + i % 2;
    EXPECT_EQ(sample(data, index % 150, 1)[0], static_cast<int>(index % 150));
  }
}

// A shard of more than 2^31 tokens (4.4 GB, sparse) is read at its end: offsets and counts are 64 bits.
TEST(TokenShards, MoreThanTwoGigabytes) {
  const TemporaryFolder folder;
  const uint64_t tokens = 2200000001;
  const int32_t header[256] = {kTokenFileMagic, 1, static_cast<int32_t>(static_cast<uint32_t>(tokens))};
  File file = File::create(folder / "big.bin");
  file.pwrite_all(header, sizeof(header), 0);
  const uint16_t last[] = {1, 2, 3, 4, 5};
  file.pwrite_all(last, sizeof(last), kTokenFileHeaderBytes + 2 * (tokens - 5));
  file.close();
  TokenData data = open(folder / "big.bin");
  EXPECT_EQ(data.samples(), 550000000u);
  EXPECT_EQ(sample(data, data.samples() - 1, 4), (std::vector<int>{1, 2, 3, 4, 5}));
  EXPECT_EQ(sample(data, data.samples() / 2, 4), (std::vector<int>{0, 0, 0, 0, 0}));
}

// A pattern is a file, a glob or a folder; a folder gives each split its own files; nothing found is said plainly.
TEST(TokenShards, Patterns) {
  const TemporaryFolder folder;
  for (const char* name : {"b_train_1.bin", "a_val.bin", "B_train.bin", "train.txt", "b_train_0.bin", "odd[1].bin"}) {
    folder.write(name, token_file(counting(6, 0)));
  }
  const auto names = [&](const std::string& pattern, DataSplit split) {
    std::string list;
    for (const std::string& path : list_token_files(pattern, split)) list += path.substr(path.rfind('/') + 1) + " ";
    return list;
  };
  EXPECT_EQ(names(folder.path(), DataSplit::kTrain), "B_train.bin b_train_0.bin b_train_1.bin ");
  EXPECT_EQ(names(folder.path(), DataSplit::kValidation), "a_val.bin ");
  EXPECT_EQ(names(folder / "b_*.bin", DataSplit::kTrain), "b_train_0.bin b_train_1.bin ");
  EXPECT_EQ(names(folder / "odd[1].bin", DataSplit::kTrain), "odd[1].bin ");
  EXPECT_EQ(open_error(folder / "none*.bin"),
            "--train-data: no file matches " + folder / "none*.bin" +
                "; make token files with dev/data/get_text.sh or dev/data/prepare_text.py");
  EXPECT_TRUE(contains(user_error_text([&] { list_token_files(folder / "none", DataSplit::kValidation); }),
                       "--val-data: no file matches"));
  make_folders(folder / "empty");
  EXPECT_EQ(open_error(folder / "empty"),
            "--train-data: the folder " + folder / "empty" + " holds no file *train*.bin");
}

// Empty, cut, foreign, wrong version, longer and shorter than promised: one message with file, found and expected.
TEST(TokenShards, BadFiles) {
  const TemporaryFolder folder;
  const std::string good = token_file(counting(10, 0)), path = folder / "t.bin";
  const auto message = [&](const std::string& content) { return open_error(folder.write("t.bin", content)); };
  EXPECT_EQ(message(""), path + " is empty: 0 bytes, a token file starts with a header of 1024");
  EXPECT_EQ(message(good.substr(0, 1000)),
            path + " is cut short: 1000 bytes, a token file starts with a header of 1024");
  EXPECT_EQ(message(good.substr(0, 1040)),
            path + " is cut short: its header says 10 tokens = 1044 bytes, it has 1040 bytes");
  EXPECT_EQ(message(good.substr(0, 1043)),
            path + " is cut short: its header says 10 tokens = 1044 bytes, it has 1043 bytes");
  EXPECT_EQ(message(good + "x"),
            path + " is longer than its header says: its header says 10 tokens = 1044 bytes, it has 1045 bytes");
  EXPECT_EQ(message(token_file({})), path + " holds no token; remove it from the data");
  EXPECT_TRUE(contains(message(token_file(counting(10, 0), 20240326)),
                       "is not a token file: it starts with 20240326, expected 20240520"));
  EXPECT_TRUE(contains(message(std::string(5000, 'x')), "is not a token file"));
  EXPECT_EQ(message(token_file(counting(10, 0), kTokenFileMagic, 7)),
            path + " is a token file of version 7, expected 1 (16-bit tokens)");
  EXPECT_TRUE(contains(message(token_file(counting(10, 0), kTokenFileMagic, 1, 3000000000)), "cut short"));
}

// One bad file among good ones is found at once.
TEST(TokenShards, BadFileAmongGood) {
  const TemporaryFolder folder;
  folder.write("train_0.bin", token_file(counting(10, 0)));
  folder.write("train_1.bin", token_file(counting(10, 0)).substr(0, 1030));
  folder.write("train_2.bin", token_file(counting(10, 0)));
  EXPECT_TRUE(contains(open_error(folder.path()), "train_1.bin is cut short"));
}

// Data without one sample says how long it is and which --seq-len would fit.
TEST(TokenShards, TooShort) {
  const TemporaryFolder folder;
  folder.write("train_0.bin", token_file(counting(8, 0)));
  folder.write("train_1.bin", token_file(counting(3, 0)));
  EXPECT_EQ(open_error(folder.path(), 8), "--train-data " + folder.path() +
                                              ": the longest file has 8 tokens, a sample needs --seq-len + 1 = 9; use "
                                              "--seq-len 7 or less");
  EXPECT_EQ(open(folder.path(), 7).samples(), 1u);
  const std::string single = folder.write("t.bin", token_file({5}));
  EXPECT_EQ(open_error(single, 1), "--train-data " + single + ": no file has the 2 tokens of the shortest sample");
}

// A token that the model does not have is named with its position: near the start of a file on opening, later on
// reading.
TEST(TokenShards, TokenOutsideVocabulary) {
  const TemporaryFolder folder;
  std::vector<uint16_t> tokens(6000, 1);
  tokens[4095] = 256;
  const std::string path = folder.write("t.bin", token_file(tokens));
  EXPECT_EQ(open_error(path, 4, 256), path +
                                          ": token 4095 is 256, but ids must be below the vocabulary of 256; use "
                                          "--vocab 50257 or other data");
  tokens[4095] = 1;
  tokens[5001] = 999;
  folder.write("t.bin", token_file(tokens));
  TokenData data = open(path, 4, 256);
  EXPECT_EQ(sample(data, 1249, 4).size(), 5u);
  EXPECT_TRUE(contains(user_error_text([&] { sample(data, 1250, 4); }), path + ": token 5001 is 999"));
  EXPECT_EQ(open(path, 4, 1000).samples(), 1499u);
}

// A file that shrinks while in use gives a message, not a crash.
TEST(TokenShards, FileCutWhileInUse) {
  const TemporaryFolder folder;
  const std::string path = folder.write("t.bin", token_file(counting(100, 0)));
  TokenData data = open(path);
  File::open_to_update(path).truncate(1100);
  EXPECT_TRUE(contains(environment_error_text([&] { sample(data, 20, 4); }), path + ": reading failed: the file ends"));
}

// Every epoch visits every sample exactly once, for every n.
TEST(Shuffle, IsAPermutation) {
  std::vector<uint64_t> sizes(520);
  std::iota(sizes.begin(), sizes.end(), uint64_t{1});
  for (uint64_t n : {1000, 1023, 1024, 1025, 4097, 65536, 100003}) sizes.push_back(n);
  for (uint64_t n : sizes) {
    std::vector<bool> seen(n);
    for (uint64_t x : epoch_order(42, n % 5, n)) {
      ASSERT_LT(x, n);
      ASSERT_FALSE(seen[x]) << "n " << n << " repeats " << x;
      seen[x] = true;
    }
  }
}

// Far beyond 32 bits: results stay below n and neighbours do not collide.
TEST(Shuffle, HugeSizes) {
  for (uint64_t n : {(1ull << 33) + 7, 1ull << 40, (1ull << 62) - 1, 1ull << 62}) {
    std::set<uint64_t> seen;
    for (uint64_t i = 0; i < 500; i++) {
      EXPECT_LT(permuted_index(1, 2, i, n), n);
      seen.insert(permuted_index(1, 2, i, n));
      seen.insert(permuted_index(1, 2, n - 1 - i, n));
    }
    EXPECT_EQ(seen.size(), 1000u);
    EXPECT_GT(*seen.rbegin(), n / 2);
  }
}

// Epochs and seeds, also neighbouring ones and swapped ones, give different orders.
TEST(Shuffle, DiffersBetweenEpochsAndSeeds) {
  std::set<std::vector<uint64_t>> orders;
  for (uint64_t seed = 0; seed < 12; seed++) {
    for (uint64_t epoch = 0; epoch < 12; epoch++) orders.insert(epoch_order(seed, epoch, 64));
  }
  EXPECT_EQ(orders.size(), 144u);
}

// All orders of three and four samples are equally likely (chi-square), as are all places of the first of 100.
TEST(Shuffle, IsUniform) {
  for (uint64_t n : {3, 4}) {
    const double orders = n == 3 ? 6 : 24, draws = 24000;
    std::map<std::vector<uint64_t>, int> counts;
    for (uint64_t k = 0; k < 24000; k++) counts[epoch_order(k % 7, k / 7, n)]++;
    double chi_square = (orders - static_cast<double>(counts.size())) * draws / orders;
    for (const auto& [order, count] : counts) chi_square += std::pow(count - draws / orders, 2) / (draws / orders);
    EXPECT_LT(chi_square, n == 3 ? 25.7 : 54.0) << "n " << n;  // 99.99 % quantile of 5 and 23 degrees of freedom
  }
  std::vector<int> counts(100);
  for (uint64_t epoch = 0; epoch < 20000; epoch++) counts[permuted_index(7, epoch, 0, 100)]++;
  double chi_square = 0;
  for (int count : counts) chi_square += std::pow(count - 200.0, 2) / 200.0;
  EXPECT_LT(chi_square, 160.0);  // 99.99 % quantile of 99 degrees of freedom
}

// Neighbours in the files are not neighbours in the order more often than by chance (about one pair per epoch).
TEST(Shuffle, BreaksUpNeighbours) {
  const std::vector<uint64_t> order = epoch_order(42, 0, 20000);
  int kept = 0, small_steps = 0;
  for (size_t i = 0; i + 1 < order.size(); i++) {
    const int64_t step = static_cast<int64_t>(order[i + 1] - order[i]);
    kept += step == 1;
    small_steps += step > -100 && step < 100;
  }
  EXPECT_LE(kept, 8);
  EXPECT_NEAR(small_steps, 200, 75);  // 5 standard deviations
}

// The order is pinned: a checkpoint of an older build must resume into the same samples.
TEST(Shuffle, OrderIsPinned) {
  EXPECT_EQ(epoch_order(42, 0, 10), (std::vector<uint64_t>{4, 1, 8, 0, 9, 3, 5, 7, 2, 6}));
  EXPECT_EQ(epoch_order(42, 1, 10), (std::vector<uint64_t>{7, 0, 9, 5, 3, 6, 2, 1, 4, 8}));
  EXPECT_EQ(permuted_index(42, 3, 123456789, 1ull << 40), 49986798860ull);
}

// Position g is sample g % n of epoch g / n from anywhere (resuming), and ranks that take turns or blocks of any size
// see together what one rank sees.
TEST(SampleOrder, PositionsAndRanks) {
  SampleOrder order;
  order.samples = 37;
  order.seed = 5;
  std::vector<uint64_t> alone;
  for (uint64_t g = 0; g < 120; g++) alone.push_back(order.at(g));
  for (uint64_t epoch = 0; epoch < 3; epoch++) {
    for (uint64_t i = 0; i < 37; i++) EXPECT_EQ(alone[epoch * 37 + i], permuted_index(5, epoch, i, 37));
  }
  EXPECT_EQ(order.epoch(73), 1u);
  EXPECT_EQ(order.epoch(74), 2u);
  for (uint64_t ranks : {1, 2, 3, 4}) {
    for (uint64_t per_rank : {1, 5}) {
      std::vector<uint64_t> together;
      for (uint64_t step = 0; together.size() < 120; step++) {
        for (uint64_t rank = 0; rank < ranks; rank++) {
          const SampleOrder own =
              order;  // a rank that has just been started knows as much as one that ran from the start
          for (uint64_t k = 0; k < per_rank; k++) together.push_back(own.at((step * ranks + rank) * per_rank + k));
        }
      }
      together.resize(120);
      EXPECT_EQ(together, alone) << ranks << " ranks x " << per_rank;
    }
  }
  order.shuffle = false;
  EXPECT_EQ(order.at(36), 36u);
  EXPECT_EQ(order.at(40), 3u);
}

// dev/data/prepare_text.py: bytes become tokens, the last part of each file goes to validation at a line, shards are
// cut where asked, and TokenData reads what it wrote.
TEST(PrepareText, ByteLevel) {
  const TemporaryFolder folder;
  std::string text;
  for (int line = 0; line < 100; line++) text += format_text("line %d \xc3\xa9\n", line);
  folder.write("a.txt", text);
  folder.write("b.txt", text);
  const std::string command = "python3 dev/data/prepare_text.py " + folder / "a.txt" + " " + folder / "b.txt" +
                              " --out " + folder / "out/text" + " --shard-tokens 1000 > /dev/null";
  make_folders(folder / "out");
  folder.write("out/text_train.bin", "");
  folder.write("out/text_train_000002.bin", "");
  ASSERT_EQ(system(command.c_str()), 0);
  EXPECT_EQ(list_folder(folder / "out"),
            (std::vector<std::string>{"text_train_000000.bin", "text_train_000001.bin", "text_val.bin"}));
  const size_t cut = text.rfind('\n', static_cast<size_t>(static_cast<double>(text.size()) * 0.9) - 1) + 1;
  std::string train, val;
  for (const char* name : {"text_train_000000.bin", "text_train_000001.bin", "text_val.bin"}) {
    const std::string content = read_whole_file(folder / "out/" + name, "file");
    for (size_t i = kTokenFileHeaderBytes; i < content.size(); i += 2) {
      EXPECT_EQ(content[i + 1], '\0');
      (std::string(name) == "text_val.bin" ? val : train) += content[i];
    }
  }
  EXPECT_EQ(train, text.substr(0, cut) + text.substr(0, cut));
  EXPECT_EQ(val, text.substr(cut) + text.substr(cut));
  TokenData data = open(folder / "out", 10, 256);
  EXPECT_EQ(data.tokens(), train.size());
  EXPECT_EQ(sample(data, 0, 10)[0], 'l');
}

// prepare_text.py refuses missing, empty and too short text with exit code 1 and leaves no file behind.
TEST(PrepareText, Errors) {
  const TemporaryFolder folder;
  folder.write("empty.txt", "");
  folder.write("short.txt", "a");
  for (const char* name : {"none.txt", "empty.txt", "short.txt"}) {
    const std::string command =
        "python3 dev/data/prepare_text.py " + folder / name + " --out " + folder / "x" + " 2> " + folder / "message";
    EXPECT_EQ(WEXITSTATUS(system(command.c_str())), 1) << name;
    EXPECT_EQ(read_whole_file(folder / "message", "file").compare(0, 7, "error: "), 0);
  }
  EXPECT_EQ(list_folder(folder.path()), (std::vector<std::string>{"empty.txt", "message", "short.txt"}));
}

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}

// test_reductions.cu -- sums whose association is a contract: squares for the norm, additions, trees.
#include "llmc/accumulate.cuh"
#include "llmc/global_norm.cuh"

#include "test/kernel_test.h"

static std::vector<double> run_square_sums(const std::vector<float>& values, size_t begin, cudaStream_t stream) {
  TestArray<float> x(stream, values);
  const size_t n = values.size() - begin;
  TestArray<double> partial(stream, ceil_div(n, kNormBlock));
  square_sum_blocks(partial.data(), x.data() + begin, n, stream);
  return partial.read();
}

// Each block's sum of squares is right to the precision of double, for ends within and at block boundaries.
TEST(Reductions, SquareSums) {
  TestStream stream;
  for (size_t n : {1, 31, 33, 1023, 1024, 1025, 8192, 8193, 100000}) {
    const auto values = random_values(n, 1);
    const std::vector<double> sums = run_square_sums(values, 0, stream);
    for (size_t block = 0; block < sums.size(); block++) {
      double exact = 0;
      for (size_t i = block * 1024; i < std::min(n, (block + 1) * 1024); i++) {
        exact += static_cast<double>(values[i]) * values[i];
      }
      EXPECT_NEAR(sums[block], exact, 1e-14 * exact) << "n " << n << " block " << block;
    }
  }
}

// A block's bits depend on its elements only: not on the call it is in, nor on the number of threads.
TEST(Reductions, SquareSumsDoNotDependOnTheCall) {
  TestStream stream;
  const auto values = random_values(50 * 1024 + 77, 1);
  const std::vector<double> whole = run_square_sums(values, 0, stream);
  for (int threads : {1, 2, 3}) {
    set_kernel_threads(threads);
    for (size_t block : {0, 1, 7, 49, 50}) {
      const std::vector<double> tail = run_square_sums(values, block * kNormBlock, stream);
      EXPECT_TRUE(same_bits(tail, std::vector<double>(whole.begin() + block, whole.end())));
    }
  }
}

// Values whose squares overflow or underflow float are still right: the square is taken in double.
TEST(Reductions, SquareSumsInDouble) {
  TestStream stream;
  EXPECT_DOUBLE_EQ(run_square_sums({1e30f}, 0, stream)[0], static_cast<double>(1e30f) * 1e30f);
  EXPECT_DOUBLE_EQ(run_square_sums({1e-30f}, 0, stream)[0], static_cast<double>(1e-30f) * 1e-30f);
}

// out = a + b exactly as the host adds, also in place of either operand.
TEST(Reductions, Add) {
  for (size_t n : {1, 257, 2048, 10007}) {
    const auto a = random_values(n, 1), b = random_values(n, 2);
    std::vector<float> sum(n);
    for (size_t i = 0; i < n; i++) sum[i] = a[i] + b[i];
    const Outputs outputs = run_everywhere([&](cudaStream_t stream) -> Outputs {
      TestArray<float> x(stream, a), y(stream, b), out(stream, n);
      add(out.data(), x.data(), y.data(), n, stream);
      add(x.data(), x.data(), y.data(), n, stream);
      TestArray<float> x2(stream, a);
      add(y.data(), x2.data(), y.data(), n, stream);
      return {out.read(), x.read(), y.read()};
    });
    for (const auto& output : outputs) EXPECT_TRUE(same_bits(output, sum)) << "n " << n;
  }
}

// The definition: split at the largest power of two below the count.
static float reference_tree(const std::vector<std::vector<float>>& parts, int begin, int count, size_t i) {
  if (count == 1) return parts[begin][i];
  int split = 1;
  while (2 * split < count) split *= 2;
  return reference_tree(parts, begin, split, i) + reference_tree(parts, begin + split, count - split, i);
}

static std::vector<std::vector<float>> random_parts(int count, size_t n) {
  std::vector<std::vector<float>> parts;
  for (int part = 0; part < count; part++) parts.push_back(random_values(n, 10 + part));
  return parts;
}

// result_part -1: into a separate array, else in place of that part.
static std::vector<float> run_tree_sum(const std::vector<std::vector<float>>& parts, int result_part) {
  const size_t n = parts[0].size();
  const int count = static_cast<int>(parts.size());
  std::vector<float> flat;
  for (const auto& part : parts) flat.insert(flat.end(), part.begin(), part.end());
  return run_everywhere([&](cudaStream_t stream) -> Outputs {
    TestArray<float> rows(stream, flat), out(stream, n);
    float* target = result_part < 0 ? out.data() : rows.data() + result_part * n;
    tree_sum(target, rows.data(), count, n, stream);
    if (result_part < 0) return {out.read()};
    const std::vector<float> all = rows.read();
    return {std::vector<float>(all.begin() + result_part * n, all.begin() + (result_part + 1) * n)};
  })[0];
}

// tree_sum has the bits of the recursive definition, for every count, into a new array or over the first or last part.
TEST(Reductions, TreeSum) {
  for (int count : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 15, 16, 17, 31, 32, 33, 100}) {
    const auto parts = random_parts(count, 2100);
    std::vector<float> exact(2100);
    for (size_t i = 0; i < exact.size(); i++) exact[i] = reference_tree(parts, 0, count, i);
    for (int result_part : {-1, 0, count - 1}) {
      EXPECT_TRUE(same_bits(run_tree_sum(parts, result_part), exact)) << "count " << count;
    }
  }
}

// For a power of two, tree_sum equals recursive halving among that many replicas: neighbours exchange first, then pairs
// of neighbours, and so on.
TEST(Reductions, TreeSumEqualsRecursiveHalving) {
  for (int count : {2, 4, 8, 16, 32}) {
    auto parts = random_parts(count, 300);
    const std::vector<float> tree = run_tree_sum(parts, -1);
    for (int distance = 1; distance < count; distance *= 2) {
      for (int rank = 0; rank < count; rank += 2 * distance) {
        for (size_t i = 0; i < 300; i++) parts[rank][i] = parts[rank][i] + parts[rank + distance][i];
      }
    }
    EXPECT_TRUE(same_bits(tree, parts[0])) << "count " << count;
  }
}

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}

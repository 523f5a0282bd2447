// test_embedding.cu -- lookup of token and position embeddings, and the gradients of both tables, against float64.
#include "llmc/embedding.cuh"

#include "test/kernel_test.h"

struct EmbeddingCase {
  int B, T, C, V, max_T;
  bool accumulate;
};

// Every C and T of the list, several batch sizes and vocabularies; the largest vocabulary only with short rows.
static std::vector<EmbeddingCase> cases() {
  std::vector<EmbeddingCase> list;
  for (int C : {1, 7, 32, 48, 100, 257, 768, 1600}) {
    for (int T : {1, 3, 64, 257}) {
      if (kInstrumented && C * T > 30000) continue;
      list.push_back({T == 257 ? 1 : 3, T, C, T == 64 ? 2 : 61, T + 2, T % 2 == 0});
    }
  }
  for (bool accumulate : {false, true}) list.push_back({5, 64, 7, 50257, 64, accumulate});
  list.push_back({2, 257, 48, 256, 1024, false});
  list.push_back({2, 257, 48, 256, 1024, true});
  return list;
}

static std::string describe(const EmbeddingCase& s) {
  return format_text("B %d T %d C %d V %d max_T %d accumulate %d", s.B, s.T, s.C, s.V, s.max_T, s.accumulate);
}

// The order lists each position once, grouped by token, ascending within a group; groups ascend by token.
TEST(Embedding, OrderIsStable) {
  for (int N : {0, 1, 2, 257, 1000}) {
    const std::vector<int> tokens = random_integers(N, 5, 17);
    const EmbeddingOrder order = embedding_order(tokens.data(), N);
    ASSERT_EQ(order.positions.size(), static_cast<size_t>(N));
    ASSERT_EQ(order.segment_starts.size(), order.segment_tokens.size() + 1);
    EXPECT_EQ(order.segment_starts.back(), N);
    std::vector<bool> seen(N, false);
    for (int s = 0; s < order.segments(); s++) {
      EXPECT_TRUE(s == 0 || order.segment_tokens[s - 1] < order.segment_tokens[s]);
      EXPECT_LT(order.segment_starts[s], order.segment_starts[s + 1]);
      for (int i = order.segment_starts[s]; i < order.segment_starts[s + 1]; i++) {
        const int position = order.positions[i];
        EXPECT_EQ(tokens[position], order.segment_tokens[s]);
        EXPECT_FALSE(seen[position]);
        seen[position] = true;
        EXPECT_TRUE(i == order.segment_starts[s] || order.positions[i - 1] < position);
      }
    }
  }
}

// out is the sum of the two rows, rounded once, at every shape: equality, no tolerance.
TEST(Embedding, Forward) {
  for (const EmbeddingCase& s : cases()) {
    const int N = s.B * s.T;
    std::vector<int> tokens = random_integers(N, 1, s.V);
    tokens[0] = s.V - 1;
    const auto wte = convert<floatX>(random_values(static_cast<size_t>(s.V) * s.C, 2));
    const auto wpe = convert<floatX>(random_values(static_cast<size_t>(s.max_T) * s.C, 3));
    const Outputs outputs = run_everywhere([&](cudaStream_t stream) -> Outputs {
      TestArray<int> t(stream, tokens);
      TestArray<floatX> token_table(stream, wte), position_table(stream, wpe),
          out(stream, static_cast<size_t>(N) * s.C);
      embedding_forward(out.data(), t.data(), token_table.data(), position_table.data(), s.B, s.T, s.C, stream);
      return {out.read_float()};
    });
    for (int n = 0; n < N; n++) {
      for (int i = 0; i < s.C; i++) {
        const float token = (float)wte[static_cast<size_t>(tokens[n]) * s.C + i];
        const float position = (float)wpe[static_cast<size_t>(n % s.T) * s.C + i];
        ASSERT_EQ(outputs[0][static_cast<size_t>(n) * s.C + i], (float)(floatX)(token + position)) << describe(s);
      }
    }
  }
}

// Adds the rows of dout into the rows of `gradient` that row_of(n) names.
template <class Real, class RowOf>
static std::vector<Real> reference_scatter(std::vector<Real> gradient, const std::vector<floatX>& dout, int C,
                                           const RowOf& row_of) {
  for (size_t n = 0; n < dout.size() / C; n++) {
    for (int i = 0; i < C; i++) gradient[row_of(n) * C + i] += static_cast<Real>((float)dout[n * C + i]);
  }
  return gradient;
}

template <class RowOf>
static void check_scatter(const std::string& what, const EmbeddingCase& s, const std::vector<float>& start,
                          const std::vector<float>& result, const std::vector<floatX>& dout, const RowOf& row_of) {
  const std::vector<float> zero(start.size(), 0.0f);
  const std::vector<float>& initial = s.accumulate ? start : zero;
  expect_close(what + describe(s), result, reference_scatter(convert<double>(initial), dout, s.C, row_of),
               reference_scatter(initial, dout, s.C, row_of));
}

// dwte adds each position's gradient to its token's row; other rows stay, or become 0 when not accumulating.
TEST(Embedding, BackwardToken) {
  for (const EmbeddingCase& s : cases()) {
    const int N = s.B * s.T;
    std::vector<int> tokens = random_integers(N, 1, s.V);
    tokens[N - 1] = s.V - 1;
    const auto dout = convert<floatX>(random_values(static_cast<size_t>(N) * s.C, 4));
    const auto start = random_values(static_cast<size_t>(s.V) * s.C, 5);
    const Outputs outputs = run_everywhere([&](cudaStream_t stream) -> Outputs {
      const EmbeddingOrder order = embedding_order(tokens.data(), N);
      TestArray<int> positions(stream, order.positions), starts(stream, order.segment_starts);
      TestArray<int> segment_tokens(stream, order.segment_tokens);
      TestArray<floatX> gradient(stream, dout);
      TestArray<float> dwte(stream, start.size());
      if (s.accumulate) dwte.write(start);
      const EmbeddingSegments segments = {positions.data(), starts.data(), segment_tokens.data(), order.segments()};
      embedding_backward_token(dwte.data(), gradient.data(), segments, s.V, s.C, s.accumulate, stream);
      return {dwte.read()};
    });
    check_scatter("dwte ", s, start, outputs[0], dout, [&](size_t n) { return static_cast<size_t>(tokens[n]); });
  }
}

// dwpe adds over the batch; positions behind T stay, or become 0 when not accumulating.
TEST(Embedding, BackwardPosition) {
  for (const EmbeddingCase& s : cases()) {
    const auto dout = convert<floatX>(random_values(static_cast<size_t>(s.B) * s.T * s.C, 4));
    const auto start = random_values(static_cast<size_t>(s.max_T) * s.C, 5);
    const Outputs outputs = run_everywhere([&](cudaStream_t stream) -> Outputs {
      TestArray<floatX> gradient(stream, dout);
      TestArray<float> dwpe(stream, start.size());
      if (s.accumulate) dwpe.write(start);
      embedding_backward_position(dwpe.data(), gradient.data(), s.B, s.T, s.C, s.max_T, s.accumulate, stream);
      return {dwpe.read()};
    });
    check_scatter("dwpe ", s, start, outputs[0], dout, [&](size_t n) { return n % s.T; });
  }
}

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}

// mpi_checkpoint.cu -- checkpoints on several ranks: every layout writes the same bytes and reads those of every other.
//   mpirun -np N mpi_checkpoint     N = 1..8; all ranks run all tests, rank 0 reports, others only what fails there
#include <csignal>

#include <sys/resource.h>

#include "llmc/comm_backend.h"
#include "llmc/grid.h"
#include "test/checkpoint_test.h"

namespace {

Control& everyone() {
  static Control control(nullptr, nullptr);
  return control;
}

// How the ranks hold the model: `pipeline` ranks of `chunks` stages each, the rest replicas.
struct Layout {
  int pipeline, chunks, zero_stage;
  std::string text() const { return format_text("pp %d, %d chunks, ZeRO %d", pipeline, chunks, zero_stage); }
};

std::vector<Layout> all_layouts() {
  std::vector<Layout> layouts;
  for (int pipeline = 1; pipeline <= everyone().size(); ++pipeline) {
    if (everyone().size() % pipeline != 0) continue;
    for (int zero_stage : {0, 1}) layouts.push_back({pipeline, 1, zero_stage});
    layouts.push_back({pipeline, 2, 1});
  }
  return layouts;
}

// What this rank holds in a layout, and the group of its replicas.
class Held {
 public:
  Held(const ParameterTable& table, const Layout& layout, Communicator& world)
      : grid_(make_grid(everyone().size(), everyone().rank(), layout.pipeline)) {
    if (grid_.replicas > 1) replicas_ = world.split(grid_.place(), grid_.replica(), "replicas");
    const int stages = layout.pipeline * layout.chunks, blocks = table.tensors.back().block;
    std::vector<int> cuts;
    for (int s = 0; s <= stages; ++s) cuts.push_back(s * blocks / stages);  // uneven, some empty
    const std::vector<StageRange> ranges = stage_ranges(cuts);
    std::vector<StageRange> mine;
    for (int chunk = 0; chunk < layout.chunks; ++chunk) {
      mine.push_back(ranges[static_cast<size_t>(chunk * layout.pipeline + grid_.place())]);
    }
    stages_ = std::make_unique<HeldStages>(table, mine, grid_.replicas, layout.zero_stage, replicas_.get());
  }
  HeldStages& stages() { return *stages_; }

 private:
  Grid grid_;
  std::unique_ptr<Communicator> replicas_;
  std::unique_ptr<HeldStages> stages_;
};

// A folder that all ranks see, made and removed by rank 0.
class SharedFolder {
 public:
  SharedFolder() {
    char text[256] = {};
    if (everyone().rank() == 0) {
      folder_ = std::make_unique<TemporaryFolder>();
      snprintf(text, sizeof text, "%s", folder_->path().c_str());
    }
    everyone().broadcast(text, sizeof text, 0);
    path_ = text;
  }
  ~SharedFolder() { everyone().barrier(); }
  const std::string& path() const { return path_; }

 private:
  std::unique_ptr<TemporaryFolder> folder_;
  std::string path_;
};

// Everything a test needs for one layout and folder.
struct Job {
  Job(const Layout& layout, const std::string& folder, Communicator& world)
      : table(gpt2_parameter_table(small_model())),
        held(table, layout, world),
        store(folder, everyone(), table, held.stages().stream()) {}
  void save(int step) {
    held.stages().fill(step);
    store.save(test_meta(step), held.stages().optimizers());
  }
  int load() {
    const std::optional<CheckpointMeta> meta = store.load_newest(held.stages().optimizers(), test_meta(0));
    return meta ? meta->step : -1;
  }
  std::string difference(int step) { return held.stages().difference(step, rounded_reference(table, step)); }

  ParameterTable table;
  Held held;
  CheckpointStore store;
};

void flip_bit(const std::string& path, uint64_t byte) {
  File file = File::open_to_update(path);
  unsigned char value;
  file.pread_all(&value, 1, byte);
  value ^= 4;
  file.pwrite_all(&value, 1, byte);
}

Communicator& world() {
  static std::unique_ptr<Communicator> communicator = make_communicator(everyone());
  return *communicator;
}

}  // namespace

// Stages x replicas x ZeRO stage x chunks: each writes the bytes that the elements' numbers say, each reads all others.
TEST(MpiCheckpoint, EveryLayoutReadsEveryOther) {
  for (const Layout& from : all_layouts()) {
    const SharedFolder folder;
    Job writer(from, folder.path() + "/run/ckpt", world());
    writer.save(11);
    if (everyone().rank() == 0) {
      EXPECT_EQ(stored_difference(folder.path() + "/run/ckpt/" + checkpoint_name(11), 11), "") << from.text();
    }
    for (const Layout& to : all_layouts()) {
      Job reader(to, folder.path() + "/run/ckpt", world());
      EXPECT_EQ(reader.load(), 11);
      EXPECT_EQ(reader.difference(11), "") << from.text() << " to " << to.text();
    }
  }
}

// Bits flipped in a range of each rank are found by whoever answers for it; all ranks fall back together, one warns.
TEST(MpiCheckpoint, DamageIsFoundByAllRanks) {
  for (const Layout& layout : all_layouts()) {
    const SharedFolder folder;
    Job job(layout, folder.path(), world());
    for (int step : {1, 2}) job.save(step);
    const uint64_t bytes = 4 * job.table.total, part = bytes / static_cast<uint64_t>(4 * everyone().size());
    for (uint64_t byte = 0; byte < bytes; byte += part) {
      const std::string path =
          folder.path() + "/" + checkpoint_name(2) + (byte / part % 2 ? "/v.bin" : "/parameters.bin");
      everyone().barrier();
      if (everyone().rank() == 0) flip_bit(path, byte);
      everyone().barrier();
      testing::internal::CaptureStderr();
      EXPECT_EQ(job.load(), 1) << "byte " << byte;
      const std::string warning = testing::internal::GetCapturedStderr();
      EXPECT_EQ(contains(warning, "is damaged: hash"), everyone().rank() == 0) << warning;
      everyone().barrier();
      if (everyone().rank() == 0) flip_bit(path, byte);
    }
    EXPECT_EQ(job.difference(1), "") << layout.text();
    everyone().barrier();
    EXPECT_EQ(job.load(), 2);
  }
}

// One rank that cannot write (quota): all ranks throw the same line, nothing is left, the older checkpoint still loads.
TEST(MpiCheckpoint, OneRankCannotWrite) {
  rlimit old, limit;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old), 0);
  signal(SIGXFSZ, SIG_IGN);
  for (int victim : {0, everyone().size() - 1}) {
    const SharedFolder folder;
    Job job(all_layouts().back(), folder.path(), world());
    job.save(1);
    job.held.stages().fill(2);
    limit = old;
    limit.rlim_cur = 4;
    if (everyone().rank() == victim) setrlimit(RLIMIT_FSIZE, &limit);
    bool on_all_ranks = false;
    const std::string text = environment_error_text([&] {
      try {
        job.store.save(test_meta(2), job.held.stages().optimizers());
      } catch (const Error& error) {
        on_all_ranks = error.on_all_ranks();
        throw;
      }
    });
    setrlimit(RLIMIT_FSIZE, &old);
    EXPECT_TRUE(on_all_ranks);
    EXPECT_TRUE(contains(text, "File too large")) << text;
    for (uint64_t hash : everyone().gathered(text_hash(text))) EXPECT_EQ(hash, text_hash(text));
    everyone().barrier();
    EXPECT_EQ(list_folder(folder.path()), std::vector<std::string>{checkpoint_name(1)});
    EXPECT_EQ(job.load(), 1);
    EXPECT_EQ(job.difference(1), "");
  }
}

// Another model: every rank throws the user's error.
TEST(MpiCheckpoint, OtherModelOnAllRanks) {
  const SharedFolder folder;
  Job job(all_layouts().front(), folder.path(), world());
  job.save(1);
  CheckpointMeta expected = test_meta(0);
  expected.model["channels"] = "32";
  const std::string text = user_error_text([&] { job.store.load_newest(job.held.stages().optimizers(), expected); });
  EXPECT_TRUE(contains(text, "channels 16 (this run: 32)")) << text;
}

namespace {

// Failures of a rank other than 0, in one line each.
class FailuresOnly : public testing::EmptyTestEventListener {
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (!result.failed()) return;
    fprintf(stderr, "rank %d: %s:%d: %s\n", everyone().rank(), result.file_name(), result.line_number(),
            result.message());
  }
};

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  everyone().set_timeout(60);
  testing::TestEventListeners& listeners = testing::UnitTest::GetInstance()->listeners();
  if (everyone().rank() != 0) {
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new FailuresOnly);
  }
  const int result = RUN_ALL_TESTS();
  return everyone().max(result);
}

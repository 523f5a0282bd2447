// test_checkpoint.cu -- checkpoints on one process: content, every kind of damage, failures while writing, kill -9.
// Started with `--save-loop FOLDER FD` it is the process that the kill test kills.
#include <csignal>
#include <functional>
#include <thread>

#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "test/checkpoint_test.h"

namespace {

// The group of one process; MPI starts with it.
Control& alone() {
  static Control control(nullptr, nullptr);
  return control;
}

const std::vector<int> kOneStage = {0, 3};

// A run with its folder, on the stages of `cuts`, all held by this process.
struct SavedRun {
  explicit SavedRun(const std::string& folder, const std::vector<int>& cuts = kOneStage,
                    const GPT2Config& config = small_model())
      : table(gpt2_parameter_table(config)),
        meta(test_meta(0, config)),
        stages(table, stage_ranges(cuts)),
        folder(folder),
        store(folder, alone(), table, stages.stream()) {}

  void save(int step) {
    stages.fill(step);
    write(step);
  }
  void write(int step) {
    CheckpointMeta saved = meta;
    saved.step = step;
    store.save(saved, stages.optimizers());
  }
  std::optional<CheckpointMeta> load() { return store.load_newest(stages.optimizers(), meta); }
  std::string difference(int step) { return stages.difference(step, rounded_reference(table, step)); }
  std::string path(int step) const { return folder + "/" + checkpoint_name(step); }

  ParameterTable table;
  CheckpointMeta meta;
  HeldStages stages;
  std::string folder;
  CheckpointStore store;
};

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : " ") + name;
  return text;
}

// Standard error of `action`.
std::string warnings(const std::function<void()>& action) {
  testing::internal::CaptureStderr();
  action();
  return testing::internal::GetCapturedStderr();
}

CheckpointRecord sample_record() {
  CheckpointRecord record;
  record.meta = test_meta(20);
  record.tensors = 40, record.elements = 12048, record.table = 5, record.hashes = {1, 2, 1ull << 63};
  return record;
}

void overwrite(const std::string& path, const std::string& content) {
  File file = File::create(path);
  file.write_all(content);
  file.close();
}

void flip_bit(const std::string& path, uint64_t byte, int bit) {
  File file = File::open_to_update(path);
  unsigned char value;
  file.pread_all(&value, 1, byte);
  value = static_cast<unsigned char>(value ^ (1 << bit));
  file.pwrite_all(&value, 1, byte);
  file.close();
}

void cut(const std::string& path, uint64_t bytes) {
  File file = File::open_to_update(path);
  file.truncate(bytes);
  file.close();
}

}  // namespace

// The hash is the same in parts, and no single flipped bit, swapped pair or shift leaves it unchanged.
TEST(ElementHash, AddsUpAndSeesEveryChange) {
  std::vector<float> x(70001);  // more than one thread's worth, odd
  fill_stored(x.data(), 1, 0, x.size(), 3);
  const uint64_t first = 6000000000ull, hash = element_hash(x.data(), x.size(), first);
  for (size_t cut : {size_t{0}, size_t{1}, size_t{4097}, x.size()}) {
    EXPECT_EQ(hash, element_hash(x.data(), cut, first) + element_hash(x.data() + cut, x.size() - cut, first + cut));
  }
  EXPECT_NE(hash, element_hash(x.data(), x.size(), first + 1));
  for (size_t i : {size_t{0}, size_t{35000}, x.size() - 1}) {
    for (int bit = 0; bit < 32; ++bit) {
      std::vector<float> y = x;
      uint32_t bits;
      memcpy(&bits, &y[i], sizeof bits);
      bits ^= 1u << bit;
      memcpy(&y[i], &bits, sizeof bits);
      EXPECT_NE(hash, element_hash(y.data(), y.size(), first)) << i << " " << bit;
    }
  }
  std::swap(x[10], x[11]);
  EXPECT_NE(hash, element_hash(x.data(), x.size(), first));
}

// meta.txt gives back what went in, and any flipped bit, any cut and any foreign text is refused with a reason.
TEST(CheckpointMeta, RoundTripAndEveryDamage) {
  const std::string text = checkpoint_text(sample_record());
  const CheckpointRecord read = parse_checkpoint_text(text);
  EXPECT_EQ(checkpoint_text(read), text);
  EXPECT_EQ(read.meta.position, (1ull << 40) + 20);
  EXPECT_EQ(read.meta.seed, 1234567890123456789ull);
  EXPECT_EQ(read.meta.extra.at("best_loss"), "3.25 (step 7 = best)");
  EXPECT_EQ(read.meta.model, checkpoint_model(small_model()));
  EXPECT_EQ(read.hashes, sample_record().hashes);
  for (size_t i = 0; i < text.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string damaged = text;
      damaged[i] = static_cast<char>(damaged[i] ^ (1 << bit));
      EXPECT_THROW(parse_checkpoint_text(damaged), Error) << "byte " << i << " bit " << bit;
    }
    EXPECT_THROW(parse_checkpoint_text(text.substr(0, i)), Error) << "cut at " << i;
  }
  const auto reason = [](const std::string& other) { return user_error_text([&] { parse_checkpoint_text(other); }); };
  EXPECT_EQ(reason(""), "meta.txt is not that of a checkpoint");
  EXPECT_EQ(reason("format = 2\n"), "meta.txt has format 2, this program reads format 1");
  EXPECT_EQ(reason(text.substr(0, text.size() - 1)), "meta.txt is cut off");
  const std::string unsigned_text = text.substr(0, text.rfind("hash = ")) + "extra = 1\n";
  const std::string hash = format_text("hash = %016llx\n", static_cast<unsigned long long>(text_hash(unsigned_text)));
  EXPECT_EQ(reason(unsigned_text + hash), "meta.txt is malformed");
}

// Only whole names count, newest first, and .old comes after the checkpoint that replaces it.
TEST(CheckpointFolder, ListsNewestFirst) {
  const TemporaryFolder folder;
  for (const char* name : {"step-00000020", "step-00000100", "step-00000020.old", "step-00000040.tmp", "step-20",
                           "step-123456789", "step-00000100.old.tmp", "notes", "step-", "step--0000001"}) {
    make_folders(folder / name);
  }
  std::vector<std::string> names;
  for (const CheckpointName& checkpoint : list_checkpoints(folder.path())) names.push_back(checkpoint.name);
  EXPECT_EQ(joined(names), "step-123456789 step-00000100 step-00000020 step-00000020.old");
  EXPECT_TRUE(list_checkpoints(folder / "missing").empty());
}

// Which checkpoints go, for every rule that keeps one.
TEST(CheckpointFolder, KeepRules) {
  const auto deleted = [](const std::vector<int>& steps, const KeepRule& rule) {
    std::vector<CheckpointName> list;
    for (int step : steps) list.push_back({step, false, checkpoint_name(step)});
    std::string text;
    for (const CheckpointName& doomed : checkpoints_to_delete(list, rule)) text += std::to_string(doomed.step) + " ";
    return text;
  };
  const std::vector<int> five = {50, 40, 30, 20, 10};
  EXPECT_EQ(deleted(five, {0, 0, 50, {}}), "");
  EXPECT_EQ(deleted(five, {2, 0, 50, {}}), "30 20 10 ");
  EXPECT_EQ(deleted(five, {1, 20, 50, {}}), "30 10 ");
  EXPECT_EQ(deleted(five, {9, 0, 50, {}}), "");
  // resumed from 20: the newer ones are damaged and stay; a new one of step 30 is written: the older one goes
  EXPECT_EQ(deleted(five, {1, 0, 20, {checkpoint_name(50), checkpoint_name(40), checkpoint_name(30)}}), "10 ");
  EXPECT_EQ(deleted(five, {1, 0, 30, {checkpoint_name(50), checkpoint_name(40)}}), "20 10 ");
  EXPECT_EQ(deleted(five, {1, 0, 50, {checkpoint_name(40)}}), "40 30 20 10 ");
  // newer ones of another run do not push out the one that is known to be whole
  EXPECT_EQ(deleted(five, {1, 0, 10, {}}), "40 30 20 ");
  EXPECT_EQ(list_checkpoints("/nonexistent").size(), 0u);
}

// Files hold each element at its global place whatever stages wrote them, and every other cut loads the same bits.
TEST(Checkpoint, SameBytesAndBitsForAllStages) {
  const std::vector<std::vector<int>> all_cuts = {{0, 3}, {0, 1, 3}, {0, 1, 2, 3}, {0, 0, 3, 3}, {0, 3, 3}};
  for (size_t i = 0; i < all_cuts.size(); ++i) {
    const TemporaryFolder folder;
    SavedRun writer(folder / "run/ckpt", all_cuts[i]);
    writer.save(7);
    EXPECT_EQ(stored_difference(writer.path(7), 7), "") << i;
    EXPECT_EQ(joined(list_folder(writer.folder)), "step-00000007");
    EXPECT_EQ(joined(list_folder(writer.path(7))), "m.bin meta.txt parameters.bin v.bin");
    for (const std::vector<int>& cuts : all_cuts) {
      SavedRun reader(writer.folder, cuts);
      const std::optional<CheckpointMeta> meta = reader.load();
      ASSERT_TRUE(meta);
      EXPECT_EQ(meta->step, 7);
      EXPECT_EQ(meta->position, writer.meta.position);
      EXPECT_EQ(meta->extra, writer.meta.extra);
      EXPECT_EQ(reader.difference(7), "") << i;
    }
  }
}

// A tensor larger than the transfer buffer, in pieces; the reader of single tensors finds it.
TEST(Checkpoint, LargeTensor) {
  const TemporaryFolder folder;
  const GPT2Config config = make_gpt2_config(3, 1, 20, 65536, 4);  // wte: 1310720 elements, 1.25 times the buffer
  SavedRun run(folder.path(), {0, 1, 3}, config);
  run.save(2);
  EXPECT_EQ(stored_difference(run.path(2), 2), "");
  SavedRun reader(folder.path(), kOneStage, config);
  ASSERT_TRUE(reader.load());
  EXPECT_EQ(reader.difference(2), "");
  const CheckpointReader files(run.path(2));
  const ParameterTensor& tensor = run.table.tensors[3];
  const std::vector<float> values = files.read_tensor(CheckpointFile::kSecondMoment, tensor);
  EXPECT_EQ(first_difference(values.data(), 2, tensor.offset, tensor.elements, 2), "");
}

// Every damage of the newest checkpoint is named with its reason, and the one before it is used, whole.
TEST(Checkpoint, DamagedNewestIsNamedAndThePreviousUsed) {
  struct Damage {
    std::string reason;
    std::function<void(const std::string&)> inflict;
  };
  std::vector<Damage> damages = {
      {"meta.txt is missing", [](const std::string& path) { unlink((path + "/meta.txt").c_str()); }},
      {"meta.txt is missing", [](const std::string& path) { remove_folder(path), overwrite(path, "a file"); }},
      {"meta.txt is cut off", [](const std::string& path) { cut(path + "/meta.txt", 100); }},
      {"meta.txt is not that of a checkpoint", [](const std::string& path) { cut(path + "/meta.txt", 0); }},
      {"meta.txt is not that of a checkpoint", [](const std::string& path) { cut(path + "/meta.txt", 1ull << 32); }},
      {"meta.txt is not that of a checkpoint",
       [](const std::string& path) { overwrite(path + "/meta.txt", "step 9"); }},
      {"meta.txt was changed", [](const std::string& path) { flip_bit(path + "/meta.txt", 20, 0); }},
      {"meta.txt has format 7", [](const std::string& path) { overwrite(path + "/meta.txt", "format = 7\n"); }},
      {"it is a checkpoint of step 10", [](const std::string& path) {
         overwrite(path + "/meta.txt", read_checkpoint_text(parent_folder(path) + "/" + checkpoint_name(10)));
       }}};
  for (const std::string name : {"parameters.bin", "m.bin", "v.bin"}) {
    damages.push_back({name + " is missing", [=](const std::string& path) { unlink((path + "/" + name).c_str()); }});
    damages.push_back(
        {name + " has 48191 bytes, expected 48192", [=](const std::string& path) { cut(path + "/" + name, 48191); }});
    damages.push_back({name + " has 48196 bytes", [=](const std::string& path) { cut(path + "/" + name, 48196); }});
    for (uint64_t byte : {0, 24001, 48191}) {
      damages.push_back({name + " is damaged", [=](const std::string& path) { flip_bit(path + "/" + name, byte, 5); }});
    }
  }
  for (const Damage& damage : damages) {
    const TemporaryFolder folder;
    SavedRun writer(folder.path(), {0, 2, 3});
    for (int step : {10, 20}) writer.save(step);
    damage.inflict(writer.path(20));
    SavedRun reader(folder.path(), {0, 1, 3});
    std::optional<CheckpointMeta> meta;
    const std::string text = warnings([&] { meta = reader.load(); });
    ASSERT_TRUE(meta) << damage.reason;
    EXPECT_EQ(meta->step, 10);
    EXPECT_EQ(reader.difference(10), "") << damage.reason;
    EXPECT_TRUE(contains(text, "warning: checkpoint " + writer.path(20) + " cannot be used: " + damage.reason)) << text;
    EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
  }
}

// No checkpoint: a fresh start. Only damaged ones: an error, since starting over would hide the loss.
TEST(Checkpoint, NoneAndNoneUsable) {
  const TemporaryFolder folder;
  SavedRun run(folder / "ckpt");
  EXPECT_FALSE(run.load());
  make_folders(folder / "ckpt/step-00000005.tmp");
  EXPECT_FALSE(run.load());
  run.save(5);
  run.save(6);
  cut(run.path(5) + "/m.bin", 0);
  cut(run.path(6) + "/meta.txt", 50);
  std::string error;
  const std::string text = warnings([&] { error = environment_error_text([&] { run.load(); }); });
  EXPECT_TRUE(contains(error, "none of the 2 checkpoints can be used")) << error;
  EXPECT_TRUE(contains(text, "step-00000005")) << text;
  EXPECT_TRUE(contains(text, "step-00000006")) << text;
}

// Another model is the user's mistake: both values and the remedy, nothing falls back to an older checkpoint.
TEST(Checkpoint, OtherModel) {
  const TemporaryFolder folder;
  SavedRun writer(folder.path());
  writer.save(1);
  SavedRun other(folder.path(), kOneStage, make_gpt2_config(3, 4, 16, 50, 16));
  const std::string text = user_error_text([&] { other.load(); });
  EXPECT_TRUE(contains(text, "heads 2 (this run: 4), max_seq_len 8 (this run: 16); use the options")) << text;
  ParameterTable renamed = writer.table;
  renamed.tensors[3].name = "something else";
  CheckpointStore store(folder.path(), alone(), renamed, writer.stages.stream());
  const std::string text2 = user_error_text([&] { store.load_newest(writer.stages.optimizers(), writer.meta); });
  EXPECT_TRUE(contains(text2, "is of another model: 40 tensors")) << text2;
}

// Saving a step again replaces it; leftovers of killed runs go; an interrupted replacement still loads.
TEST(Checkpoint, ReplacesAndCleansUp) {
  const TemporaryFolder folder;
  SavedRun run(folder.path());
  run.save(4);
  flip_bit(run.path(4) + "/v.bin", 5, 1);
  make_folders(run.path(4) + ".tmp");
  overwrite(run.path(4) + ".tmp/m.bin", std::string(100000, 'x'));
  make_folders(run.path(9) + ".tmp/deep/er");
  overwrite(folder / "notes.txt", "mine");
  run.save(4);
  EXPECT_EQ(stored_difference(run.path(4), 4), "");
  EXPECT_EQ(joined(list_folder(folder.path())), "notes.txt step-00000004");

  rename_durably(run.path(4), run.path(4) + ".old");  // killed between the two renames
  run.stages.fill(1);
  ASSERT_TRUE(run.load());
  EXPECT_EQ(run.difference(4), "");
  run.save(4);
  EXPECT_EQ(joined(list_folder(folder.path())), "notes.txt step-00000004");
}

// prune() deletes what the rules say, and what a damaged checkpoint leaves is protected by the one that was loaded.
TEST(Checkpoint, Prune) {
  const TemporaryFolder folder;
  SavedRun run(folder.path());
  for (int step : {1, 2, 3, 4, 5, 6}) run.save(step);
  run.store.prune(2, 3);
  EXPECT_EQ(joined(list_folder(folder.path())), "step-00000003 step-00000005 step-00000006");
  cut(run.path(5) + "/m.bin", 8);
  cut(run.path(6) + "/m.bin", 8);
  SavedRun next(folder.path());
  warnings([&] { ASSERT_EQ(next.load()->step, 3); });
  make_folders(next.path(9));  // of who knows whom
  next.store.prune(1, 0);
  EXPECT_EQ(joined(list_folder(folder.path())), "step-00000003 step-00000005 step-00000006 step-00000009");
  remove_folder(next.path(9));
  next.save(6);
  next.store.prune(1, 0);
  EXPECT_EQ(joined(list_folder(folder.path())), "step-00000006");
}

namespace {

// A save of step 2 that must fail with one line that says `reason`; step 1 stays, nothing else does.
void expect_failed_save(SavedRun& run, const std::string& reason) {
  const std::string text = environment_error_text([&] { run.save(2); });
  EXPECT_TRUE(contains(text, "checkpoint of step 2 not written: ")) << text;
  EXPECT_TRUE(contains(text, reason)) << text;
  EXPECT_FALSE(contains(text, "\n")) << text;
  EXPECT_EQ(joined(list_folder(run.folder)), "step-00000001");
  ASSERT_TRUE(run.load());
  EXPECT_EQ(run.difference(1), "");
}

}  // namespace

// A full disk, met while the content is written.
TEST(CheckpointFailure, FullDisk) {
  const TemporaryFolder folder;
  if (mount("none", folder.path().c_str(), "tmpfs", 0, "size=256k") != 0)
    GTEST_SKIP() << "needs a right to mount tmpfs";
  {
    SavedRun run(folder.path());
    run.save(1);
    expect_failed_save(run, "No space left on device; free some space");
  }
  EXPECT_EQ(umount(folder.path().c_str()), 0);
}

// A quota (here: the largest file that the process may write), met before any content is written.
TEST(CheckpointFailure, FileSizeLimit) {
  const TemporaryFolder folder;
  SavedRun run(folder.path());
  run.save(1);
  rlimit old, limit;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old), 0);
  limit = old;
  limit.rlim_cur = 40000;
  signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  expect_failed_save(run, "File too large");
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &old), 0);
}

// A run folder that cannot be written: a file stands in its place, or the file system is read-only.
TEST(CheckpointFailure, UnwritableFolder) {
  const TemporaryFolder folder;
  overwrite(folder / "run", "a file");
  SavedRun blocked(folder / "run/ckpt");
  const std::string text = environment_error_text([&] { blocked.save(2); });
  EXPECT_TRUE(contains(text, "run: creating the folder failed")) << text;
  EXPECT_EQ(read_whole_file(folder / "run", "file"), "a file");

  const TemporaryFolder mounted;
  if (mount("none", mounted.path().c_str(), "tmpfs", 0, "size=1m") != 0) GTEST_SKIP() << "needs a right to mount tmpfs";
  {
    SavedRun run(mounted.path());
    run.save(1);
    ASSERT_EQ(mount("none", mounted.path().c_str(), "tmpfs", MS_REMOUNT | MS_RDONLY, "size=1m"), 0);
    expect_failed_save(run, "Read-only file system");
  }
  EXPECT_EQ(umount(mounted.path().c_str()), 0);
}

namespace {

// Writes checkpoints for ever: new steps, and each step a second time (replacement). A byte on `fd` before each.
[[noreturn]] void save_loop(const std::string& folder, int fd) {
  SavedRun run(folder);
  const std::optional<CheckpointMeta> last = run.load();
  bool again = false;
  for (int step = last ? last->step : 1;; step += again, again = !again) {
    run.stages.fill(step);
    if (write(fd, "x", 1) != 1) _exit(3);
    run.write(step);
    run.store.prune(2, 0);
  }
}

pid_t start_save_loop(const std::string& folder, int fd) {
  const pid_t child = fork();
  if (child != 0) return child;
  setenv("TMPDIR", parent_folder(folder).c_str(), 1);  // what a killed MPI process leaves goes with the test's folder
  execl("/proc/self/exe", "test_checkpoint", "--save-loop", folder.c_str(), std::to_string(fd).c_str(), nullptr);
  _exit(4);
}

}  // namespace

namespace {

double seconds_of_a_save() {
  const TemporaryFolder folder;
  SavedRun run(folder.path());
  run.save(1);
  const Clock::time_point start = Clock::now();
  run.write(1);
  return seconds_since(start);
}

}  // namespace

// kill -9 at random moments of saving, replacing and deleting: every name is a whole checkpoint, none is lost.
TEST(CheckpointFailure, KilledAtAnyMoment) {
  const TemporaryFolder folder;
  const std::string checkpoints = folder / "ckpt";
  const double save_s = seconds_of_a_save();
  int newest = 0, unfinished = 0;
  for (uint64_t round = 0; round < 16; ++round) {
    int ends[2];
    ASSERT_EQ(pipe(ends), 0);
    const pid_t child = start_save_loop(checkpoints, ends[1]);
    close(ends[1]);
    char byte;
    const int saves = 1 + static_cast<int>(round % 4);  // killed within the 1st .. 4th save
    for (int i = 0; i < saves; ++i) ASSERT_EQ(read(ends[0], &byte, 1), 1);
    std::this_thread::sleep_for(std::chrono::duration<double>(random_uniform(1, 2, round) * 1.2 * save_s));
    kill(child, SIGKILL);
    int status;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status));
    close(ends[0]);
    const std::vector<CheckpointName> found = list_checkpoints(checkpoints);
    ASSERT_TRUE(saves == 1 || !found.empty());
    for (const CheckpointName& checkpoint : found) {
      EXPECT_EQ(stored_difference(checkpoints + "/" + checkpoint.name, checkpoint.step), "") << checkpoint.name;
    }
    if (path_exists(checkpoints)) unfinished += list_folder(checkpoints).size() != found.size();
    const int step = found.empty() ? 0 : found.front().step;
    EXPECT_GE(step, newest) << "a checkpoint was lost";
    newest = step;
  }
  EXPECT_GT(unfinished, 0) << "no kill hit a save: the test shows nothing";
  SavedRun run(checkpoints);
  ASSERT_TRUE(run.load());
  EXPECT_EQ(run.difference(newest), "");
}

int main(int argc, char** argv) {
  if (argc == 4 && std::string(argv[1]) == "--save-loop") save_loop(argv[2], atoi(argv[3]));
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}

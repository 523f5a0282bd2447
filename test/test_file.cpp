// test_file.cpp -- file helpers: 64-bit offsets, short files, full disks, atomic replacement.
#include "llmc/file.h"

#include <gtest/gtest.h>

#include "test/host_test.h"

// Reading and writing beyond 4 GiB reaches the right place (sparse file), and the size is right.
TEST(File, SixtyFourBitOffsets) {
  const TemporaryFolder folder;
  const uint64_t far = (5ull << 30) + 3;
  File file = File::create(folder / "big");
  file.pwrite_all("near", 4, 3 + (1ull << 30));  // where 32-bit arithmetic would put "far"
  file.pwrite_all("far!", 4, far);
  EXPECT_EQ(file.size(), far + 4);
  char text[5] = {};
  File::open_to_read(folder / "big", "file").pread_all(text, 4, far);
  EXPECT_STREQ(text, "far!");
}

// A file that ends early is an environment error that says where and how much is missing.
TEST(File, ShortRead) {
  const TemporaryFolder folder;
  const File file = File::open_to_read(folder.write("f", "12345"), "file");
  char text[10];
  EXPECT_EQ(environment_error_text([&] { file.pread_all(text, 10, 2); }),
            folder / "f" + ": reading failed: the file ends at byte 5, expected 7 more (was it cut while in use?)");
}

// Writing to a full disk names the file, the reason and the remedy, with and without an offset.
TEST(File, FullDisk) {
  File file = File::open_to_append("/dev/full");
  const std::string expected = "/dev/full: writing failed: No space left on device; free some space and start again";
  EXPECT_EQ(environment_error_text([&] { file.write_all("text"); }), expected);
  EXPECT_EQ(environment_error_text([&] { file.pwrite_all("text", 4, 0); }), expected);
}

// Missing files and folders in place of files are user errors that say what was wanted.
TEST(File, OpenErrors) {
  const TemporaryFolder folder;
  EXPECT_EQ(user_error_text([&] { File::open_to_read(folder / "none", "token file"); }),
            "cannot open token file " + folder / "none" + ": No such file or directory");
  EXPECT_EQ(user_error_text([&] { File::open_to_read(folder.path(), "token file"); }),
            folder.path() + " is a folder, expected a token file");
  EXPECT_TRUE(contains(environment_error_text([&] { File::create(folder / "no/file"); }), folder / "no/file"));
  EXPECT_TRUE(contains(user_error_text([&] { list_folder(folder / "none"); }), folder / "none"));
}

// A moved file is closed once, and assigning over an open file closes that one.
TEST(File, Move) {
  const TemporaryFolder folder;
  File a = File::create(folder / "a");
  const int first = a.descriptor();
  File b = std::move(a);
  EXPECT_FALSE(a.is_open());
  EXPECT_EQ(b.descriptor(), first);
  b = File::create(folder / "b");
  EXPECT_EQ(fcntl(first, F_GETFD), -1) << "the old descriptor is still open";
  EXPECT_EQ(b.path(), folder / "b");
}

// Appending goes to the end also after a cut; open_to_update keeps what is there.
TEST(File, AppendUpdateTruncate) {
  const TemporaryFolder folder;
  folder.write("f", "123456");
  File file = File::open_to_append(folder / "f");
  file.truncate(2);
  file.write_all("ab");
  file.sync();
  file.close();
  EXPECT_EQ(read_whole_file(folder / "f", "file"), "12ab");
  File::open_to_update(folder / "f").pwrite_all("X", 1, 1);
  EXPECT_EQ(read_whole_file(folder / "f", "file"), "1Xab");
}

// An atomic write replaces the whole content, leaves no temporary file, and a failed one leaves the old content.
TEST(File, AtomicWrite) {
  const TemporaryFolder folder;
  folder.write("f", "a longer old content");
  write_file_atomically(folder / "f", "new");
  EXPECT_EQ(read_whole_file(folder / "f", "file"), "new");
  ASSERT_EQ(symlink("/dev/full", (folder / "f.tmp").c_str()), 0);
  EXPECT_TRUE(contains(environment_error_text([&] { write_file_atomically(folder / "f", "newer"); }), "No space left"));
  EXPECT_EQ(read_whole_file(folder / "f", "file"), "new");
  EXPECT_EQ(list_folder(folder.path()), std::vector<std::string>{"f"});
}

// Folders are made with all that is missing above them, twice is fine, and a file in the way is named.
TEST(File, MakeFolders) {
  const TemporaryFolder folder;
  make_folders(folder / "a/b/c");
  make_folders(folder / "a/b/c/");
  make_folders("/");
  EXPECT_TRUE(is_folder(folder / "a/b/c"));
  folder.write("a/file", "");
  EXPECT_TRUE(contains(environment_error_text([&] { make_folders(folder / "a/file/d"); }), folder / "a/file"));
  EXPECT_EQ(parent_folder("a/b"), "a");
  EXPECT_EQ(parent_folder("a"), ".");
  EXPECT_EQ(parent_folder("/a"), "/");
}

// A durable rename replaces a file and reports what cannot be renamed.
TEST(File, Rename) {
  const TemporaryFolder folder;
  rename_durably(folder.write("a", "new"), folder.write("b", "old"));
  EXPECT_EQ(read_whole_file(folder / "b", "file"), "new");
  EXPECT_TRUE(contains(environment_error_text([&] { rename_durably(folder / "a", folder / "b"); }), folder / "b"));
}

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}

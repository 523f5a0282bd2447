// test_options.cpp -- the option table: every option, every kind of mistake, precedence, and the saved configuration.
#include "llmc/train_options.h"

#include <gtest/gtest.h>

#include "test/host_test.h"

namespace {

TrainOptions parse(std::vector<const char*> words, CommandLine* command_line = nullptr) {
  words.insert(words.begin(), "train_gpt2");
  TrainOptions options;
  const CommandLine result = train_option_table().parse(static_cast<int>(words.size()), words.data(), options);
  if (command_line) *command_line = result;
  return options;
}
std::string parse_error(const std::vector<const char*>& words) {
  return user_error_text([&] { parse(words); });
}
std::string resolve_error(const std::vector<const char*>& words, int ranks) {
  return user_error_text([&] {
    TrainOptions options = parse(words);
    resolve_train_options(options, ranks);
  });
}
TrainOptions resolved(const std::vector<const char*>& words, int ranks) {
  TrainOptions options = parse(words);
  resolve_train_options(options, ranks);
  return options;
}
bool is_text(const Option<TrainOptions>& row) { return std::holds_alternative<std::string TrainOptions::*>(row.field); }
bool is_switch(const Option<TrainOptions>& row) { return std::holds_alternative<bool TrainOptions::*>(row.field); }
bool is_real(const Option<TrainOptions>& row) { return std::holds_alternative<double TrainOptions::*>(row.field); }

}  // namespace

// Names, aliases, defaults, ranges and help of all options are what the golden file says; a change must be deliberate.
TEST(Options, HelpIsPinned) {
  EXPECT_EQ(train_option_table().help_text(), read_whole_file("test/golden/help.txt", "golden file"))
      << "if the change is meant: ./train_gpt2 --help > test/golden/help.txt";
}

// Every option is set by its long name, by --name=value and by llm.c's alias, and no other field changes.
TEST(Options, EveryNameSetsItsField) {
  for (const auto& row : train_option_table().rows()) {
    const std::string value = *row.choices   ? option_detail::split(row.choices, '|')[0]
                              : is_text(row) ? "some text"
                              : is_real(row) ? "0.125"
                                             : "1";
    const std::string defaults = train_option_table().config_text(TrainOptions());
    const std::string line = "\n" + std::string(row.name) + " = ";
    std::string expected = defaults;
    const size_t begin = expected.find(line) + line.size();
    ASSERT_NE(defaults.find(line), std::string::npos) << row.name;
    expected.replace(begin, expected.find('\n', begin) - begin, value);
    const std::string name = "--" + std::string(row.name), joined = name + "=" + value;
    EXPECT_EQ(train_option_table().config_text(parse({name.c_str(), value.c_str()})), expected);
    EXPECT_EQ(train_option_table().config_text(parse({joined.c_str()})), expected);
    if (!*row.alias) continue;
    const std::string alias = "-" + std::string(row.alias);
    EXPECT_EQ(train_option_table().config_text(parse({alias.c_str(), value.c_str()})), expected);
  }
}

// Each numeric option refuses text that is not wholly a number, and numbers that do not fit or are out of its range,
// naming itself and the value; each switch refuses all but 0 and 1; each choice refuses an unknown name.
TEST(Options, EveryOptionRefusesBadValues) {
  for (const auto& row : train_option_table().rows()) {
    const std::string name = "--" + std::string(row.name);
    std::vector<std::string> bad;
    if (*row.choices) bad = {"", "bogus", std::string(row.choices)};
    if (is_switch(row)) bad = {"", "2", "-1", "yes", "true", "01", "1 "};
    if (!is_text(row) && !is_switch(row)) {
      bad = {"",
             "12abc",
             "abc",
             "nan",
             "inf",
             "-inf",
             "0x10",
             " 7",
             "7 ",
             "1e999",
             "--7",
             "1,5",
             "1.5.2",
             "+",
             "1_000",
             "-",
             "99999999999999999999999999",
             "1e+"};
      if (is_real(row)) bad[17] = "-1e400";
      if (is_real(row)) bad.push_back("1e-400");
      if (!is_real(row)) bad.insert(bad.end(), {"1.5", "1e3", "9223372036854775808", "-9223372036854775809"});
      if (std::holds_alternative<int TrainOptions::*>(row.field)) bad.push_back("2147483648");
      EXPECT_FALSE(std::isinf(row.range.minimum)) << name << " has no lower end";
      const double step = is_real(row) ? 1e-3 : 1;
      bad.push_back(format_text("%.17g", row.range.above_minimum ? row.range.minimum : row.range.minimum - step));
      if (!std::isinf(row.range.maximum)) {
        bad.push_back(format_text("%.17g", row.range.below_maximum ? row.range.maximum : row.range.maximum + step));
      }
    }
    if (is_real(row)) bad.erase(std::remove(bad.begin(), bad.end(), "99999999999999999999999999"), bad.end());
    for (const std::string& value : bad) {
      const std::string message = parse_error({name.c_str(), value.c_str()});
      EXPECT_TRUE(contains(message, name) && contains(message, value)) << name << " " << value << ": " << message;
      EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    }
  }
}

// The ends of a range belong to it or not as the table says, and the message names what is allowed.
TEST(Options, RangeEnds) {
  EXPECT_EQ(parse({"--beta1", "0"}).beta1, 0.0);
  EXPECT_EQ(parse_error({"--beta1", "1"}), "--beta1 1 is out of range; it must be at least 0 and below 1");
  EXPECT_EQ(parse_error({"--eps", "0"}), "--eps 0 is out of range; it must be above 0");
  EXPECT_EQ(parse({"-q", "1"}).lr_final, 1.0);
  EXPECT_EQ(parse_error({"-q", "1.5"}), "--lr-final (-q) 1.5 is out of range; it must be from 0 to 1");
  EXPECT_EQ(parse({"-x", "-1"}).steps, -1);
  EXPECT_EQ(parse_error({"-x", "-2"}), "--steps (-x) -2 is out of range; it must be at least -1");
  EXPECT_EQ(parse_error({"-z", "2"}), "--zero (-z) 2 is out of range; it must be from 0 to 1");
  EXPECT_EQ(parse_error({"-b", "3000000000"}),
            "--micro-batch (-b) 3000000000 is out of range; it must be at most 2147483647");
  EXPECT_EQ(parse({"--seed", "9223372036854775807"}).seed, INT64_MAX);
  EXPECT_EQ(parse_error({"-k", "cosin"}),
            "--lr-schedule (-k) \"cosin\" is not known; use constant, linear, cosine or wsd");
}

// Unknown options name the nearest one, or point to --help when none is near; stray words and missing values are
// errors.
TEST(Options, UnknownAndMisplacedWords) {
  EXPECT_EQ(parse_error({"--mirco-batch", "4"}), "unknown option --mirco-batch; did you mean --micro-batch?");
  EXPECT_EQ(parse_error({"--weight_decay", "4"}), "unknown option --weight_decay; did you mean --weight-decay?");
  EXPECT_EQ(parse_error({"--checkpoint", "4"}), "unknown option --checkpoint; did you mean --checkpoint-every?");
  EXPECT_EQ(parse_error({"-steps", "4"}), "unknown option -steps; did you mean --steps?");
  EXPECT_EQ(parse_error({"--confg", "4"}), "unknown option --confg; did you mean --config?");
  EXPECT_EQ(parse_error({"--frobnicate", "4"}), "unknown option --frobnicate; see --help");
  EXPECT_EQ(parse_error({"-w", "1"}), "unknown option -w; see --help");
  EXPECT_EQ(parse_error({"-", "1"}), "\"-\" is not an option; options start with --, see --help");
  EXPECT_EQ(parse_error({"--", "1"}), "\"--\" is not an option; options start with --, see --help");
  EXPECT_EQ(parse_error({"--steps", "1\n2"}), "--steps (-x) \"1\\n2\" is not a whole number; it must be at least -1");
  EXPECT_EQ(parse_error({"-b", "4", "8"}), "\"8\" is not an option; options start with --, see --help");
  EXPECT_EQ(parse_error({"--steps"}), "--steps needs a value; see --help");
  EXPECT_EQ(parse_error({"--out", "--steps", "3"}), "--out needs a value; see --help");
  EXPECT_EQ(parse_error({"--out", "--steps=3"}), "--out needs a value; see --help");
  EXPECT_EQ(parse_error({"-o", "-x", "3"}), "-o needs a value; see --help");
  EXPECT_EQ(parse_error({"--help=1"}), "--help takes no value");
  EXPECT_EQ(parse({"--sample-prompt=--steps"}).sample_prompt, "--steps");
  EXPECT_EQ(parse({"--sample-prompt", "-- a = b"}).sample_prompt, "-- a = b");
}

// An option given twice is an error also when once by alias; --help and --config count as options.
TEST(Options, Duplicates) {
  EXPECT_EQ(parse_error({"--steps", "3", "--steps", "3"}), "--steps is given twice; give it once");
  EXPECT_EQ(parse_error({"--steps", "3", "-x", "4"}), "--steps is given twice; give it once");
  EXPECT_EQ(parse_error({"--help", "--help"}), "--help is given twice; give it once");
  EXPECT_EQ(parse_error({"--config", "a", "--config=a"}), "--config is given twice; give it once");
  CommandLine command_line;
  parse({"--help"}, &command_line);
  EXPECT_TRUE(command_line.help);
}

// defaults < configuration file < flags, wherever --config stands.
TEST(Options, Precedence) {
  const TemporaryFolder folder;
  const std::string file = folder.write("c.txt", "# comment\n\n  steps =  7 \r\nlr=0.5\nout = a folder # 1\n");
  for (bool config_first : {true, false}) {
    const TrainOptions o = config_first ? parse({"--config", file.c_str(), "-l", "0.25"})
                                        : parse({"-l", "0.25", "--config", file.c_str()});
    EXPECT_EQ(o.steps, 7);
    EXPECT_EQ(o.lr, 0.25);
    EXPECT_EQ(o.micro_batch, TrainOptions().micro_batch);
    EXPECT_EQ(o.out, "a folder # 1");
  }
}

// Mistakes in a configuration file name file and line.
TEST(Options, ConfigFileErrors) {
  const TemporaryFolder folder;
  const auto message = [&](const std::string& content) {
    const std::string file = folder.write("c.txt", content);
    const std::string text = parse_error({"--config", file.c_str()});
    EXPECT_EQ(text.compare(0, file.size() + 1, file + ":"), 0) << text;
    return text.substr(file.size() + 1);
  };
  EXPECT_EQ(message("\nsteps = 1\nstep = 2\n"), "3: unknown option step; did you mean steps?");
  EXPECT_EQ(message("x = 2\n"), "1: unknown option x; see --help");
  EXPECT_EQ(message("config = other\n"), "1: unknown option config; it belongs on the command line");
  EXPECT_EQ(message("steps = 1\nlr = 2\nsteps = 3\n"), "3: steps is given twice; give it once");
  EXPECT_EQ(message("steps 1\n"), "1: \"steps 1\" is not `name = value`");
  EXPECT_EQ(message("steps = 1x"), "1: steps \"1x\" is not a whole number; it must be at least -1");
  EXPECT_EQ(message("out =\n"), "1: out has no value; write \"\" for an empty text");
  EXPECT_EQ(message("out = \"a"), "1: out \"\\\"a\": the closing quote must be the last character");
  EXPECT_EQ(message("out = \"a\" b"), "1: out \"\\\"a\\\" b\": the closing quote must be the last character");
  EXPECT_TRUE(contains(message("out = \"a\\q\""), "unknown escape"));
  EXPECT_TRUE(contains(message("out = \"a\\x4\""), "unknown escape"));
  EXPECT_EQ(message(std::string("\x01\0\n\xff", 4)), "1: \"\\x01\\x00\" is not `name = value`") << "a foreign file";
  EXPECT_TRUE(contains(parse_error({"--config", (folder / "none").c_str()}), "No such file"));
  EXPECT_TRUE(contains(parse_error({"--config", folder.path().c_str()}), "is a folder"));
  EXPECT_TRUE(contains(parse_error({"--config", ""}), "names no file"));
}

// What config_text writes gives back the same bits in every field, for awkward texts and numbers too.
TEST(Options, SavedConfigurationReproduces) {
  const TemporaryFolder folder;
  TrainOptions o;
  o.lr = 0.1 + 0.2;
  o.eps = 4.9e-300;
  o.clip = 1.0 / 3.0;
  o.weight_decay = 123456789.125;
  o.steps = INT32_MAX;
  o.seed = INT64_MAX;
  o.micro_batch = INT32_MAX;
  o.shuffle = false;
  o.resume = true;
  o.schedule = "gpipe";
  for (const std::string& text : {std::string(""), std::string("  a b "), std::string("\"q\" \\ \n\t\r\x01\x7f end"),
                                  std::string("# = \xc3\xa9\xff"), std::string("a\0b", 3), std::string("\"")}) {
    o.sample_prompt = text;
    const std::string saved = train_option_table().config_text(o);
    const std::string file = folder.write("config.txt", saved);
    const TrainOptions read = parse({"--config", file.c_str()});
    EXPECT_EQ(read.sample_prompt, text);
    EXPECT_EQ(read.lr, o.lr);
    EXPECT_EQ(read.eps, o.eps);
    EXPECT_EQ(read.clip, o.clip);
    EXPECT_EQ(read.weight_decay, o.weight_decay);
    EXPECT_EQ(train_option_table().config_text(read), saved);
  }
}

// --batch-tokens 0 becomes one micro-batch per replica, the model without --load gets its sizes; doing it again changes
// nothing.
TEST(TrainOptions, Resolve) {
  TrainOptions o = resolved({"-b", "3", "-t", "8", "--pp", "2"}, 8);
  EXPECT_EQ(o.batch_tokens, 3 * 8 * 4);
  EXPECT_EQ(micro_batches_per_step(o), 4);
  EXPECT_EQ(o.layers, 4);
  EXPECT_EQ(o.channels, 128);
  EXPECT_EQ(o.heads, 4);
  EXPECT_EQ(o.vocab, 256);
  EXPECT_EQ(o.seq_max, 8);
  const std::string first = train_option_table().config_text(o);
  resolve_train_options(o, 8);
  EXPECT_EQ(train_option_table().config_text(o), first);
  EXPECT_EQ(resolved({"-e", "d12", "--vocab", "256"}, 1).layers, 0);
}

// Every rule between options refuses what breaks it and names a value that works.
TEST(TrainOptions, RulesBetweenOptions) {
  EXPECT_EQ(resolve_error({"-b", "4", "-t", "8", "-d", "100"}, 1),
            "--batch-tokens 100 is not a multiple of --micro-batch 4 x --seq-len 8 = 32; use 96 or 128");
  EXPECT_EQ(resolve_error({"-b", "4", "-t", "8", "-d", "10"}, 1),
            "--batch-tokens 10 is not a multiple of --micro-batch 4 x --seq-len 8 = 32; use 32");
  EXPECT_EQ(resolve_error({"-b", "4", "-t", "8", "-d", "64"}, 3),
            "--batch-tokens 64 is 2 micro-batches, too few for 3 replicas; use --batch-tokens 96 or more, or at most 2 "
            "ranks");
  EXPECT_EQ(resolve_error({"--pp", "2"}, 1),
            "--pp 2 needs at least 2 ranks, there is 1; start with mpirun -np 2 or use --pp 1");
  EXPECT_EQ(resolve_error({"--pp", "2"}, 5), "--pp 2 does not divide 5 ranks; start with mpirun -np 4 or 6");
  EXPECT_EQ(resolve_error({"--pp", "7"}, 7),
            "--pp 7 is 7 stages, too many for 4 blocks: at most 6 (embedding, blocks, head); use --pp 6");
  EXPECT_EQ(resolve_error({"-b", "2000000", "-t", "2000"}, 1),
            "--micro-batch 2000000 x --seq-len 2000 = 4000000000 tokens do not fit one micro-batch; use --micro-batch "
            "1073741");
  EXPECT_EQ(resolve_error({"--channels", "100", "--heads", "3"}, 1),
            "--heads 3 does not divide --channels 100; use 99 or 102 channels");
  EXPECT_EQ(resolve_error({"-t", "64", "--seq-max", "32"}, 1),
            "--seq-len 64 is longer than the model's --seq-max 32; use --seq-len 32");
  EXPECT_EQ(resolve_error({"-x", "10", "-u", "11"}, 1),
            "--warmup 11 is longer than --steps 10; use --warmup 10 or less");
  EXPECT_EQ(resolve_error({"-j", ""}, 1), "--val-every 20 needs --val-data; give it, or use --val-every 0");
  EXPECT_EQ(resolve_error({"-m", "0"}, 1),
            "--val-batches 0 validates on nothing; use --val-batches -1 for all data, or --val-every 0 for never");
  EXPECT_TRUE(contains(resolve_error({"-i", ""}, 1), "--train-data names no file"));
  EXPECT_EQ(resolve_error({"-n", "5"}, 1), "--checkpoint-every needs a run folder; give --out FOLDER");
  EXPECT_EQ(resolve_error({"-y", "1"}, 1), "--resume needs a run folder; give --out FOLDER");
  EXPECT_EQ(resolve_error({"--save-model", "1"}, 1), "--save-model needs a run folder; give --out FOLDER");
}

// Stages that do not go with the ranks, the schedule, the partition or the blocks: the message has what goes.
TEST(TrainOptions, PipelineRules) {
  EXPECT_EQ(resolve_error({"--partition", "2,2,1", "--pp", "2"}, 2),
            "--partition 2,2,1 has 3 counts, --pp 2 and schedule 1f1b needs 2; give one count for each stage");
  EXPECT_EQ(resolve_error({"--partition", "1,1,1,1", "--pp", "2"}, 2),
            "--partition 1,1,1,1 has 4 counts, --pp 2 and schedule 1f1b needs 2; give one count for each stage");
  EXPECT_EQ(resolve_error({"--partition", "1,1,1,1,0", "--pp", "2", "--schedule", "interleaved"}, 2),
            "--partition 1,1,1,1,0 has 5 counts, --pp 2 and schedule interleaved needs 4 or another multiple of the "
            "ranks; give one count for each stage");
  EXPECT_EQ(resolve_error({"--partition", "1,1,2", "--pp", "2", "--schedule", "auto", "--chunks", "2"}, 2),
            "--partition 1,1,2 has 3 counts, --pp 2 with --chunks 2 needs 4; give one count for each stage");
  EXPECT_EQ(resolve_error({"--partition", "2,1", "--pp", "2"}, 2),
            "--partition 2,1 places 3 blocks, the model has 4; use --partition 2,2");
  EXPECT_EQ(resolve_error({"--partition", "0,0", "--pp", "2"}, 2),
            "--partition 0,0 places 0 blocks, the model has 4; use --partition 2,2");
  for (const char* wrong : {"", "uneven", "2,,2", "2,2,", "-1,5", "2,x", "2, 2", "9999999,1"}) {
    EXPECT_TRUE(contains(resolve_error({"--partition", wrong, "--pp", "2"}, 2), "use even, auto or counts such as"));
  }
  const std::string unknown = resolve_error({"--schedule", "zb"}, 1);
  EXPECT_EQ(unknown.find("--schedule \"zb\" is not known; use auto, gpipe, 1f1b, "), 0u) << unknown;
  EXPECT_TRUE(contains(unknown, "or a file that ends in .csv"));
  EXPECT_EQ(resolve_error({"--chunks", "2", "--pp", "2"}, 2),
            "--chunks 2: schedule 1f1b takes 1 on each rank; use --chunks 1");
  EXPECT_EQ(resolve_error({"--chunks", "3", "--pp", "2", "--schedule", "zb-v"}, 2),
            "--chunks 3: schedule zb-v takes 2 on each rank; use --chunks 2");
  EXPECT_EQ(resolve_error({"--chunks", "2", "--schedule", "a.csv"}, 1),
            "--chunks 2: the stages of each rank are in --schedule a.csv; leave --chunks out");
  EXPECT_EQ(resolve_error({"--chunks", "4", "--pp", "2", "--schedule", "interleaved"}, 2),
            "--pp 2 with 4 chunks is 8 stages, too many for 4 blocks: at most 6 (embedding, blocks, head); use "
            "--chunks 3");
  EXPECT_EQ(resolve_error({"--pp", "4", "--schedule", "zb-v"}, 4),
            "--pp 4 with 2 chunks is 8 stages, too many for 4 blocks: at most 6 (embedding, blocks, head); use --pp "
            "3");
  for (const char* wrong : {"", "4", "-1", "none", "01"}) {
    EXPECT_TRUE(contains(resolve_error({"--recompute", wrong}, 1), "is not known; use auto, 0, 1, 2 or 3"));
  }
  EXPECT_EQ(resolved({"-r", "2"}, 1).recompute, "2");
}

// --plan stands alone or with 0 or 1; what belongs to it is refused without it, and what it cannot do with it.
TEST(TrainOptions, Plan) {
  EXPECT_TRUE(parse({"--plan"}).plan);
  EXPECT_TRUE(parse({"--plan", "--pp", "2"}).plan);
  EXPECT_TRUE(parse({"--plan", "1"}).plan);
  EXPECT_TRUE(parse({"--plan=1"}).plan);
  EXPECT_FALSE(parse({"--plan", "0"}).plan);
  EXPECT_EQ(parse_error({"--plan", "yes"}), "--plan \"yes\" is neither 0 nor 1");
  EXPECT_EQ(parse_error({"--plan", "--plan"}), "--plan is given twice; give it once");
  EXPECT_EQ(parse_error({"--overfit"}), "--overfit needs a value; see --help");
  EXPECT_EQ(resolve_error({"--replicas", "2", "--pp", "2"}, 4),
            "--replicas 2 is for --plan; a run has ranks / pp replicas, start it with mpirun -np 4");
  EXPECT_EQ(resolve_error({"--plan", "--plan-costs", "measured"}, 1),
            "--plan-costs measured needs the devices of a run, --plan has none; leave it out");
  EXPECT_EQ(resolve_error({"--save-schedule", "a.txt"}, 1),
            "--save-schedule a.txt does not end in .csv, so --schedule could not read it; use --save-schedule "
            "a.txt.csv");
  EXPECT_EQ(resolved({"--plan", "--pp", "4", "--replicas", "2"}, 8).batch_tokens, 2 * 4 * 1024);
}

// What can be computed is not refused: micro-batches that replicas cannot share evenly, empty stages, blocks + 2
// stages.
TEST(TrainOptions, NothingIsRefusedThatCanBeComputed) {
  EXPECT_EQ(micro_batches_per_step(resolved({"-b", "1", "-t", "8", "-d", "56"}, 3)), 7);
  EXPECT_EQ(resolved({"--partition", "0,4,0", "--pp", "3"}, 3).partition, "0,4,0");
  EXPECT_EQ(resolved({"--partition", "0,2,2,0", "--pp", "2", "--schedule", "zb-v"}, 2).chunks, 0);
  EXPECT_EQ(resolved({"--schedule", "some.csv", "--pp", "2", "--partition", "1,1,2"}, 2).schedule, "some.csv");
  EXPECT_EQ(resolved({"--pp", "6"}, 6).pp, 6);
  EXPECT_EQ(resolved({"-j", "", "-v", "0"}, 1).val_every, 0);
  EXPECT_EQ(resolved({"-x", "0"}, 1).steps, 0);
}

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}

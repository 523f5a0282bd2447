// plan_interpreter.h -- runs a schedule's lists as the executor does, with random delays, and looks for harm.
//
// It shares no code with the checker: no graph, only ranks that walk their lists, buffers that hold tags, and links.
//   buffers    each slot has x, activations, y; a tag says what is in it (kind, stage, micro-batch)
//   link       one a hop and direction, rendezvous: a transfer runs when a send and a receive are posted, and copies
//              the tag from buffer to buffer; the n-th receive of a hop is meant for micro-batch n
//   receives   posted as soon as the slot's last user has finished and its dx has been sent (activation), or y has been
//              sent (gradient)
//   compute    waits for the receive that it needs and for nothing else; reads its tags at both ends of its time
// Harm is a hang, a wrong tag, a write into a buffer in use, a gradient summed out of order, or work left undone.
#pragma once

#include <map>
#include <queue>
#include <random>

#include "llmc/schedule.h"

enum class Outcome { kFinished, kHang, kCorrupt, kIncomplete };

class PlanInterpreter {
 public:
  PlanInterpreter(const Schedule& schedule, const std::vector<int>& slots, unsigned seed)
      : schedule_(schedule), random_(seed), ranks_(schedule.ranks), stages_(schedule.stages) {
    for (int s = 0; s < schedule.stages; s++) {
      stages_[s].slots.resize(slots[s]);
      stages_[s].released.assign(schedule.micro_batches, false);
    }
  }

  Outcome run() {
    for (;;) {
      for (int s = 0; s < schedule_.stages; s++) {
        match(&stages_[s].activation, s);
        match(&stages_[s].gradient, s);
      }
      for (int rank = 0; rank < schedule_.ranks; rank++) start_next(rank);
      if (corrupt_) return Outcome::kCorrupt;
      if (events_.empty()) break;
      const Event event = events_.top();
      events_.pop();
      now_ = event.time;
      if (event.rank >= 0) {
        finish_action(event.rank);
      } else {
        finish_transfer(event.link, event.stage);
      }
    }
    for (int rank = 0; rank < schedule_.ranks; rank++) {
      if (ranks_[rank].next < schedule_.actions[rank].size()) return Outcome::kHang;
    }
    for (const Stage& stage : stages_) {
      const int m = schedule_.micro_batches, backward = schedule_.forward_only ? 0 : m;
      if (!stage.activation.sends.empty() || !stage.gradient.sends.empty()) return Outcome::kIncomplete;
      if (stage.forward != m || stage.backward != backward || stage.weight != backward) return Outcome::kIncomplete;
    }
    return Outcome::kFinished;
  }

 private:
  struct Buffer {
    int tag = 0;
    int readers = 0;  // sends posted and not complete
    bool written = false;
  };
  struct Slot {
    Buffer x, activations, y;
  };
  struct Link {                 // into a stage; activation from stage-1 or gradient from stage+1
    std::queue<Buffer*> sends;  // posted, in the sender's order
    std::vector<bool> sent;     // by micro-batch
    std::queue<int> sent_as;    // the micro-batch that the sender meant
    int received = 0;           // complete receives
    bool busy = false;
  };
  struct Stage {
    std::vector<Slot> slots;
    Link activation, gradient;
    std::vector<bool> released;  // W or B of the micro-batch has finished
    int forward = 0, backward = 0, weight = 0;
  };
  struct Rank {
    size_t next = 0;
    bool busy = false;
  };
  struct Event {
    double time;
    int rank;    // >= 0: its action ends
    Link* link;  // else the transfer on this link ends
    int stage;
    bool operator<(const Event& other) const { return time > other.time; }
  };
  enum Kind { kInput = 1, kActivations, kInputGradientDone, kGradient };
  // x and y of neighbours are the same tensor: kInput of stage s is the output of stage s-1
  int tag(Kind kind, int stage, int i) const { return (kind * 64 + stage) * 1024 + i; }

  bool remote(int stage) const {  // the hop stage-1 -> stage is between ranks
    return stage > 0 && stage < schedule_.stages && schedule_.owner[stage] != schedule_.owner[stage - 1];
  }
  bool last(int stage) const { return stage == schedule_.stages - 1; }
  Slot& slot(int stage, int i) { return stages_[stage].slots[i % stages_[stage].slots.size()]; }

  double delay() {  // mostly short, sometimes very long, sometimes none
    const double u = std::uniform_real_distribution<double>(0, 1)(random_);
    return u < 0.2 ? 0 : u < 0.9 ? u : 20 * u;
  }
  void expect(bool right) { corrupt_ = corrupt_ || !right; }
  void read(const Buffer& buffer, int expected) { expect(buffer.tag == expected && !buffer.written); }
  void write(Buffer* buffer, int value) {
    expect(buffer->readers == 0 && !buffer->written);
    buffer->tag = value;
  }

  // ---- compute
  bool may_start(const Action& action) {
    const int s = action.stage, i = action.micro_batch;
    if (action.op == Op::kForward) {
      if (remote(s)) return stages_[s].activation.received > i;
      const int old = i - static_cast<int>(stages_[s].slots.size());
      return !schedule_.forward_only || old < 0 || output_taken(s, old);
    }
    if (action.op == Op::kBackwardWeight) return true;
    return !remote(s + 1) || stages_[s].gradient.received > i;
  }
  void start_next(int rank) {
    Rank& state = ranks_[rank];
    if (state.busy || state.next == schedule_.actions[rank].size()) return;
    const Action& action = schedule_.actions[rank][state.next];
    const bool exists = action.stage >= 0 && action.stage < schedule_.stages && action.micro_batch >= 0 &&
                        action.micro_batch < schedule_.micro_batches;
    if (!exists || schedule_.owner[action.stage] != rank || stages_[action.stage].slots.empty()) return expect(false);
    if (!may_start(action)) return;
    check_inputs(action);
    state.busy = true;
    events_.push({now_ + delay(), rank, nullptr, 0});
  }
  void check_inputs(const Action& action) {
    const int s = action.stage, i = action.micro_batch;
    const Slot& mine = slot(s, i);
    if (action.op == Op::kForward) {
      if (remote(s)) read(mine.x, tag(kInput, s, i));
      if (s > 0 && !remote(s)) read(slot(s - 1, i).y, tag(kInput, s, i));
      return;
    }
    const bool weight = action.op == Op::kBackwardWeight;
    read(mine.activations, tag(weight ? kInputGradientDone : kActivations, s, i));
    if (weight) return;
    read(mine.x, tag(kInput, s, i));
    read(mine.y, tag(kGradient, s, i));
  }
  void finish_action(int rank) {
    const Action& action = schedule_.actions[rank][ranks_[rank].next];
    const int s = action.stage, i = action.micro_batch;
    Slot& mine = slot(s, i);
    Stage& stage = stages_[s];
    check_inputs(action);
    if (action.op == Op::kForward) {
      expect(i == stage.forward++);  // the head adds its gradient here
      if (!remote(s)) write(&mine.x, tag(kInput, s, i));
      write(&mine.activations, tag(kActivations, s, i));
      write(&mine.y, last(s) ? tag(kGradient, s, i) : tag(kInput, s + 1, i));
      if (remote(s + 1)) post_send(&stages_[s + 1].activation, &mine.y, i);
    }
    if (action.op == Op::kBackward || action.op == Op::kBackwardInput) {
      expect(i == stage.backward++);  // layernorm and bias gradients
      write(&mine.x, s > 0 ? tag(kGradient, s - 1, i) : 0);
      write(&mine.activations, tag(kInputGradientDone, s, i));
      if (remote(s)) post_send(&stages_[s - 1].gradient, &mine.x, i);
      if (s > 0 && !remote(s)) write(&slot(s - 1, i).y, tag(kGradient, s - 1, i));
    }
    if (action.op == Op::kBackward || action.op == Op::kBackwardWeight) {
      expect(i == stage.weight++);
      write(&mine.activations, 0);
      write(&mine.y, 0);
      stage.released[i] = true;
    }
    ranks_[rank].busy = false;
    ranks_[rank].next++;
  }

  // ---- links
  static bool is_set(const std::vector<bool>& flags, int i) { return i < static_cast<int>(flags.size()) && flags[i]; }
  /// The next stage has the output of (s,i): the whole life of a slot without backward pass.
  bool output_taken(int s, int i) const {
    if (last(s)) return stages_[s].forward > i;
    return remote(s + 1) ? is_set(stages_[s + 1].activation.sent, i) : stages_[s + 1].forward > i;
  }
  void post_send(Link* link, Buffer* buffer, int i) {
    buffer->readers++;
    link->sends.push(buffer);
    link->sent_as.push(i);
  }
  bool receive_posted(const Link* link, int s) {
    const int n = link->received;
    if (n >= schedule_.micro_batches || stages_[s].slots.empty()) return false;
    if (link == &stages_[s].gradient) return is_set(stages_[s + 1].activation.sent, n);
    const int old = n - static_cast<int>(stages_[s].slots.size());
    if (old < 0) return true;
    if (schedule_.forward_only) return output_taken(s, old);
    return stages_[s].released[old] && is_set(stages_[s - 1].gradient.sent, old);
  }
  Buffer* destination(const Link* link, int s) {
    Slot& mine = slot(s, link->received);
    return link == &stages_[s].gradient ? &mine.y : &mine.x;
  }
  void match(Link* link, int s) {
    if (link->busy || link->sends.empty() || !receive_posted(link, s)) return;
    Buffer* to = destination(link, s);
    expect(to->readers == 0 && !to->written && !link->sends.front()->written);
    to->written = true;
    link->busy = true;
    in_the_air_[link] = link->sends.front()->tag;
    events_.push({now_ + delay(), -1, link, s});
  }
  void finish_transfer(Link* link, int s) {
    Buffer* from = link->sends.front();
    Buffer* to = destination(link, s);
    expect(from->tag == in_the_air_[link]);
    to->written = false;
    to->tag = from->tag;
    from->readers--;
    if (static_cast<int>(link->sent.size()) < schedule_.micro_batches)
      link->sent.resize(schedule_.micro_batches, false);
    link->sent[link->sent_as.front()] = true;
    link->sends.pop();
    link->sent_as.pop();
    link->received++;
    link->busy = false;
  }

  const Schedule& schedule_;
  std::mt19937 random_;
  std::vector<Rank> ranks_;
  std::vector<Stage> stages_;
  std::priority_queue<Event> events_;
  std::map<const Link*, int> in_the_air_;
  double now_ = 0;
  bool corrupt_ = false;
};

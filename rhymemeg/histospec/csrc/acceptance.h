// Probability that each token of a proposed draft is accepted, learnt while running, and the choice of draft lengths that
// maximises expected tokens per second. The method is described in rhymemeg/histospec/policy.py (`goodput`).
//
// A token's class is (length of the match, place in the draft, share of the votes that its branch got, number of
// occurrences on its path); a class counts trials and acceptances. A prompt's and a request's record shift the log-odds.

#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace rhymemeg {

struct ProposalView {  // of one engine step; row i: [offsets[i], offsets[i + 1])
  const std::int32_t* slots;
  const std::int64_t* offsets;
  const std::int32_t* matches;
  const std::int32_t* occurrences;
  const float* probabilities;
  std::size_t rows;
};

class AcceptanceModel {
 public:
  AcceptanceModel();

  // A request takes a slot: its record starts empty.
  void start(std::int32_t slot, std::int64_t prompt);

  // S_j of every proposed token: probability that it and all before it are accepted.
  void survival(const ProposalView& proposals, std::vector<double>& out);

  // Lengths that maximise (base + sum of weight * S over the chosen tokens) / times[number of chosen tokens]; `times` has an
  // entry for 0 up to all proposed tokens. If the best is no draft at all, the best `explore` tokens are chosen instead.
  // What was chosen is remembered until `observe`.
  void choose(const ProposalView& proposals, const double* weights, double base, const double* times, std::size_t explore,
              std::int64_t* lengths);

  // The step verified no draft for these slots, or drafted[i] tokens of which the first accepted[i] were accepted.
  void observe(const std::int32_t* slots, const std::int64_t* drafted, const std::int64_t* accepted, std::size_t rows);

  const std::vector<double>& trials() const { return trials_; }
  const std::vector<double>& successes() const { return successes_; }

 private:
  struct Remembered {
    std::uint16_t kind;
    float accept;
  };
  struct Slot {
    std::int64_t prompt = 0;
    double shift = 0;
    std::vector<Remembered> chosen;
  };
  Slot& slot(std::int32_t index);

  std::vector<double> trials_, successes_;
  std::vector<Slot> slots_;
  std::unordered_map<std::int64_t, double> prompts_;
  std::vector<std::uint16_t> kinds_;  // of the proposals in hand
  std::vector<float> accepts_;
};

}  // namespace rhymemeg

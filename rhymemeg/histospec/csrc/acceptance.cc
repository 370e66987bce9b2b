#include "acceptance.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace rhymemeg {
namespace {

constexpr int kMatches = 8, kPlaces = 6, kShares = 5, kSupports = 4;
constexpr double kPrior = 6;        // trials that the start figures count for
constexpr double kKept = 1 << 14;   // trials of a class after which older ones fade
constexpr double kRequestRate = 0.15, kRequestDecay = 0.98, kRequestLimit = 2.0;
constexpr double kPromptRate = 0.03, kPromptLimit = 1.5;

int match_class(int match) { return match >= 32 ? 7 : match >= 16 ? 6 : match >= 9 ? 5 : match >= 6 ? 4 : match >= 4 ? 3 : std::max(match - 1, 0); }
int place_class(std::size_t place) { return place >= 16 ? 5 : place >= 8 ? 4 : place >= 4 ? 3 : place >= 2 ? 2 : static_cast<int>(place); }
int share_class(double share) { return share > 0.999 ? 4 : share > 0.8 ? 3 : share > 0.55 ? 2 : share > 0.35 ? 1 : 0; }
int support_class(double support) { return support > 7.5 ? 3 : support > 3.5 ? 2 : support > 1.5 ? 1 : 0; }
double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

}  // namespace

AcceptanceModel::AcceptanceModel() {
  for (int m = 0; m < kMatches; ++m) {
    for (int p = 0; p < kPlaces; ++p) {
      for (int s = 0; s < kShares; ++s) {
        for (int n = 0; n < kSupports; ++n) {
          trials_.push_back(kPrior);
          successes_.push_back(kPrior * sigmoid(-1.3 + 0.3 * m + 0.2 * p + 0.45 * (s - 2) + 0.25 * n));
        }
      }
    }
  }
}

AcceptanceModel::Slot& AcceptanceModel::slot(std::int32_t index) {
  if (index < 0) throw std::out_of_range("slots are not negative");
  if (static_cast<std::size_t>(index) >= slots_.size()) slots_.resize(static_cast<std::size_t>(index) + 1);
  return slots_[static_cast<std::size_t>(index)];
}

void AcceptanceModel::start(std::int32_t index, std::int64_t prompt) {
  Slot& s = slot(index);
  s.prompt = prompt;
  s.shift = 0;
  s.chosen.clear();
}

void AcceptanceModel::survival(const ProposalView& v, std::vector<double>& out) {
  const auto total = static_cast<std::size_t>(v.offsets[v.rows]);
  out.resize(total);
  kinds_.resize(total);
  accepts_.resize(total);
  for (std::size_t row = 0; row < v.rows; ++row) {
    const Slot& s = slot(v.slots[row]);
    const auto prompt = prompts_.find(s.prompt);
    const double factor = std::exp(s.shift + (prompt == prompts_.end() ? 0.0 : prompt->second));  // of the odds
    const auto first = static_cast<std::size_t>(v.offsets[row]);
    const int match = match_class(v.matches[row]);
    double path = 1, survival = 1;
    for (std::size_t i = first; i < static_cast<std::size_t>(v.offsets[row + 1]); ++i) {
      const int kind = ((match * kPlaces + place_class(i - first)) * kShares + share_class(v.probabilities[i] / path)) * kSupports +
                       support_class(static_cast<double>(v.probabilities[i]) * v.occurrences[row]);
      path = v.probabilities[i];
      const double hits = successes_[static_cast<std::size_t>(kind)] * factor;
      const double accept = hits / (hits + trials_[static_cast<std::size_t>(kind)] - successes_[static_cast<std::size_t>(kind)]);
      survival *= accept;
      out[i] = survival;
      kinds_[i] = static_cast<std::uint16_t>(kind);
      accepts_[i] = static_cast<float>(accept);
    }
  }
}

void AcceptanceModel::choose(const ProposalView& v, const double* weights, double base, const double* times, std::size_t explore,
                             std::int64_t* lengths) {
  thread_local std::vector<double> values;
  struct Item {
    double value;
    std::uint32_t token, row;
  };
  thread_local std::vector<Item> order;
  survival(v, values);
  order.clear();
  for (std::size_t row = 0; row < v.rows; ++row) {
    lengths[row] = 0;
    for (auto i = static_cast<std::size_t>(v.offsets[row]); i < static_cast<std::size_t>(v.offsets[row + 1]); ++i) {
      order.push_back({values[i] * weights[row], static_cast<std::uint32_t>(i), static_cast<std::uint32_t>(row)});
    }
  }
  std::sort(order.begin(), order.end(), [](const Item& a, const Item& b) { return a.value != b.value ? a.value > b.value : a.token < b.token; });
  double gain = base, best_rate = base / times[0];
  std::size_t best = 0;
  for (std::size_t k = 0; k < order.size(); ++k) {
    gain += order[k].value;
    const double rate = gain / times[k + 1];
    if (rate > best_rate) {
      best_rate = rate;
      best = k + 1;
    }
  }
  if (best == 0) best = std::min(explore, order.size());
  // Survival falls along a draft and equal values keep their order, so the chosen tokens of a row are its first.
  for (std::size_t k = 0; k < best; ++k) ++lengths[order[k].row];
  for (std::size_t row = 0; row < v.rows; ++row) {
    auto& chosen = slot(v.slots[row]).chosen;
    chosen.clear();
    for (std::int64_t i = v.offsets[row]; i < v.offsets[row] + lengths[row]; ++i) {
      chosen.push_back({kinds_[static_cast<std::size_t>(i)], accepts_[static_cast<std::size_t>(i)]});
    }
  }
}

void AcceptanceModel::observe(const std::int32_t* slots, const std::int64_t* drafted, const std::int64_t* accepted, std::size_t rows) {
  for (std::size_t row = 0; row < rows; ++row) {
    Slot& s = slot(slots[row]);
    // Tokens after the first rejection say nothing.
    const auto tried = std::min<std::int64_t>({accepted[row] + 1, drafted[row], static_cast<std::int64_t>(s.chosen.size())});
    double error = 0;
    for (std::int64_t i = 0; i < tried; ++i) {
      const Remembered& token = s.chosen[static_cast<std::size_t>(i)];
      const double hit = i < accepted[row] ? 1 : 0;
      error += hit - static_cast<double>(token.accept);
      double& trials = trials_[token.kind];
      double& successes = successes_[token.kind];
      trials += 1;
      successes += hit * 0.998 + 0.001;  // never quite 0 or 1
      if (trials > kKept) {
        trials /= 2;
        successes /= 2;
      }
    }
    if (tried > 0) {
      s.shift = std::min(std::max(kRequestDecay * s.shift + kRequestRate * error, -kRequestLimit), kRequestLimit);
      double& shift = prompts_[s.prompt];
      shift = std::min(std::max(shift + kPromptRate * error, -kPromptLimit), kPromptLimit);
    }
    s.chosen.clear();
  }
}

}  // namespace rhymemeg

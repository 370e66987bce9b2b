// Python bindings: rhymemeg.histospec._index. What each call means is documented in rhymemeg/histospec/_index.pyi; here
// arrays are only checked for shape and the GIL is released around the work.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "acceptance.h"
#include "bit_pack.h"
#include "draft_index.h"

namespace py = pybind11;
using rhymemeg::AcceptanceModel;
using rhymemeg::DraftBatch;
using rhymemeg::DraftIndex;
using rhymemeg::DraftOptions;
using rhymemeg::Token;

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;

template <typename T>
std::size_t length_of(const Array<T>& array, const char* name) {
  if (array.ndim() != 1) throw std::invalid_argument(std::string(name) + " must be one-dimensional");
  return static_cast<std::size_t>(array.size());
}

template <typename T>
py::array_t<T> copy_out(const std::vector<T>& values) {
  py::array_t<T> out(static_cast<py::ssize_t>(values.size()));
  std::copy(values.begin(), values.end(), out.mutable_data());
  return out;
}

void load(DraftIndex& self, std::int64_t prompt, const Array<Token>& context, const Array<Token>& tokens, const Array<std::int64_t>& lengths,
          const Array<float>& weights, const Array<Token>& prompt_tokens, float prompt_weight) {
  const std::size_t responses = length_of(lengths, "lengths");
  if (length_of(weights, "weights") != responses) throw std::invalid_argument("weights and lengths differ in size");
  std::int64_t total = 0;
  for (std::size_t i = 0; i < responses; ++i) {
    if (lengths.data()[i] < 0) throw std::invalid_argument("lengths must not be negative");
    total += lengths.data()[i];
  }
  if (static_cast<std::int64_t>(length_of(tokens, "tokens")) != total) {
    throw std::invalid_argument("lengths add up to " + std::to_string(total) + ", tokens has " + std::to_string(tokens.size()));
  }
  const std::size_t n_context = length_of(context, "context"), n_prompt = length_of(prompt_tokens, "prompt_tokens");
  const py::gil_scoped_release release;
  self.load(prompt, context.data(), n_context, tokens.data(), lengths.data(), weights.data(), responses, prompt_tokens.data(), n_prompt,
            prompt_weight);
}

std::int32_t open(DraftIndex& self, std::int64_t prompt, const Array<Token>& context, float weight, bool searchable) {
  const std::size_t n = length_of(context, "context");
  const py::gil_scoped_release release;
  return self.open(prompt, context.data(), n, weight, searchable);
}

void append(DraftIndex& self, const Array<std::int32_t>& slots, const Array<std::int64_t>& offsets, const Array<Token>& tokens) {
  const std::size_t rows = length_of(slots, "slots");
  const auto n = static_cast<std::int64_t>(length_of(tokens, "tokens"));
  if (length_of(offsets, "offsets") != rows + 1 || offsets.data()[0] != 0 || offsets.data()[rows] != n ||
      !std::is_sorted(offsets.data(), offsets.data() + rows + 1)) {
    throw std::invalid_argument("offsets must rise from 0 to the number of tokens and have one entry more than slots");
  }
  const py::gil_scoped_release release;
  self.append(slots.data(), offsets.data(), rows, tokens.data());
}

py::tuple draft(const DraftIndex& self, const Array<std::int32_t>& slots, const Array<std::int32_t>& limits, int min_match, int max_match,
                int max_occurrences, float min_path_probability) {
  const std::size_t rows = length_of(slots, "slots");
  if (length_of(limits, "limits") != rows) throw std::invalid_argument("slots and limits differ in size");
  if (min_match < 1 || max_match < min_match || max_occurrences < 1) {
    throw std::invalid_argument("need 1 <= min_match <= max_match and 1 <= max_occurrences");
  }
  DraftOptions options;
  options.min_match = min_match;
  options.max_match = max_match;
  options.max_occurrences = max_occurrences;
  options.min_path_probability = min_path_probability;
  DraftBatch batch;
  {
    const py::gil_scoped_release release;
    self.draft(slots.data(), limits.data(), rows, options, batch);
  }
  return py::make_tuple(copy_out(batch.tokens), copy_out(batch.offsets), copy_out(batch.matches), copy_out(batch.occurrences),
                        copy_out(batch.probabilities));
}

// The arrays of one step's proposals, checked against each other.
rhymemeg::ProposalView view(const Array<std::int32_t>& slots, const Array<std::int64_t>& offsets, const Array<std::int32_t>& matches,
                            const Array<std::int32_t>& occurrences, const Array<float>& probabilities) {
  const std::size_t rows = length_of(slots, "slots");
  if (length_of(offsets, "offsets") != rows + 1 || length_of(matches, "matches") != rows || length_of(occurrences, "occurrences") != rows ||
      static_cast<std::int64_t>(length_of(probabilities, "probabilities")) != offsets.data()[rows] || offsets.data()[0] != 0 ||
      !std::is_sorted(offsets.data(), offsets.data() + rows + 1)) {
    throw std::invalid_argument("proposals: array sizes do not agree");
  }
  return {slots.data(), offsets.data(), matches.data(), occurrences.data(), probabilities.data(), rows};
}

py::array_t<double> survival(AcceptanceModel& self, const Array<std::int32_t>& slots, const Array<std::int64_t>& offsets,
                             const Array<std::int32_t>& matches, const Array<std::int32_t>& occurrences, const Array<float>& probabilities) {
  std::vector<double> out;
  self.survival(view(slots, offsets, matches, occurrences, probabilities), out);
  return copy_out(out);
}

py::array_t<std::int64_t> choose(AcceptanceModel& self, const Array<std::int32_t>& slots, const Array<std::int64_t>& offsets,
                                 const Array<std::int32_t>& matches, const Array<std::int32_t>& occurrences,
                                 const Array<float>& probabilities, const Array<double>& weights, double base, const Array<double>& times,
                                 std::size_t explore) {
  const rhymemeg::ProposalView proposals = view(slots, offsets, matches, occurrences, probabilities);
  if (length_of(weights, "weights") != proposals.rows || length_of(times, "times") != length_of(probabilities, "probabilities") + 1) {
    throw std::invalid_argument("weights needs an entry a row, times one more than there are tokens");
  }
  py::array_t<std::int64_t> out(static_cast<py::ssize_t>(proposals.rows));
  self.choose(proposals, weights.data(), base, times.data(), explore, out.mutable_data());
  return out;
}

void observe(AcceptanceModel& self, const Array<std::int32_t>& slots, const Array<std::int64_t>& drafted, const Array<std::int64_t>& accepted) {
  const std::size_t rows = length_of(slots, "slots");
  if (length_of(drafted, "drafted") != rows || length_of(accepted, "accepted") != rows) {
    throw std::invalid_argument("slots, drafted and accepted differ in size");
  }
  self.observe(slots.data(), drafted.data(), accepted.data(), rows);
}

void check_bits(int bits) {
  if (bits < 1 || bits > 31) throw std::invalid_argument("bits must be between 1 and 31");
}

py::bytes pack(const Array<Token>& tokens, int bits, std::int64_t limit) {
  check_bits(bits);
  if (limit > std::int64_t{1} << bits) throw std::invalid_argument("limit does not fit in bits");
  const std::size_t n = length_of(tokens, "tokens");
  std::string out(rhymemeg::packed_size(n, bits), '\0');
  {
    const py::gil_scoped_release release;
    rhymemeg::pack_bits(tokens.data(), n, bits, limit, reinterpret_cast<std::uint8_t*>(&out[0]));
  }
  return py::bytes(out);
}

py::array_t<Token> unpack(const py::buffer& packed, std::int64_t n, int bits) {
  check_bits(bits);
  const py::buffer_info info = packed.request();
  const auto size = static_cast<std::size_t>(info.size * info.itemsize);
  if (n < 0 || rhymemeg::packed_size(static_cast<std::size_t>(n), bits) > size) {
    throw std::invalid_argument(std::to_string(n) + " tokens of " + std::to_string(bits) + " bits need more than " + std::to_string(size) +
                                " bytes");
  }
  py::array_t<Token> out(static_cast<py::ssize_t>(n));
  rhymemeg::unpack_bits(static_cast<const std::uint8_t*>(info.ptr), static_cast<std::size_t>(n), bits, out.mutable_data());
  return out;
}

}  // namespace

PYBIND11_MODULE(_index, m) {
  m.doc() = "Draft index and token packing in C++; documented in _index.pyi.";
  const py::array_t<Token> none(0);
  py::class_<DraftIndex>(m, "DraftIndex")
      .def(py::init<>())
      .def("load", &load, py::arg("prompt_id"), py::kw_only(), py::arg("context"), py::arg("tokens"), py::arg("lengths"), py::arg("weights"),
           py::arg("prompt_tokens") = none, py::arg("prompt_weight") = 0.0f)
      .def("open", &open, py::arg("prompt_id"), py::kw_only(), py::arg("context"), py::arg("weight") = 1.0f, py::arg("searchable") = true)
      .def("append", &append, py::arg("slots"), py::arg("offsets"), py::arg("tokens"))
      .def("draft", &draft, py::arg("slots"), py::arg("limits"), py::kw_only(), py::arg("min_match") = 1,
           py::arg("max_match") = rhymemeg::ContextIndex::kMaxContext, py::arg("max_occurrences") = 64,
           py::arg("min_path_probability") = 0.0f)
      .def("close", &DraftIndex::close, py::arg("slot"))
      .def("release", &DraftIndex::release, py::arg("prompt_id"), py::call_guard<py::gil_scoped_release>())
      .def("__contains__", &DraftIndex::has, py::arg("prompt_id"))
      .def_property_readonly("num_prompts", &DraftIndex::num_prompts)
      .def_property_readonly("num_open", &DraftIndex::num_open)
      .def_property_readonly("num_tokens", &DraftIndex::num_tokens)
      .def_property_readonly("memory_bytes", &DraftIndex::memory_bytes);
  py::class_<AcceptanceModel>(m, "AcceptanceModel")
      .def(py::init<>())
      .def("start", &AcceptanceModel::start, py::arg("slot"), py::arg("prompt_id"))
      .def("survival", &survival, py::arg("slots"), py::arg("offsets"), py::arg("matches"), py::arg("occurrences"), py::arg("probabilities"))
      .def("choose", &choose, py::arg("slots"), py::arg("offsets"), py::arg("matches"), py::arg("occurrences"), py::arg("probabilities"),
           py::kw_only(), py::arg("weights"), py::arg("base"), py::arg("times"), py::arg("explore") = 0)
      .def("observe", &observe, py::arg("slots"), py::arg("drafted"), py::arg("accepted"))
      .def_property_readonly("trials", [](const AcceptanceModel& self) { return copy_out(self.trials()); })
      .def_property_readonly("successes", [](const AcceptanceModel& self) { return copy_out(self.successes()); });
  m.def("pack", &pack, py::arg("tokens"), py::arg("bits"), py::arg("limit"));
  m.def("unpack", &unpack, py::arg("packed"), py::arg("n"), py::arg("bits"));
  m.attr("MAX_CONTEXT") = rhymemeg::ContextIndex::kMaxContext;
  m.attr("MAX_DOCUMENT_LENGTH") = rhymemeg::ContextIndex::kMaxLength - 1;
}

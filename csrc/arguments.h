// The arguments and results of an operator, each a struct generated from one list of its fields. A
// list of arguments, X(type, name, rule, arguments of the rule), generates the unpacking from the
// dispatcher's stack, the only code in which a field has a position, and the checks that raise with
// an argument's name. Results are tensors: their list is their names.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <stdexcept>
#include <string>

namespace attnfast {
namespace {

using torch::stable::Tensor;
using Optional = std::optional<Tensor>;

// The dispatcher's stack of arguments; fields pop their values in order.
class Stack {
  StableIValue* next;

 protected:
  template <class T>
  T pop() {
    if constexpr (std::is_same_v<T, std::string>) return pop_string();
    else return torch::stable::detail::to<T>(*next++);
  }

 private:
  // PyTorch's own conversion copies the string and never frees it.
  std::string pop_string() {
    const auto handle = torch::stable::detail::to<StringHandle>(*next++);
    size_t length = 0;
    const char* text = nullptr;
    TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
    TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &text));
    std::string copy(text, length);
    TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
    return copy;
  }

 public:
  explicit Stack(StableIValue* next) : next(next) {}
};

// Return the number of fields of a list, each of which ends in a comma.
consteval uint64_t count_fields(const char* fields) {
  uint64_t count = 0;
  for (; *fields; ++fields) count += *fields == ',';
  return count;
}

#define ATTNFAST_ARGUMENT(type, name, ...) type name = pop<type>();
#define ATTNFAST_LISTED(type, name, ...) #type " " #name ", "
#define ATTNFAST_RULE(type, name, rule, ...) \
  this->check(this->rule(given.name __VA_OPT__(, ) __VA_ARGS__), #name);

// `Sizes` defines the rules. It is constructed from the arguments and defines the names that the
// rules of the list use.
#define ATTNFAST_ARGUMENTS(Name, operator_name, LIST, Sizes)                             \
  struct Name : Stack {                                                                  \
    static constexpr const char* kOperator = operator_name;                              \
    static constexpr const char* kFields = LIST(ATTNFAST_LISTED);                        \
    using Stack::Stack;                                                                  \
    LIST(ATTNFAST_ARGUMENT)                                                              \
    struct ArgumentChecker : Sizes {                                                     \
      explicit ArgumentChecker(const Name& given) : Sizes(given) { LIST(ATTNFAST_RULE) } \
    };                                                                                   \
  };

template <class... Tensors>
void box_all(StableIValue* stack, const Tensors&... tensors) {
  ((*stack++ = torch::stable::detail::from(tensors)), ...);
}

#define ATTNFAST_RESULTS(Name, ...)                                      \
  struct Name {                                                          \
    static constexpr const char* kFields = #__VA_ARGS__ ",";             \
    Tensor __VA_ARGS__;                                                  \
    void box(StableIValue* stack) const { box_all(stack, __VA_ARGS__); } \
  };

// Functions that take arguments and return results, wrapped for the dispatcher.
template <auto... functions>
class Operators {
  template <auto function, class Arguments, class Results>
  struct Operator {
    static void call(StableIValue* stack, uint64_t given, uint64_t expected) {
      if (given != count_fields(Arguments::kFields) || expected != count_fields(Results::kFields))
        throw std::runtime_error(std::string(Arguments::kOperator) +
                                 ": this library was built for another version of attnfast");
      function(Arguments(stack)).box(stack);
    }
    static void implement(torch::stable::detail::StableLibrary& library) {
      library.impl(Arguments::kOperator, &call);
    }
    static std::string listed() {
      return std::string(Arguments::kOperator) + "(" + Arguments::kFields + ") -> " + Results::kFields +
             "\n";
    }
  };
  template <auto function, class Arguments, class Results>
  static Operator<function, Arguments, Results> of(Results (*)(const Arguments&));

 public:
  static void implement(torch::stable::detail::StableLibrary& library) {
    (decltype(of<functions>(functions))::implement(library), ...);
  }
  // Return one line for each operator; a test compares them with the schemas.
  static std::string listed() { return (decltype(of<functions>(functions))::listed() + ...); }
};

#define ATTNFAST_EXPORT extern "C" __attribute__((visibility("default"), used))

}  // namespace
}  // namespace attnfast
